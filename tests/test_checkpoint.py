"""Loading: every layout by name, and a clear word when weights and config do not belong together."""

import pytest
import torch

from f5kit.checkpoint import describe_model, export_model, fresh_model, load_model, load_tokenizer
from f5kit.config import PRESETS, ModelConfig
from f5kit.errors import UserError
from f5kit.text import Tokenizer, english_vocab
from f5kit.weights import convert_pickle, read_tensors, write_json, write_tensors


def published(folder, model):
    """Write a model as upstream publishes one."""
    state = {f"ema_model.{k}": v for k, v in model.state_dict().items()}
    legacy = {"ema_model.mel_spec.mel_stft.mel_scale.fb": torch.zeros(513, 100)}
    extra = {"initted": torch.tensor(True), "step": torch.tensor(1_250_000)}
    folder.mkdir(exist_ok=True)
    write_tensors(folder / "model_1250000.safetensors", {**state, **legacy, **extra})
    model.tokenizer.save(folder / "vocab.txt")


@pytest.fixture
def v1(awake):
    config = PRESETS["F5TTS_v1_Small"].replace(name="mine", dim=64, depth=2, heads=2, text_dim=32, conv_layers=1)
    vocab = [*english_vocab(), *(f"zh{i}" for i in range(2545 - 95))]
    return awake(fresh_model(config, Tokenizer(vocab, config.tokenizer, config.normaliser)))


def same(a, b):
    return all(torch.equal(a.state_dict()[k], v) for k, v in b.state_dict().items())


def test_the_published_layout_loads_strictly(v1, tmp_path):
    published(tmp_path / "m", v1)
    write_json(tmp_path / "m" / "config.json", v1.config.to_dict())
    for source in (tmp_path / "m", tmp_path / "m" / "model_1250000.safetensors"):
        loaded = load_model(source)
        assert same(loaded, v1)
        assert loaded.config == v1.config
        assert "model_1250000" in loaded.origin


def test_weights_without_a_config_are_not_guessed(v1, tmp_path):
    published(tmp_path / "m", v1)
    with pytest.raises(UserError, match=r"no config.json.*say which one"):
        load_model(tmp_path / "m")
    assert same(load_model(tmp_path / "m", config=v1.config), v1)
    with pytest.raises(UserError, match="does not fit the config F5TTS_v1_Base: .* tensors differ"):
        load_model(tmp_path / "m", config="F5TTS_v1_Base")


def test_an_export_is_small_and_loads_back(v1, tmp_path):
    export_model(v1, tmp_path / "e")
    stored = read_tensors(tmp_path / "e" / "model.safetensors")
    assert {t.dtype for k, t in stored.items() if not k.endswith("inv_freq")} == {torch.float16}
    loaded = load_model(tmp_path / "e")
    assert loaded.transformer.proj_out.weight.dtype == torch.float32
    for k, v in v1.state_dict().items():
        assert torch.allclose(loaded.state_dict()[k], v, atol=1e-3, rtol=1e-3)


def test_another_vocabulary_beside_the_weights_is_noticed(v1, tmp_path):
    export_model(v1, tmp_path / "e")
    Tokenizer([*v1.tokenizer.vocab[:-1], "else"]).save(tmp_path / "e" / "vocab.txt")
    with pytest.raises(UserError, match="not the vocabulary"):
        load_model(tmp_path / "e")


@pytest.mark.parametrize(
    ("source", "told"),
    [("no_such_thing", "the presets are tiny, starter"), ("F5TTS_v1_Small", "no weights are published")],
)
def test_names_that_lead_nowhere(source, told):
    with pytest.raises(UserError, match=told):
        load_model(source)


def test_published_presets_without_network_say_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="not in the local cache.*local folder that holds the weights"):
        load_model("F5TTS_v1_Base")


def test_fresh_models_are_the_same_every_time_and_leave_random_state_alone():
    state = torch.random.get_rng_state()
    assert same(load_model("tiny"), load_model("tiny"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert "learned nothing" in load_model("tiny").origin


def test_describing_costs_no_weights(v1, tmp_path):
    export_model(v1, tmp_path / "e")
    (tmp_path / "e" / "model.safetensors").unlink()
    assert describe_model(tmp_path / "e") == v1.config
    assert load_tokenizer(tmp_path / "e").hash == v1.tokenizer.hash
    assert describe_model("F5TTS_v1_Base") == PRESETS["F5TTS_v1_Base"]


def test_a_config_of_a_newer_version_is_refused():
    with pytest.raises(UserError, match="unknown fields.*flux_capacitor"):
        ModelConfig.from_dict({**PRESETS["tiny"].to_dict(), "flux_capacitor": 1})


@pytest.mark.parametrize("damage", ["cut", "html"])
def test_damaged_weights_are_named(v1, tmp_path, damage):
    export_model(v1, tmp_path / "e")
    file = tmp_path / "e" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9] if damage == "cut" else b"<html>not found</html>")
    with pytest.raises(UserError, match=r"model.safetensors is not a whole safetensors file"):
        load_model(tmp_path / "e")


def test_a_pickle_of_tensors_is_converted_and_a_malicious_one_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = {"a": torch.arange(3), "b": torch.ones(2)}
    torch.save({"ema_model_state_dict": tensors, "update": 3}, tmp_path / "good.pt")
    converted = read_tensors(convert_pickle(tmp_path / "good.pt"))
    assert all(torch.equal(converted[k], v) for k, v in tensors.items())

    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="more than tensors"):
        convert_pickle(tmp_path / "evil.pt")
    assert not canary.exists()
    with pytest.raises(UserError, match="is a pickle"):
        read_tensors(tmp_path / "good.pt")
