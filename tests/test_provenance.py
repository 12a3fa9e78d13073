"""f5kit.provenance: each kind of sound file says where it comes from, and says it again when it is read."""

from __future__ import annotations

import math

import pytest
import soundfile
import torch

import f5kit
from f5kit.audio import read_audio, write_audio
from f5kit.provenance import Provenance, model_name, read_provenance

SOUND = 0.3 * torch.sin(torch.arange(24_000) * 2 * math.pi * 220 / 24_000)


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("told", [Provenance(True, "meine Stimme/update_000400/ema"), Provenance(False), None])
def test_every_format_carries_it(suffix, told, tmp_path):
    path = write_audio(tmp_path / f"a.{suffix}", SOUND, provenance=told)
    found = read_provenance(path)
    expected = told or Provenance()
    assert (found.generated, found.model) == (expected.generated, expected.model)
    assert found.by == f"f5kit {f5kit.__version__}"
    assert abs(len(read_audio(path)) - len(SOUND)) < 2400  # MP3 pads


def test_the_samples_are_what_they_were(tmp_path):
    path = write_audio(tmp_path / "a.wav", SOUND, provenance=Provenance(True, "x" * 1000))
    plain = tmp_path / "plain.wav"
    soundfile.write(plain, SOUND.numpy(), 24_000)
    assert torch.equal(read_audio(path), read_audio(plain))
    soundfile.write(tmp_path / "a.flac", SOUND.numpy(), 24_000)
    assert torch.equal(read_audio(write_audio(tmp_path / "b.flac", SOUND)), read_audio(tmp_path / "a.flac"))


def test_other_files_say_nothing(tmp_path):
    soundfile.write(tmp_path / "theirs.wav", SOUND.numpy(), 24_000)
    (tmp_path / "text.wav").write_text("no sound")
    with soundfile.SoundFile(tmp_path / "song.wav", "w", 24_000, 1) as file:
        file.comment = "recorded in the kitchen"
        file.write(SOUND.numpy())
    for name in ("theirs.wav", "text.wav", "song.wav", "missing.wav"):
        assert read_provenance(tmp_path / name) is None


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        ("/home/anna/f5/runs/my_voice/checkpoints/update_000400/ema.safetensors", "my_voice/update_000400/ema"),
        ("F5TTS_v1_Base from the Hub", "F5TTS_v1_Base from the Hub"),
        ("tiny with fresh weights (seed 0)", "tiny with fresh weights (seed 0)"),
    ],
)
def test_names_hold_no_folder_of_this_machine(origin, name):
    assert model_name(origin) == name
