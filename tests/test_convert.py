"""Between checkpoint worlds: what goes out comes back to the bit, and what comes in can do no harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from f5kit import weights as weights_module
from f5kit.checkpoint import export_model, fresh_model, load_model, readings
from f5kit.config import PRESETS, MelConfig
from f5kit.convert import convert_model, main
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.text import Tokenizer, english_vocab
from f5kit.trainer import Trainer
from f5kit.weights import convert_pickle, read_tensors, write_tensors

SMALL = dict(dim=64, depth=2, heads=2, dim_head=32, text_dim=32, conv_layers=1, vocab_size=95)
V0 = PRESETS["F5TTS_Base"].replace(name="F5TTS_64x2", **SMALL)
LEGACY = {"mel_spec.mel_stft.mel_scale.fb": (513, 100), "mel_spec.mel_stft.spectrogram.window": (1024,)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(awake):
    return awake(fresh_model(V0, Tokenizer(english_vocab(), V0.tokenizer, V0.normaliser)))


def same(a, b):
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(a.state_dict()[k], v) for k, v in b.state_dict().items()
    )


def training_pt(folder: Path, model, legacy=False) -> Path:
    """A checkpoint as upstream's Trainer writes it: the average is the model, the raw weights are twice as large."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {k: v if k.endswith("inv_freq") else 2 * v for k, v in model.state_dict().items()}
    ema = {f"ema_model.{k}": v for k, v in model.state_dict().items()}
    if legacy:
        raw |= {k: torch.zeros(shape) for k, shape in LEGACY.items()}
        ema |= {f"ema_model.{k}": torch.zeros(shape) for k, shape in LEGACY.items()}
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    content = {
        "model_state_dict": raw,
        "ema_model_state_dict": {**ema, "initted": torch.tensor(True), "step": torch.tensor(7)},
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": {"last_epoch": 7},
        "step" if legacy else "update": 7,
    }
    torch.save(content, folder / "model_last.pt")
    model.tokenizer.save(folder / "vocab.txt")
    return folder / "model_last.pt"


# ---- out and back


def test_upstreams_layout_out_and_back_to_the_bit(model, tmp_path):
    export_model(model, tmp_path / "model_1200", torch.float32)
    out = convert_model(tmp_path / "model_1200", tmp_path / "up", "upstream")
    assert sorted(f.name for f in out.iterdir()) == ["config.json", "model.yaml", "model_1200.safetensors", "vocab.txt"]
    stored = read_tensors(out / "model_1200.safetensors")
    assert stored.pop("initted").item() is True and stored.pop("step").item() == 0
    assert all(k.startswith("ema_model.transformer.") and v.dtype == torch.float32 for k, v in stored.items())
    assert len(stored) == len(model.state_dict())
    arch = yaml.safe_load((out / "model.yaml").read_text())["model"]
    assert arch["backbone"] == "DiT" and arch["mel_spec"]["mel_spec_type"] == "vocos"
    assert arch["arch"]["pe_attn_head"] == 1 and arch["arch"]["text_mask_padding"] is False
    assert same(load_model(out), model)
    back = convert_model(out / "model_1200.safetensors", tmp_path / "back", "f5kit")
    assert same(load_model(back), model) and load_model(back).config == model.config


def test_a_runs_choice_goes_out_and_the_other_on_demand(model, dataset, tmp_path):
    export_model(model, tmp_path / "base", torch.float32)
    plan = plan_run(str(tmp_path / "base"), dataset, detect_host("cpu"), updates=2, update_frames=600)
    run = Trainer(plan, dataset, tmp_path / "run").fit()
    for choice in ("raw", "ema"):
        out = convert_model(run.path, tmp_path / choice, "upstream", weights=choice)
        expected = load_model(run.checkpoints()[-1].path, weights=choice)
        assert [f.name for f in out.glob("*.safetensors")] == ["model_2.safetensors"]
        assert same(load_model(out), expected)
    run.choose("update_000002", "raw", "for this test")
    assert same(load_model(convert_model(run.path, tmp_path / "chosen", "upstream")), load_model(tmp_path / "raw"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(mel_mean=-2.0, mel_std=1.5), "mean -2 and deviation 1.5, which upstream does not know"),
        (dict(mel=MelConfig(hop_length=300)), "hop_length=300.* upstream's inference knows"),
    ],
)
def test_what_upstream_cannot_hold_is_refused_and_leaves_nothing(model, tmp_path, change, sentence):
    model.config = replace(model.config, **change)
    export_model(model, tmp_path / "m")
    with pytest.raises(UserError, match=sentence):
        convert_model(tmp_path / "m", tmp_path / "out", "upstream")
    assert [f.name for f in tmp_path.iterdir()] == ["m"]


