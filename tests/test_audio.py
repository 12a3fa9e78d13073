"""Sound: torchaudio that works in spite of itself, mels equal to the bit, files that appear whole."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
import torch

from f5kit import audio as module
from f5kit.audio import (
    decode,
    import_torchaudio,
    log_mel,
    match_loudness,
    measure_levels,
    mel_filterbank,
    read_audio,
    resample,
    to_mono,
    trim_silence,
    write_audio,
)
from f5kit.config import MelConfig
from f5kit.errors import UserError

DEMO = Path(module.__file__).with_name("demo_voice") / "wavs"


pytestmark = pytest.mark.usefixtures("one_thread")  # short clips are no work to share


def tone(seconds: float = 1.0, rate: int = 24_000, hertz: float = 440.0, level: float = 0.3) -> torch.Tensor:
    time = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    return (level * torch.sin(2 * math.pi * hertz * time)).float()


def in_a_fresh_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def torchaudio_mel(audio: torch.Tensor) -> torch.Tensor:
    """What vocos and upstream F5-TTS compute, frames before bins."""
    transform = import_torchaudio().transforms.MelSpectrogram(
        sample_rate=24_000, n_fft=1024, win_length=1024, hop_length=256, n_mels=100, power=1, center=True,
        normalized=False, norm=None,
    )  # fmt: skip
    return transform(audio).clamp(min=1e-5).log().transpose(-1, -2)


# --- torchaudio -----------------------------------------------------------------------------------


def test_vocos_imports_in_this_environment_after_f5kit_lent_a_hand():
    code = (
        "from f5kit.audio import import_torchaudio; t = import_torchaudio(); import vocos; print(t.__name__)"
    )
    assert in_a_fresh_python(code) == "torchaudio"


def broken_torchaudio(folder: Path, extension: str, rest: str = "") -> str:
    """A package torchaudio whose private module fails as the CUDA build's does."""
    package = folder / "torchaudio"
    package.mkdir()
    (package / "__init__.py").write_text(f"from . import _extension\nfrom . import functional\n{rest}")
    (package / "_extension.py").write_text(extension)
    (package / "functional.py").write_text(
        "from torchaudio._extension import _IS_TORCHAUDIO_EXT_AVAILABLE, fail_if_no_align\n"
        "@fail_if_no_align\ndef forced_align(): return 1\n"
    )
    return str(folder)


@pytest.mark.parametrize(
    "failure", ["OSError('libcudart.so is absent')", "ImportError('no')", "RuntimeError('CUDA 13 beside 12')"]
)
def test_the_stand_in_comes_only_after_a_real_failure_and_guards_refuse(tmp_path, failure):
    path = broken_torchaudio(tmp_path, f"raise {failure}\n")
    code = """
import sys
from f5kit.audio import import_torchaudio
torchaudio = import_torchaudio()
assert torchaudio is sys.modules["torchaudio"] is import_torchaudio()
assert torchaudio._extension._IS_TORCHAUDIO_EXT_AVAILABLE is False
try: torchaudio.functional.forced_align()
except RuntimeError as error: print(error)
"""
    said = in_a_fresh_python(code, PYTHONPATH=path + os.pathsep + os.getcwd())
    assert said.startswith("torchaudio's forced_align needs its compiled half")


def test_a_torchaudio_that_works_is_left_alone(tmp_path):
    extension = "_IS_TORCHAUDIO_EXT_AVAILABLE = True\nfail_if_no_align = lambda function: function\n"
    path = broken_torchaudio(tmp_path, extension)
    code = """
from f5kit.audio import import_torchaudio
torchaudio = import_torchaudio()
print(torchaudio._extension.__file__, torchaudio.functional.forced_align())
"""
    assert in_a_fresh_python(code, PYTHONPATH=path + os.pathsep + os.getcwd()).endswith("_extension.py 1")


def test_a_torchaudio_that_nothing_helps_is_one_sentence(tmp_path):
    path = broken_torchaudio(
        tmp_path, "raise OSError('libcudart.so is absent')\n", "raise ImportError('rotten')\n"
    )
    code = """
import sys
from f5kit.audio import import_torchaudio
from f5kit.errors import UserError
try: import_torchaudio()
except UserError as error: print(error)
assert not [name for name in sys.modules if name.startswith("torchaudio")]
"""
    said = in_a_fresh_python(code, PYTHONPATH=path + os.pathsep + os.getcwd())
    assert "libcudart.so is absent" in said and "install the torchaudio that belongs to this torch" in said


