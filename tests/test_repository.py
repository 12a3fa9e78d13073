"""f5kit.repository: models of other people, in the layouts they are found in, from a Hub on this machine."""

from __future__ import annotations

import io
import json

import pytest
import torch
import yaml
from hub_server import Repository, serve

from f5kit.checkpoint import describe_model, export_model, fresh_model, load_model, load_tokenizer
from f5kit.config import PRESETS
from f5kit.convert import open_model, upstream_config
from f5kit.errors import UserError
from f5kit.repository import card_facts, choose_files, read_yaml_config, repository_name
from f5kit.text import Tokenizer, english_vocab
from f5kit.weights import to_published

TOKEN = "hf_" + "repositoryToken" * 2
CARD = "---\nlicense: cc-by-nc-4.0\nbase_model: SWivid/F5-TTS\n---\n# A voice\n\nRead in a \x1b[31mgarden.\n"


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub(monkeypatch):
    with serve(TOKEN) as server:
        for place in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
            monkeypatch.setattr(place, server.endpoint, raising=False)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture(scope="module")
def v1(awake_once):
    config = PRESETS["F5TTS_v1_Base"].replace(name="mine", dim=64, depth=2, heads=2, text_dim=32, conv_layers=1)
    vocab = [*english_vocab(), *(f"zh{i}" for i in range(2545 - 95))]
    return awake_once(fresh_model(config, Tokenizer(vocab, config.tokenizer, config.normaliser)))


@pytest.fixture(scope="module")
def awake_once():
    def fill(model):
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.2)
        return model

    return fill


def add(hub, name: str, files: dict[str, bytes], private: bool = False) -> None:
    hub.repositories[name] = Repository(private)
    hub.repositories[name].add({"README.md": CARD.encode(), **files})


def weights(model, folder) -> bytes:
    from f5kit.weights import write_tensors

    write_tensors(folder / "w.safetensors", to_published(model.state_dict()))
    return (folder / "w.safetensors").read_bytes()


def vocabulary(model, folder) -> bytes:
    model.tokenizer.save(folder / "v.txt")
    return (folder / "v.txt").read_bytes()


def same(a, b) -> bool:
    return all(torch.equal(a.state_dict()[k], v) for k, v in b.state_dict().items())


def test_f5kits_own_layout(hub, v1, tmp_path, capsys):
    folder = export_model(v1, tmp_path / "export", torch.float32)
    add(hub, "you/voice", {f.name: f.read_bytes() for f in folder.iterdir()})
    loaded = load_model("you/voice")
    assert same(loaded, v1) and loaded.config == v1.config and loaded.origin.startswith("you/voice")
    shown = capsys.readouterr().out
    assert "licence: cc-by-nc-4.0" in shown and "base model: SWivid/F5-TTS" in shown and "Read in a" in shown
    assert "\x1b" not in shown
    order = [path for _, path in hub.requests if "/resolve/" in path]
    assert order[0].endswith("README.md")  # the card before the weights


def test_no_token_is_sent_where_none_is_needed(hub, v1, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = export_model(v1, tmp_path / "export", torch.float32)
    files = {f.name: f.read_bytes() for f in folder.iterdir()}
    add(hub, "you/open", files)
    load_model("you/open")
    assert hub.authorised and not any(sent for _, sent in hub.authorised)
    add(hub, "you/closed", files, private=True)
    assert same(load_model("you/closed"), v1)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="there is no folder you/closed2 here, and the Hub did not give you/closed2"):
        load_model("you/closed2")


def test_upstreams_layout_in_a_folder(hub, v1, tmp_path):
    files = {"V1/model_1250000.safetensors": weights(v1, tmp_path), "V1/vocab.txt": vocabulary(v1, tmp_path)}
    add(hub, "them/F5", {**files, "V1/model.yaml": yaml.safe_dump(upstream_config(v1.config)).encode()})
    for source in ("them/F5", "them/F5/V1", "them/F5/V1/model_1250000.safetensors", "hf://them/F5/V1"):
        loaded = load_model(source)
        assert same(loaded, v1), source
    assert loaded.config.replace(name="mine") == v1.config.replace(tokenizer="custom")  # as upstream's yaml says it