def test_a_tokenizer_upstream_lacks_is_refused():
    from f5kit.convert import require_upstream

    with pytest.raises(UserError, match="tokenizer 'phonemes', which upstream lacks; it has char, pinyin"):
        require_upstream(V0.replace(tokenizer="phonemes"))


def test_a_folder_that_is_taken_stays_as_it_is(model, tmp_path):
    export_model(model, tmp_path / "m")
    (tmp_path / "out").mkdir()
    assert convert_model(tmp_path / "m", tmp_path / "out", "f5kit").is_dir()
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="there already and not empty: name a new folder"):
        convert_model(tmp_path / "m", tmp_path / "out", "upstream")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


# ---- pickles of tensors


def test_both_sets_of_a_training_checkpoint_and_legacy_names(model, tmp_path):
    file = training_pt(tmp_path / "ckpts", model, legacy=True)
    ema = load_model(convert_model(file, tmp_path / "ema", "f5kit", config=V0))
    raw = load_model(convert_model(file, tmp_path / "raw", "f5kit", config="F5TTS_64x2", weights="raw"))
    assert same(ema, model) and raw.config == ema.config
    for name, tensor in raw.state_dict().items():
        assert name.endswith("inv_freq") or torch.equal(tensor, 2 * model.state_dict()[name])


def test_what_a_pt_means_is_asked_and_what_fits_is_told(model, tmp_path):
    file = training_pt(tmp_path / "ckpts", model)
    told = r"no config.json.*its shapes fit F5TTS_v1_64x2, F5TTS_64x2 and F5TTS_64x2_bigvgan, and f5kit.probe"
    with pytest.raises(UserError, match=told):
        convert_model(file, tmp_path / "out", "f5kit")
    with pytest.raises(UserError, match="no config 'F6TTS'; its shapes fit F5TTS_v1_64x2"):
        convert_model(file, tmp_path / "out", "f5kit", config="F6TTS")
    (tmp_path / "ckpts" / "config.json").write_text(json.dumps(V0.to_dict()))
    (tmp_path / "ckpts" / "vocab.txt").rename(tmp_path / "letters.txt")
    with pytest.raises(UserError, match="no vocabulary"):
        convert_model(file, tmp_path / "out", "f5kit")
    assert same(load_model(convert_model(file, tmp_path / "o", "f5kit", vocab=tmp_path / "letters.txt")), model)


def test_a_pt_is_never_opened_where_it_was_not_asked_for(model, tmp_path):
    file = training_pt(tmp_path / "ckpts", model)
    for opened in (load_model, readings, read_tensors):
        with pytest.raises(UserError, match="is a pickle, which can run code when read: convert it first"):
            opened(file)