# --- mel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["noise", "speech", "silence", "quiet", "shortest", "batch"])
def test_log_mel_equals_torchaudio_to_the_bit(what):
    generator = torch.Generator().manual_seed(0)
    audio = {
        "noise": torch.randn(24_000 * 3 + 17, generator=generator),
        "speech": read_audio(DEMO / "demo_0003.flac"),
        "silence": torch.zeros(12_345),
        "quiet": 1e-6 * torch.randn(9_000, generator=generator),
        "shortest": torch.randn(513, generator=generator),
        "batch": torch.randn(3, 20_000, generator=generator),
    }[what]
    mel = log_mel(audio)
    assert torch.equal(mel, torchaudio_mel(audio))
    assert mel.dtype == torch.float32 and mel.is_contiguous()
    assert mel.shape[-2:] == (audio.shape[-1] // 256 + 1, 100)


def test_silence_lies_on_the_floor():
    assert torch.equal(log_mel(torch.zeros(2_000)), torch.full((8, 100), 1e-5).log())


def test_too_few_samples_for_a_spectrogram_are_one_sentence():
    with pytest.raises(UserError, match="512 samples make no spectrogram"):
        log_mel(torch.zeros(512))


def test_the_filterbank_follows_its_config():
    assert mel_filterbank().shape == (513, 100)
    assert mel_filterbank(MelConfig(n_fft=2048, n_mels=80)).shape == (1025, 80)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "tolerance"), [(".wav", 1e-4), (".flac", 1e-4), (".ogg", 0.05), (".mp3", 0.05)]
)
def test_what_is_written_is_read_back(tmp_path, suffix, tolerance):
    audio = tone(2.0)
    assert write_audio(tmp_path / f"a{suffix}", audio) == tmp_path / f"a{suffix}"
    back = read_audio(tmp_path / f"a{suffix}")
    assert len(back) == len(audio) and back.dtype == torch.float32
    assert (back - audio)[2400:-2400].abs().max() < tolerance


def test_minutes_of_vorbis_are_written(tmp_path):
    generator = torch.Generator().manual_seed(0)
    write_audio(tmp_path / "a.ogg", 0.1 * torch.randn(24_000 * 120, generator=generator))
    assert soundfile.info(str(tmp_path / "a.ogg")).frames == 24_000 * 120


