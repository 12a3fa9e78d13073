"""benchmarks/starter: the vocoder's training resumes to the same weights, and load_vocoder reads what it writes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from f5kit.audio import log_mel
from f5kit.vocoder import load_vocoder
from f5kit.weights import read_tensors

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "starter"
TEXTS = {"train": ["The quick brown fox jumps over the lazy dog.", "Rain again."], "heldout": ["We met on Monday."]}


@pytest.fixture(scope="module")
def scripts():
    """The modules train_vocoder and vocoder_losses, which stand outside the package."""
    sys.path.insert(0, str(SCRIPTS))
    import train_vocoder
    import vocoder_losses

    yield train_vocoder, vocoder_losses
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split, texts in TEXTS.items():
        (folder / split / "wavs").mkdir(parents=True)
        for i, text in enumerate(texts):
            path = folder / split / "wavs" / f"clip_{i}.wav"
            subprocess.run(["flite", "-voice", "slt", "-t", text, "-o", str(path)], check=True)
    return folder


def tiny(train_vocoder, **changes):
    sizes = dict(dim=16, intermediate_dim=32, num_layers=1, adversary_channels=2, batch=2, frames=16, updates=4)
    return train_vocoder.Settings(**(sizes | dict(adversary_from=0.5, warmup=1) | changes))


@pytest.fixture(scope="module")
def straight(scripts, corpus, tmp_path_factory):
    """A run of four updates, the last two of them with the adversary, without a pause."""
    out = tmp_path_factory.mktemp("straight")
    scripts[0].train(out, corpus, tiny(scripts[0]), every=2)
    return out


def rows(out: Path) -> list[dict]:
    found = [json.loads(row) for row in (out / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "minutes" not in name} for row in found]


def test_figures_are_finite_and_the_adversary_joins(straight):
    first, last = rows(straight)
    assert (first["update"], last["update"]) == (2, 4)
    assert "hinge" not in first and {"adversary", "hinge", "feature"} <= last.keys()
    assert all(torch.isfinite(torch.tensor([*row.values()])).all() for row in (first, last))


def test_a_resumed_run_equals_an_uninterrupted_one(scripts, corpus, straight, tmp_path):
    train, settings = scripts[0].train, tiny(scripts[0])
    train(tmp_path, corpus, settings, every=2, stop=2)
    with open(tmp_path / "log.jsonl", "a") as file:  # killed after a row and before the state was written
        file.write(json.dumps({"update": 4, "minutes": 0.1}) + "\n")
    train(tmp_path, corpus, settings, every=2)
    ours, theirs = (read_tensors(out / "vocoder" / "model.safetensors") for out in (tmp_path, straight))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert rows(tmp_path) == rows(straight)


def test_other_settings_are_refused(scripts, corpus, straight):
    with pytest.raises(SystemExit, match="has other settings"):
        scripts[0].train(straight, corpus, tiny(scripts[0], updates=5))


def test_load_vocoder_reads_the_folder(scripts, corpus, straight):
    train_vocoder, _ = scripts
    training = train_vocoder.Training(tiny(train_vocoder), torch.zeros(1, 4096))
    training.restore(torch.load(straight / "state.pt", weights_only=True))
    mel = log_mel(train_vocoder.read_clip(corpus / "heldout" / "wavs" / "clip_0.wav"))
    vocoder = load_vocoder(straight / "vocoder")
    audio = vocoder.decode(mel)
    assert audio.shape == ((len(mel) - 1) * 256,) and torch.isfinite(audio).all()
    average = training.average
    average.precision = "fp32"
    with torch.no_grad():  # the folder's weights are fp16
        torch.testing.assert_close(audio, average(mel[None])[0], rtol=0.02, atol=0.02 * float(audio.abs().max()))


def test_updates_lower_the_loss(scripts, corpus, straight, tmp_path):
    settings = tiny(scripts[0], updates=30, learning_rate=3e-4, adversary_from=1.0, warmup=5)
    scripts[0].train(tmp_path, corpus, settings, every=15)
    first, last = rows(tmp_path)
    print(f"held-out mel distance {first['heldout_mel']:.3f}, then {last['heldout_mel']:.3f}")
    assert last["heldout_mel"] < first["heldout_mel"]


def test_speed_changes_the_pitch_and_keeps_the_level(scripts, corpus):
    path = corpus / "train" / "wavs" / "clip_0.wav"
    plain, quick = (scripts[0].read_clip(path, speed) for speed in (1.0, 1.25))
    assert len(quick) == pytest.approx(len(plain) / 1.25, abs=2)
    assert 20 * plain.square().mean().sqrt().log10() == pytest.approx(-23, abs=0.01)


# ---- the distances


def test_the_distance_sees_magnitude_and_phase_apart(scripts):
    distance = scripts[1].SpectralDistance()
    sound = torch.randn(2, 8192, generator=torch.Generator().manual_seed(0)) * 0.1
    itself, flipped = distance(sound, sound), distance(-sound, sound)
    assert all(value < 1e-3 for value in itself.values())
    # the other way round, every phase is off by the same: no step between them is
    assert all(value < 1e-3 for value in flipped.values())
    backwards, louder = distance(sound.flip(-1), sound), distance(2 * sound, sound)
    assert backwards["phase"] > 0.5 < louder["log"] < 1 and louder["phase"] < 1e-3
    assert louder["convergence"].item() == pytest.approx(1, abs=1e-3)


def test_a_silent_sound_gives_finite_gradients(scripts):
    silent = torch.zeros(1, 8192, requires_grad=True)
    torch.stack([*scripts[1].SpectralDistance()(silent, torch.zeros(1, 8192)).values()]).sum().backward()
    assert torch.isfinite(silent.grad).all()


def test_the_adversary_learns_only_from_its_own_loss(scripts):
    torch.manual_seed(0)
    adversary = scripts[1].Adversary(channels=2)
    wanted, made = torch.randn(2, 1, 4096)
    made.requires_grad_()
    sum(adversary.losses_of(0, made, wanted)).backward()
    assert made.grad.abs().sum() > 0 and all(x.grad is None for x in adversary.parameters())
    made.grad = None
    adversary.own_loss(0, made, wanted).backward()
    assert made.grad is None
    reached = [any(x.grad is not None for x in judge.parameters()) for judge in adversary.judges]
    assert reached == [True, False, False]


def test_every_setting_is_plain(scripts):
    assert all(isinstance(value, (int, float, str)) for value in dataclasses.asdict(scripts[0].Settings()).values())