def test_a_set_that_is_not_there_is_named(tmp_path):
    torch.save({"ema_model_state_dict": {"a": torch.ones(2)}}, tmp_path / "m.pt")
    assert torch.equal(read_tensors(convert_pickle(tmp_path / "m.pt"))["a"], torch.ones(2))
    with pytest.raises(UserError, match="it has no raw weights, only ema_model_state_dict"):
        convert_pickle(tmp_path / "m.pt", "raw")


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.4.0", "1.13.1"])
def test_torch_below_2_10_converts_nothing(version, tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(UserError, match=r"needs torch 2.10 or newer to be safe, and this is"):
        convert_pickle(tmp_path / "m.pt")


# ---- pickles that want to run code


class Reduced:
    """Pickles as a call, or as any other tuple that `__reduce__` may return."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


class Stateful:
    def __init__(self, command):
        self.command = command

    def __setstate__(self, state):
        os.system(state["command"])


def payloads(canary: Path, folder: Path) -> dict[str, bytes]:
    """File contents, each of which writes the canary when it is read without restriction."""
    touch, code = f"touch {canary}", f"open({str(canary)!r}, 'w')"
    script = folder / "script.py"
    script.write_text(code)
    evil = Reduced(os.system, (touch,))

    def saved(value, **options) -> bytes:
        torch.save(value, memory := io.BytesIO(), **options)
        return memory.getvalue()

    import runpy

    import numpy

    return {
        "os.system": saved({"a": evil}),
        "open": saved({"a": Reduced(open, (str(canary), "w"))}),
        "exec": saved({"a": Reduced(exec, (code,))}),
        "eval": saved({"ema_model_state_dict": {"a": Reduced(eval, (code,))}}),
        "Popen": saved({"a": Reduced(subprocess.Popen, (["touch", str(canary)],))}),
        "before the zip format": saved({"a": evil}, _use_new_zipfile_serialization=False),
        "a bare pickle": pickle.dumps({"a": evil}),
        "a pickle in a storage": saved({"a": Reduced(torch.storage._load_from_bytes, (saved(evil),))}),
        "partial": saved({"a": Reduced(partial(os.system, touch), ())}),
        "a method": saved({"a": Reduced(Path.touch, (canary,))}),
        "__setstate__": saved({"a": Stateful(touch)}),
        "an object array": saved({"a": numpy.array([evil], dtype=object)}),
        "runpy": saved({"a": Reduced(runpy.run_path, (str(script),))}),
        "a dictionary's items": saved({"a": Reduced(OrderedDict, (), None, None, iter([(1, evil)]))}),
    }


def converted_in_one_process(folder: Path, names) -> dict[str, str | None]:
    """What the converting script says to each file, None where it wrote one. One process, for each takes seconds."""
    driver = (
        "import json, sys\nfrom f5kit.weights import _CONVERT\nfolder, *names = sys.argv[1:]\nsaid = {}\n"
        "for name in names:\n"
        "    sys.argv = ['-c', f'{folder}/{name}.pt', f'{folder}/{name}.safetensors', 'ema']\n"
        "    try: exec(_CONVERT, {})\n"
        "    except BaseException as error: said[name] = str(error) or repr(error)\n"
        "    else: said[name] = None\n"
        "print(json.dumps(said))"
    )
    done = subprocess.run([sys.executable, "-c", driver, str(folder), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_payload_runs_its_code(tmp_path):
    canary = tmp_path / "canary"
    contents = payloads(canary, tmp_path)
    assert len(contents) >= 10
    probe = tmp_path / "probe"  # the payloads are live: without the restriction this one does what it says
    with open(tmp_path / "live.pt", "wb") as file:
        torch.save({"a": Reduced(open, (str(probe), "w"))}, file)
    torch.load(tmp_path / "live.pt", weights_only=False)
    assert probe.exists()

    for name, content in contents.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
    said = converted_in_one_process(tmp_path, contents)
    assert all(said.values()), said
    assert not canary.exists()
    (tmp_path / "os.system.pt").rename(tmp_path / "m.pt")
    with pytest.raises(UserError, match="m.pt could not be converted to safetensors"):
        convert_pickle(tmp_path / "m.pt")
    assert not canary.exists() and not list(tmp_path.rglob("*.safetensors"))


def test_environment_variables_do_not_open_the_door(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"a": Reduced(os.system, (f"touch {tmp_path / 'canary'}",))}, tmp_path / "m.pt")
    with pytest.raises(UserError):
        convert_pickle(tmp_path / "m.pt")
    assert not (tmp_path / "canary").exists()


def test_a_module_beside_the_pickle_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "zipfile.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.chdir(tmp_path)
    convert_pickle("m.pt")
    assert not (tmp_path / "canary").exists()


def test_files_that_claim_more_than_they_hold(tmp_path):
    block = torch.zeros(1 << 18)
    held = torch.zeros(4).untyped_storage()
    storage = torch.storage.TypedStorage(wrap_storage=held, dtype=torch.float32, _internal=True)
    lie = Reduced(torch._utils._rebuild_tensor_v2, (storage, 0, (1 << 30,), (1,), False, OrderedDict()))
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "expanded.pt")
    torch.save({f"v{i}": block for i in range(64)}, tmp_path / "shared.pt")
    torch.save({"a": lie}, tmp_path / "shape.pt")
    torch.save([torch.ones(3)], tmp_path / "list.pt")
    torch.save({"a": 3}, tmp_path / "none.pt")
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-1000])
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for member in whole.infolist():
            bomb.writestr(member.filename, whole.read(member), zipfile.ZIP_DEFLATED)
    reasons = {
        "expanded": "a claims more numbers than the file holds", "shared": "claims more numbers than the file holds",
        "shape": "", "list": "holds a list and no tensors", "none": "no tensors by name", "cut": "",
        "bomb": "its records are compressed",
    }  # fmt: skip

    said = converted_in_one_process(tmp_path, reasons)
    for name, reason in reasons.items():
        assert said[name] and reason in said[name], (name, said[name])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_file_that_keeps_its_reader_busy_is_given_up(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.setattr(weights_module, "_CONVERT", "import time; time.sleep(60)")
    monkeypatch.setattr(weights_module, "_PATIENCE", 0.3)
    with pytest.raises(UserError, match="kept its reader busy"):
        convert_pickle(tmp_path / "m.pt")


# ---- safetensors that lie


def safetensors(header, data: bytes = b"\0" * 4, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES = {
    "a header of 4 exabytes": safetensors({}, length=1 << 62),
    "a header longer than the file": safetensors({}, length=10_000_000),
    "no header": b"",
    "half a length": b"\1\0\0",
    "a header that is no JSON": safetensors(b"\xff{not json"),
    "a header that is a list": safetensors([1, 2]),
    "deeply nested": safetensors(b"[" * 200_000),
    "more numbers than bytes": safetensors({"a": entry([1000], [0, 4])}),
    "a product that overflows": safetensors({"a": entry([1 << 40, 1 << 40], [0, 4])}),
    "bytes behind the end": safetensors({"a": entry([1000], [0, 4000])}),
    "bytes that run backwards": safetensors({"a": entry([1], [4, 0])}),
    "a negative size": safetensors({"a": entry([-1], [0, 4])}),
    "an unknown type": safetensors({"a": entry([1], [0, 4], "PICKLE")}),
    "a hole": safetensors({"a": entry([1], [8, 12])}, b"\0" * 12),
    "one place for two": safetensors({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}),
    "cut short": safetensors({"a": entry([4], [0, 16])}, b"\0" * 9),
}


@pytest.mark.parametrize("name", LIES)
def test_safetensors_that_lie_are_refused_within_a_second(name, tmp_path, model):
    model.tokenizer.save(tmp_path / "vocab.txt")
    file = tmp_path / "model.safetensors"
    file.write_bytes(LIES[name])
    started = time.monotonic()
    for opened in (read_tensors, readings, lambda f: load_model(f, config=V0)):
        with pytest.raises(UserError, match="model.safetensors is not a whole safetensors file"):
            opened(file)
    assert time.monotonic() - started < 1


def test_tensors_of_another_model_are_refused_by_name_and_shape(model, tmp_path):
    export_model(model, tmp_path / "m", torch.float32)
    tensors = read_tensors(tmp_path / "m" / "model.safetensors")
    write_tensors(tmp_path / "m" / "model.safetensors", {**tensors, "transformer.proj_out.bias": torch.zeros(1 << 20)})
    with pytest.raises(UserError, match=r"1 tensors differ, first transformer.proj_out.bias, \(1048576,\) in the file"):
        load_model(tmp_path / "m")


# ---- the command


def test_the_command_says_what_it_wrote_and_what_is_wrong(model, tmp_path, capsys):
    export_model(model, tmp_path / "m")
    assert main([str(tmp_path / "m"), str(tmp_path / "out"), "--to", "upstream"]) == 0
    assert "model_0.safetensors" in capsys.readouterr().out
    assert main([str(tmp_path / "m"), str(tmp_path / "out"), "--to", "upstream"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "name a new folder" in said.err


def test_the_module_runs_and_explains_itself():
    done = subprocess.run([sys.executable, "-m", "f5kit.convert", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--to upstream" in done.stdout and "model.yaml" in done.stdout