def test_samples_beyond_full_scale_are_held(tmp_path):
    write_audio(tmp_path / "a.wav", torch.tensor([2.0, -2.0, 0.5]))
    assert torch.allclose(read_audio(tmp_path / "a.wav"), torch.tensor([1.0, -1.0, 0.5]), atol=1e-4)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_audio(tmp_path / "a.wav", tone())
    before = path.read_bytes()

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_audio(path, tone(hertz=220))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.wav"]


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.m4a: f5kit writes \.wav"):
        write_audio(tmp_path / "a.m4a", tone())
    with pytest.raises(ValueError, match="finite"):
        write_audio(tmp_path / "a.wav", torch.tensor([0.0, float("nan")]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_resampling_keeps_pitch_length_and_level(tmp_path, rate):
    soundfile.write(tmp_path / "a.wav", tone(2.0, rate).numpy(), rate, subtype="FLOAT")
    audio = read_audio(tmp_path / "a.wav")
    assert abs(len(audio) - 48_000) <= 1
    assert (audio[:48_000] - tone(2.0)[: len(audio)])[2400:-2400].abs().max() < 1e-3


def test_resampling_leaves_nothing_above_the_new_band():
    high = tone(1.0, 48_000, hertz=15_000)  # above 12 kHz, so not to be heard at 24 kHz
    assert resample(high, 48_000, 24_000)[1000:-1000].abs().max() < 1e-4


def test_channels_are_averaged_and_opposite_ones_are_not_lost(tmp_path):
    left, right = tone(hertz=300), tone(hertz=500)
    assert torch.equal(to_mono(torch.stack([left, right]))[0], torch.stack([left, right]).mean(0))
    mono, cancelled = to_mono(torch.stack([left, -0.98 * left]))
    assert cancelled and torch.equal(mono, left)
    assert not to_mono(torch.stack([left, torch.zeros_like(left)]))[1]
    assert not to_mono(torch.zeros(2, 100))[1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no audio file"),
        (b"", "cannot be read"),
        (b"<html>not found</html>" * 50, "cannot be read"),
    ],
)
def test_a_file_that_is_no_audio_is_one_sentence_with_its_name(tmp_path, content, says):
    path = tmp_path / "a.wav"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        read_audio(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    with pytest.raises(UserError, match="is not a file"):
        read_audio(tmp_path / "a.wav")


def test_a_recording_that_is_too_long_is_refused_unread(tmp_path):
    write_audio(tmp_path / "a.flac", tone(3.0))
    with pytest.raises(UserError, match=r"lasts 3\.00 s, over 2 s"):
        decode(tmp_path / "a.flac", max_seconds=2)


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_a_recording_cut_short_is_refused(tmp_path, form):
    path = tmp_path / f"a.{form.lower()}"
    generator = torch.Generator().manual_seed(0)
    soundfile.write(path, 0.1 * torch.randn(48_000, generator=generator).numpy(), 24_000, format=form)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="cut short|cannot be read"):
        read_audio(path)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_wav_written_to_a_pipe_reads_though_its_header_knows_no_length(tmp_path, size):
    path = write_audio(tmp_path / "a.wav", tone())
    raw = bytearray(path.read_bytes())
    at = raw.index(b"data") + 4
    raw[at : at + 4] = size.to_bytes(4, "little")
    path.write_bytes(raw)
    if size:
        assert len(read_audio(path)) == 24_000
    else:
        with pytest.raises(UserError, match="holds no samples"):
            read_audio(path)


# --- levels ---------------------------------------------------------------------------------------


def test_levels_have_known_values():
    levels = measure_levels(tone(level=0.5), 24_000)
    assert levels.peak == pytest.approx(0.5, abs=1e-3)
    assert levels.rms_dbfs == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=0.01)
    assert levels.clipped == 0 and levels.leading == 0 and levels.trailing == 0
    assert measure_levels(torch.zeros(1000), 24_000).rms_dbfs == -120
    assert measure_levels(torch.full((1000,), 0.3), 24_000).rms_dbfs == -120  # DC is no sound


def test_flat_tops_count_as_clipped_and_round_ones_do_not():
    assert measure_levels(tone(hertz=50, level=1.0), 24_000).clipped == 0
    clipped = (3 * tone(hertz=50, level=1.0)).clamp(-1, 1)
    assert measure_levels(clipped, 24_000).clipped == pytest.approx(0.78, abs=0.02)
    assert measure_levels(0.2 * clipped, 24_000).clipped == pytest.approx(
        0.78, abs=0.02
    )  # turned down afterwards


def test_silence_is_trimmed_to_its_margin_and_speech_is_not_touched():
    speech = tone(1.0)
    audio = torch.cat([torch.zeros(12_000), speech, torch.zeros(24_000)])
    trimmed = trim_silence(audio, 24_000, keep=0.05)
    assert abs(len(trimmed) / 24_000 - 1.1) < 0.03
    levels = measure_levels(audio, 24_000)
    assert abs(levels.leading - 0.5) < 0.02 and abs(levels.trailing - 1.0) < 0.02
    assert torch.equal(trim_silence(speech, 24_000), speech)
    assert torch.equal(trim_silence(torch.zeros(5000), 24_000), torch.zeros(5000))


def test_loudness_is_met_unless_the_peak_forbids():
    for level in (0.001, 0.1, 0.9):
        assert measure_levels(match_loudness(tone(level=level)), 24_000).rms_dbfs == pytest.approx(
            -23, abs=0.01
        )
    spiky = torch.zeros(24_000)
    spiky[::2400] = 1.0
    assert float(match_loudness(spiky, -10).abs().max()) == pytest.approx(0.99, abs=1e-5)
    assert torch.equal(match_loudness(torch.zeros(10)), torch.zeros(10))


def test_levels_are_the_same_with_any_number_of_threads():
    """They stand in the manifest, whose hash must be the same wherever a dataset is prepared."""
    audio = torch.randn(400_003, generator=torch.Generator().manual_seed(1)) * 0.1 + 0.01
    threads, levels = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            levels.append(measure_levels(audio, 24_000).rms_dbfs)
    finally:
        torch.set_num_threads(threads)
    assert max(levels) - min(levels) < 1e-10
