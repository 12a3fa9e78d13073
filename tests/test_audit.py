"""The measures and findings of the audit, against sounds and texts whose truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import soundfile
import torch
from preparing import TEXT, folder_with, prepared, voice

from f5kit import audio as module
from f5kit.audio import log_mel, match_lufs, resample
from f5kit.audit import (
    estimate_bandwidth,
    estimate_snr,
    find_repeat,
    longest_pause,
    text_flags,
    wrong_script,
)
from f5kit.text import Tokenizer, english_vocab

pytestmark = pytest.mark.usefixtures("one_thread")
DEMO = sorted((Path(module.__file__).with_name("demo_voice") / "wavs").glob("*.flac"))


def speech(number: int) -> torch.Tensor:
    samples, rate = soundfile.read(DEMO[number], dtype="float32")
    return resample(torch.from_numpy(samples), rate, 24_000)


@pytest.mark.parametrize("decibel", [0, 10, 20])
def test_the_noise_estimate_is_near_the_truth(decibel):
    dice = torch.Generator().manual_seed(decibel)
    for number in range(6):
        clip = speech(number)
        noise = torch.randn(len(clip), generator=dice) * clip.square().mean().sqrt() * 10 ** (-decibel / 20)
        assert estimate_snr(log_mel(clip + noise)) == pytest.approx(decibel, abs=2)


def test_bandwidth_finds_where_a_spectrum_breaks_off():
    dice = torch.Generator().manual_seed(0)
    noise = torch.randn(5 * 24_000, generator=dice) * 0.1
    assert estimate_bandwidth(noise.numpy(), 24_000) == 12_000
    for rate in (8_000, 16_000):
        there_and_back = resample(resample(noise, 24_000, rate), rate, 24_000)
        assert estimate_bandwidth(there_and_back.numpy(), 24_000) == pytest.approx(rate / 2, rel=0.15)
        clip = resample(resample(speech(0), 24_000, rate), rate, 24_000)
        assert estimate_bandwidth(clip.numpy(), 24_000) <= rate / 2


def test_the_longest_pause_is_measured_inside_alone():
    a, b, quiet = voice(1.0), voice(1.0, seed=1), numpy.zeros(36_000, numpy.float32)
    assert longest_pause(numpy.concatenate([quiet, a, quiet, b, quiet]), 24_000) == pytest.approx(1.5, abs=0.05)
    assert longest_pause(numpy.zeros(100, numpy.float32), 24_000) == 0


@pytest.mark.parametrize("seconds", [0.31, 2.0])
@pytest.mark.parametrize("target", [-23.0, -16.0])
def test_loudness_is_the_one_asked_for(seconds, target):
    import pyloudnorm

    clip = speech(2)[: round(seconds * 24_000)] * 0.01
    levelled = match_lufs(clip, 24_000, target)
    heard = numpy.tile(levelled.numpy(), 4 if seconds < 0.4 else 1)
    meter = pyloudnorm.Meter(24_000)
    assert meter.integrated_loudness(heard) == pytest.approx(target, abs=0.4) or levelled.abs().max() > 0.98
    assert torch.equal(match_lufs(torch.zeros(9000), 24_000), torch.zeros(9000))


@pytest.mark.parametrize(
    ("text", "repeat"),
    [
        ("thank you thank you thank you", "thank you"),
        ("and and and and so on", "and"),
        ("very, very, very good", None),
        ("Row, row, row your boat, gently down the stream.", None),
        ("it was the best of times, it was the worst of times", None),
        ("谢谢谢谢谢谢谢谢谢谢谢谢", "谢谢"),
        ("", None),
    ],
)
def test_loops_of_a_recogniser_are_found(text, repeat):
    assert find_repeat(text) == repeat


def test_texts_are_flagged_for_what_a_model_can_not_say():
    tokenizer = Tokenizer(english_vocab())
    known = frozenset(tokenizer.vocab)
    assert text_flags("Plain words.", "en", "basic", tokenizer, known) == {}
    flags = text_flags("Ça coûte 20 € en 1905.", "fr", "basic", tokenizer, known)
    assert set(flags) == {"digits", "letters"} and "20, 1905" in flags["digits"] and "'Ç'" in flags["letters"]
    assert "digits" not in text_flags("Ça coûte 20 € en 1905.", "fr", "basic+numbers:fr", None, frozenset())
    assert set(text_flags("Привет, мир", "en", "basic", None, frozenset())) == {"script"}
    assert wrong_script("Привет", "ru") == 0 and wrong_script("Привет abc", "xx") == 0
    assert wrong_script("日本語テキスト", "ja") == 0 and wrong_script("Xin chào các bạn", "vi") == 0


def test_an_odd_clip_is_flagged_and_stays(tmp_path):
    lines = [f"a{n}|{TEXT} And {n}." for n in range(1, 21)]
    source = folder_with(tmp_path / "in", lines, clips=20)
    samples, rate = soundfile.read(source / "wavs" / "a7.wav", dtype="float32")
    soundfile.write(source / "wavs" / "a7.wav", samples * 0.05, rate, subtype="PCM_24")
    lines[2] = "a3|Yes."
    (source / "metadata.csv").write_text("\n".join(lines))
    rows, report = prepared(source)
    flags = {row["id"]: row["flags"] for row in rows}
    assert "pace" in flags["a3"] and "level" in flags["a7"] and report["rejected"] == 0
    assert report["flags"]["pace"] == 1 and report["flags"]["level"] == 1
    assert report["worst"]["pace"][0] == "a3" and report["worst"]["level"][0] == "a7"
    assert all("digits" in flags[name] for name in flags if name != "a3")