def test_community_layouts(hub, v1, tmp_path):
    """Weights in a folder, the vocabulary above; no config; a config.json that is something else."""
    files = {"ckpts/model_last.safetensors": weights(v1, tmp_path), "vocab.txt": vocabulary(v1, tmp_path)}
    add(hub, "them/plain", {**files, "ckpts/config.json": b" \n!\n", "samples/a.wav": b"RIFF"})
    with pytest.raises(UserError, match="no config.json of f5kit.*say which one"):
        load_model("them/plain")
    assert same(load_model("them/plain", config=v1.config), v1)
    assert not [path for _, path in hub.requests if path.endswith("a.wav")]  # what is not needed is not fetched
    add(hub, "them/several", {**files, "ckpts/model_2.safetensors": files["ckpts/model_last.safetensors"]})
    with pytest.raises(UserError, match=r"holds 2 models \(ckpts/model_2.*name one, as in"):
        load_model("them/several", config=v1.config)
    assert same(load_model("them/several/ckpts/model_2.safetensors", config=v1.config), v1)
    add(hub, "them/nothing", {"data.csv": b"a,b"})
    with pytest.raises(UserError, match="holds no weights of a model; it has README.md, data.csv"):
        load_model("them/nothing")


def test_a_pickle_is_refused_with_the_way_and_converted_on_that_way(hub, v1, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save({"ema_model_state_dict": to_published(v1.state_dict())}, memory := io.BytesIO())
    add(hub, "them/old", {"model_last.pt": memory.getvalue(), "vocab.txt": vocabulary(v1, tmp_path)})
    with pytest.raises(UserError, match="pickle .*f5kit.convert them/old/model_last.pt OUT --to f5kit"):
        load_model("them/old", config=v1.config)
    assert same(open_model("them/old", config=v1.config), v1)


def test_config_and_tokenizer_without_weights(hub, v1, tmp_path):
    folder = export_model(v1, tmp_path / "export", torch.float32)
    add(hub, "you/voice", {f.name: f.read_bytes() for f in folder.iterdir()})
    assert describe_model("you/voice") == v1.config
    assert load_tokenizer("you/voice").hash == v1.tokenizer.hash


def test_offline_the_cache_answers(hub, v1, tmp_path, monkeypatch):
    folder = export_model(v1, tmp_path / "export", torch.float32)
    add(hub, "you/voice", {f.name: f.read_bytes() for f in folder.iterdir()})
    load_model("you/voice")
    asked = len(hub.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert same(load_model("you/voice"), v1)
    with pytest.raises(UserError, match="you/other here, and it is not in the cache: switch HF_HUB_OFFLINE off"):
        load_model("you/other")
    assert len(hub.requests) == asked


def test_a_run_may_start_from_a_repository_and_inherits_its_licence(hub, v1, tmp_path):
    from f5kit.card import find_base

    folder = export_model(v1, tmp_path / "export", torch.float32)
    add(hub, "them/voice", {f.name: f.read_bytes() for f in folder.iterdir()})
    expected = {"base": "them/voice", "base_repository": "them/voice", "base_licence": "cc-by-nc-4.0"}
    assert find_base("them/voice") == expected


@pytest.mark.parametrize("name", ["a/../../b", "/etc/passwd", "..\\up", "~/x", "C:/x", "a/\0b"])
def test_names_that_lead_out_are_refused(hub, name):
    add(hub, "evil/voice", {"model.safetensors": b"", name: b""})
    with pytest.raises(UserError, match="leads out of its folder: do not use it"):
        load_model("evil/voice")


def test_what_reads_as_a_repository(tmp_path):
    assert repository_name("you/voice") == ("you/voice", "")
    assert repository_name("you/voice/a/b.safetensors") == ("you/voice", "a/b.safetensors")
    (tmp_path / "you" / "here").mkdir(parents=True)
    for name in ("you/here", "tiny", "F5TTS_v1_Base", "/abs/path", "../up/there", "you/a/../b", "a/b.safetensors"):
        assert repository_name(name) is None, name


def test_a_vocoder_or_an_optimizer_is_no_model():
    names = ["model.safetensors", "config.json", "optimizer.safetensors", "vocoder.safetensors", "ema.safetensors"]
    assert choose_files("you/voice", names, "", False)[0] == "model.safetensors"


@pytest.mark.parametrize("name", ["F5TTS_v1_Base", "F5TTS_Base", "E2TTS_Base"])
def test_upstreams_yaml_is_read(name, tmp_path):
    config = PRESETS[name]
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(upstream_config(config)))
    assert read_yaml_config(tmp_path / "m.yaml") == config.replace(tokenizer="custom")
    for text in ("[]", "model: 3", "a: [", "model: {arch: {dim: x}, backbone: DiT}", "model: {arch: {}, backbone: Q}"):
        (tmp_path / "m.yaml").write_text(text)
        assert read_yaml_config(tmp_path / "m.yaml") is None


def test_cards_that_are_odd(tmp_path):
    for text in ("", "no header", "---\n: [\n---\n", "---\n- a\n---\n", json.dumps({})):
        (tmp_path / "README.md").write_text(text)
        assert card_facts(tmp_path) == {}
