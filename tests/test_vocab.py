"""Vocabularies change, and what a model knows stays with its tokens: weights, averages and optimizer."""

import json
import shutil

import pytest
import torch

from f5kit.card import find_base
from f5kit.checkpoint import describe_model, export_model, fresh_model, load_model, load_tokenizer
from f5kit.config import PRESETS
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.runs import Checkpoint
from f5kit.text import Tokenizer, byte_vocab, english_vocab
from f5kit.trainer import Trainer
from f5kit.vocab import TABLE, extend_vocab, find_extended, remap_rows, remap_vocab, row_sources
from f5kit.weights import file_hash, read_tensors

NEW = "ñ¿ấĐж"


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A short run of the tiny model."""
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=2, update_frames=800, precision="fp32")
    return Trainer(plan, dataset, tmp_path_factory.mktemp("runs") / "tiny").fit()


def row(table, tokenizer, token):
    return table[tokenizer.vocab.index(token) + 1]


def test_old_ids_and_sounds_stay_and_new_rows_start_near(tmp_path, awake):
    model = awake(fresh_model(PRESETS["tiny"], Tokenizer(english_vocab())))
    export_model(model, tmp_path / "base", torch.float32)
    out = extend_vocab(tmp_path / "base", NEW, tmp_path / "more", related={"ж": "j"})
    larger = load_model(out)
    assert larger.tokenizer.vocab == english_vocab() + sorted(NEW)
    assert larger.config.vocab_size == 100 and describe_model(out).vocab_size == 100
    old, new = model.state_dict(), larger.state_dict()
    assert torch.equal(new[TABLE][:96], old[TABLE])
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items() if name != TABLE)
    for token, start in {"ñ": "n", "¿": "?", "ấ": "a", "Đ": "D", "ж": "j"}.items():
        assert torch.equal(row(new[TABLE], larger.tokenizer, token), row(old[TABLE], model.tokenizer, start)), token
    again = extend_vocab(tmp_path / "base", ["ж", "n\u0303"], tmp_path / "more")  # replaced, and composed
    table = load_model(again).state_dict()[TABLE]
    assert load_tokenizer(again).vocab[95:] == ["ñ", "ж"]
    assert torch.allclose(row(table, load_tokenizer(again), "ж"), old[TABLE][1:].mean(dim=0))
    mel, text = torch.randn(1, 20, 100), [model.tokenizer.encode("Hello.")]
    spoken = [list(m.sample(mel, text, [40], steps=2))[-1] for m in (model, larger)]
    assert torch.equal(*spoken)


def test_nearest_letters():
    known = [*english_vocab(), "â", "ă", "ö"]
    start = {"ấ": "â", "ặ": "ă", "ạ": "a", "ế": "e", "đ": "d", "ß": "s", "ı": "i", "Ö": "O", "Ș": "S", "ж": None}
    found = row_sources(known, list(start), {})
    assert {token: i if i is None else known[i] for token, i in zip(start, found, strict=True)} == start
    assert row_sources(["ñ", " "], ["Ñ"], {}) == [0]  # the other case, where there is no plain letter
    with pytest.raises(UserError, match="related names 'щ', which the vocabulary lacks"):
        row_sources(known, ["ж"], {"ж": "щ"})


def test_a_checkpoint_keeps_averages_and_optimizer(run, tmp_path):
    source = run.checkpoints()[-1].path
    out = extend_vocab(run.path, "ñж", tmp_path / "more")
    assert Checkpoint(out, 2).damage() is None
    old, new = load_tokenizer(source), load_tokenizer(out)
    for name in ("model.safetensors", "ema.safetensors"):
        before, after = read_tensors(source / name)[TABLE], read_tensors(out / name)[TABLE]
        assert torch.equal(after[:96], before)
        assert torch.equal(row(after, new, "ñ"), row(before, old, "n"))
    before, after = (read_tensors(folder / "optimizer.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    for entry in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[f"{TABLE}/{entry}"][:96], before[f"{TABLE}/{entry}"])
        assert before[f"{TABLE}/{entry}"].any() and not after[f"{TABLE}/{entry}"][96:].any()
    assert after[f"{TABLE}/step"] == before[f"{TABLE}/step"]
    assert load_model(out, weights="raw").tokenizer.vocab[-2:] == ["ñ", "ж"]


def test_a_run_resumes_from_an_extended_checkpoint(run, dataset, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "update_000002"
    larger = extend_vocab(folder, "ñ", tmp_path / "more")
    shutil.rmtree(folder)
    shutil.copytree(larger, folder)
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=4, update_frames=800, precision="fp32")
    resumed = Trainer(plan, dataset, tmp_path / "run", change=True).fit()
    assert [e["resumed"] for e in resumed.events() if e["event"] == "start"] == [False, True]
    assert load_model(resumed.path).config.vocab_size == 96


def test_rows_follow_their_tokens_into_another_order(run, tmp_path):
    source, old = run.checkpoints()[-1].path, english_vocab()
    order = [" ", *reversed(old[40:]), "é", *old[1:30]]
    out = remap_vocab(source, order, tmp_path / "other")
    before, after = (read_tensors(folder / "model.safetensors")[TABLE] for folder in (source, out))
    assert torch.equal(after[0], before[0])
    for i, token in enumerate(order):
        assert torch.equal(after[i + 1], before[old.index("e" if token == "é" else token) + 1]), token
    back = remap_vocab(out, old, tmp_path / "back")
    table = read_tensors(back / "model.safetensors")[TABLE]
    kept = [0, *(i + 1 for i, token in enumerate(old) if token in order)]
    assert torch.equal(table[kept], before[kept])


def test_moments_in_blocks_begin_anew(run, tmp_path):
    """8-bit Adam's state of a table ends its blocks of 256 values anywhere, so it can't be moved by rows."""
    from f5kit.vocab import _remap_optimizer

    eight = {f"{TABLE}/state1": torch.zeros(3, 4, dtype=torch.uint8), f"{TABLE}/absmax1": torch.zeros(1)}
    other = {"transformer.proj_out.weight/state1": torch.zeros(2, 2, dtype=torch.uint8)}
    assert _remap_optimizer(eight | other, [" ", "a"], [" ", "a", "b"]) == other


def test_remap_rows_keeps_the_filler_row():
    table = torch.arange(6.0).reshape(3, 2)
    assert remap_rows(table, [1, None, 0]).tolist() == [[0, 1], [4, 5], [3, 4], [2, 3]]
    assert remap_rows(table, [None], mean=False).tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("new", "told"),
    [("abc", "knows every one"), (["ab"], "'ab' can't be a token"), (["\n"], "can't be a token"), ([], "knows every")],
)
def test_what_can_not_be_added(new, told, tmp_path):
    with pytest.raises(UserError, match=told):
        extend_vocab("tiny", new, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_bytes_need_no_letters_and_foreign_folders_stay(tmp_path):
    config = PRESETS["tiny"].replace(vocab_size=256, tokenizer="byte")
    export_model(fresh_model(config, Tokenizer(byte_vocab(), "byte")), tmp_path / "bytes")
    with pytest.raises(UserError, match="reads bytes"):
        extend_vocab(tmp_path / "bytes", "ñ", tmp_path / "out")
    before = file_hash(tmp_path / "bytes" / "model.safetensors")
    with pytest.raises(UserError, match="was not made by this function"):
        extend_vocab("tiny", "ñ", tmp_path / "bytes")
    assert file_hash(tmp_path / "bytes" / "model.safetensors") == before


def test_the_base_of_an_extended_model_is_found(tmp_path):
    out = extend_vocab("tiny", "ñ", tmp_path / "out", normaliser="basic+numbers:vi")
    assert load_model(out).tokenizer.normaliser == "basic+numbers:vi"
    assert json.loads((out / "config.json").read_text())["normaliser"] == "basic+numbers:vi"
    assert find_extended("tiny", out) == str(out)
    assert find_extended("starter", out) == "starter" and find_extended("tiny", tmp_path / "no") == "tiny"
    assert find_base(str(out)) == find_base("tiny")
