"""f5kit.vocoder: copy synthesis by Griffin-Lim, and Vocos built from tiny local weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import yaml

from f5kit.audio import log_mel, read_audio
from f5kit.config import MelConfig
from f5kit.errors import UserError
from f5kit.vocoder import VOCOS_REPOSITORY, GriffinLim, VocosVocoder, load_vocoder
from f5kit.weights import write_tensors

MEL = MelConfig()


def layout(**changes) -> dict:
    """A tiny config in the layout that vocos publishes."""
    parts = {
        "feature_extractor": (
            "vocos.feature_extractors.MelSpectrogramFeatures",
            dict(sample_rate=24_000, n_fft=1024, hop_length=256, n_mels=100, padding="center"),
        ),
        "backbone": (
            "vocos.models.VocosBackbone",
            dict(input_channels=100, dim=16, intermediate_dim=32, num_layers=2),
        ),
        "head": ("vocos.heads.ISTFTHead", dict(dim=16, n_fft=1024, hop_length=256, padding="center")),
    }
    config = {name: {"class_path": path, "init_args": arguments} for name, (path, arguments) in parts.items()}
    for name, values in changes.items():
        config[name] = {**config[name], **values}
    return config


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder in the published layout with a pickle, the vocos package's own model of the same weights)."""
    from f5kit.audio import import_torchaudio

    import_torchaudio()
    from vocos import Vocos

    folder = tmp_path_factory.mktemp("published")
    (folder / "config.yaml").write_text(yaml.safe_dump(layout()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Vocos.from_hparams(str(folder / "config.yaml")).eval()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder, model


@pytest.fixture(autouse=True)
def own_caches(tmp_path, tmp_path_factory, monkeypatch):
    converted = tmp_path_factory.getbasetemp() / "converted"  # shared by all tests: converting takes a second
    monkeypatch.setenv("XDG_CACHE_HOME", str(converted))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("f5kit.vocoder.STARTER_FOLDER", tmp_path / "starter")  # what f5kit carries is another matter


@pytest.fixture(scope="module")
def mels(tmp_path_factory):
    """Log-mels of two sentences, (n, d) each, spoken by flite."""
    folder = tmp_path_factory.mktemp("speech")
    texts = ["The quick brown fox jumps over the lazy dog.", "She sells sea shells by the shore all summer."]
    found = []
    for i, text in enumerate(texts):
        subprocess.run(["flite", "-voice", "slt", "-t", text, "-o", str(folder / f"{i}.wav")], check=True)
        found.append(log_mel(read_audio(folder / f"{i}.wav")))
    return found


def distance(a, b):
    n = min(len(a), len(b))
    return (a[:n] - b[:n]).abs().mean().item()


# ---- Griffin-Lim


def test_copy_synthesis_gives_back_the_clip(mels):
    one, other = mels
    audio = GriffinLim().decode(one)
    assert audio.dtype == torch.float32 and audio.shape == ((len(one) - 1) * MEL.hop_length,)
    right, wrong = distance(log_mel(audio), one), distance(other, one)
    print(f"log-mel distance: copy {right:.3f}, another sentence {wrong:.3f}")
    assert right < 0.2 and right < wrong / 5


def test_fitted_magnitudes_beat_the_bare_pseudo_inverse(mels):
    vocoder, mel = GriffinLim(), mels[0]

    def error(steps):
        fitted = vocoder._linear(mel.exp()[None], steps)
        assert (fitted >= 0).all()
        return distance((fitted @ vocoder.bank).clamp(min=1e-5).log()[0], mel)

    assert error(20) < error(0) / 3


def test_griffin_lim_is_deterministic_and_draws_no_random_number(mels):
    state = torch.get_rng_state()
    first = GriffinLim().decode(mels[0])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(GriffinLim().decode(mels[0]), first)


def test_batch_equals_single(mels):
    n = min(map(len, mels))
    vocoder, batch = GriffinLim(iterations=8), torch.stack([mel[:n] for mel in mels])
    both = vocoder.decode(batch)
    assert both.shape == (2, (n - 1) * MEL.hop_length)
    for alone, mel in zip(both, batch, strict=True):
        torch.testing.assert_close(vocoder.decode(mel), alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_few_frames(mels, n, published):
    for vocoder in (GriffinLim(), load_vocoder(published[0])):
        audio = vocoder.decode(mels[0][50 : 50 + n])
        assert audio.shape == ((n - 1) * 256,) and torch.isfinite(audio).all()


def test_a_wrong_shape_is_refused():
    for shape in [(100, 7), (0, 100), (100,), (1, 1, 7, 100)]:
        with pytest.raises(ValueError, match="cannot be decoded; expected"):
            GriffinLim().decode(torch.zeros(shape))


# ---- Vocos


def test_published_layout_equals_the_package_itself(published, mels):
    folder, model = published
    ours = load_vocoder(folder)
    expected = model.decode(mels[0].T[None])[0]
    assert ours.name == "vocos" and torch.equal(ours.decode(mels[0]), expected)
    batch = torch.stack([mels[0], mels[0].flip(0)])
    assert torch.equal(ours.decode(batch), model.decode(batch.transpose(1, 2)))


def test_safetensors_and_json_round_trip(published, mels, tmp_path):
    import json

    _, model = published
    (tmp_path / "config.json").write_text(json.dumps(layout()))
    write_tensors(tmp_path / "model.safetensors", model.state_dict())
    state = torch.get_rng_state()
    ours = VocosVocoder.from_folder(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(ours.decode(mels[1]), model.decode(mels[1].T[None])[0])
    names = {k for k in model.state_dict() if not k.startswith("feature_extractor.")}
    assert set(ours.state_dict()) == names


def folder_of(tmp_path, config, tensors):
    (tmp_path / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    write_tensors(tmp_path / "model.safetensors", tensors)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (layout(head={"class_path": "os.system"}), "head is os.system; f5kit can build vocos.heads.ISTFT"),
        (layout(backbone={"class_path": None}), "backbone is None"),
        (layout(feature_extractor={"init_args": {"sample_rate": 44_100}}), "sample_rate 44100 and the model"),
        (layout(head={"init_args": dict(dim=16, n_fft=1024, hop_length=256)}), "padding same"),
        (layout(backbone={"init_args": dict(input_channels=80)}), "n_mels 80"),
        (layout(head={"init_args": dict(layout()["head"]["init_args"], depth=3)}), "does not take: .*depth"),
        ("head: [", "config.yaml cannot be read"),
        ("just words", "feature_extractor is None|backbone is None"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(published, tmp_path, config, sentence):
    with pytest.raises(UserError, match=sentence.replace("does not take", "do(es)? not take")):
        load_vocoder(folder_of(tmp_path, config, published[1].state_dict()))


def test_weights_that_do_not_fit_are_refused(published, tmp_path):
    tensors = published[1].state_dict()
    tensors.pop("head.out.bias")
    with pytest.raises(UserError, match="1 tensors differ, first head.out.bias"):
        load_vocoder(folder_of(tmp_path, layout(), tensors))


def test_a_folder_without_a_vocoder(tmp_path):
    with pytest.raises(UserError, match="no config.yaml or config.json"):
        load_vocoder(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(layout()))
    with pytest.raises(UserError, match="no model.safetensors or pytorch_model.bin"):
        load_vocoder(tmp_path)
    with pytest.raises(UserError, match="there is no vocoder 'hifigan': choose"):
        load_vocoder("hifigan")


def test_a_pickle_that_runs_code_is_not_opened(tmp_path):
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(layout()))
    torch.save({"head.out.bias": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin"):
        load_vocoder(tmp_path)
    assert not canary.exists()


# ---- the choice


def test_auto_offline_is_griffin_lim_at_once(monkeypatch, mels):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.monotonic()
    vocoder = load_vocoder("auto")
    assert time.monotonic() - start < 10  # retries take twice that; the first import of the Hub takes two
    assert vocoder.name == "griffin-lim"
    assert "rougher in sound than Vocos" in vocoder.why and "config.yaml" in vocoder.why
    with pytest.raises(UserError, match="config.yaml of charactr/vocos-mel-24khz is not in the local cache"):
        load_vocoder("vocos")


def test_auto_without_a_network_does_not_retry(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    start = time.monotonic()
    assert load_vocoder("auto").name == "griffin-lim"
    assert time.monotonic() - start < 10


def test_auto_takes_vocos_from_the_local_cache(monkeypatch, tmp_path, published, mels):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0" * 40
    cache = tmp_path / "hub" / ("models--" + VOCOS_REPOSITORY.replace("/", "--"))
    (cache / "snapshots").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots" / commit).symlink_to(published[0])
    vocoder = load_vocoder("auto")
    assert str(vocoder) == f"vocos: the published weights of {VOCOS_REPOSITORY}"
    assert torch.equal(vocoder.decode(mels[0]), published[1].decode(mels[0].T[None])[0])


def test_the_carried_vocoder_comes_after_the_published_one(monkeypatch, tmp_path, published, mels):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="this f5kit carries no vocoder"):
        load_vocoder("starter")
    (tmp_path / "starter").symlink_to(published[0])
    starter, chosen = load_vocoder("starter"), load_vocoder("auto")
    assert str(starter) == "starter: asked for"
    assert chosen.name == "starter" and chosen.why.startswith("rougher in sound than the published Vocos, which cannot")
    expected = published[1].decode(mels[0].T[None])[0]
    assert torch.equal(starter.decode(mels[0]), expected) and torch.equal(chosen.decode(mels[0]), expected)
    assert load_vocoder("auto", MelConfig("bigvgan")).name == "griffin-lim"
    with pytest.raises(UserError, match="Vocos reads mels of its own kind"):
        load_vocoder("starter", MelConfig("bigvgan"))


def test_vocos_imports_in_a_fresh_process_whatever_torchaudio_is_installed():
    check = "from f5kit.vocoder import _vocos_classes; print(*(c.__name__ for c in _vocos_classes()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.split() == ["VocosBackbone", "ISTFTHead"], done.stderr
