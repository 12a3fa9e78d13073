"""Cutting long recordings: every cut in a pause, every word in a clip, and none but speech."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import soundfile

from f5kit import audio as module
from f5kit.errors import UserError
from f5kit.prepare import prepare_dataset
from f5kit.slicing import cut, find_speech, lay_out, load_vad, speech_probabilities

pytest.importorskip("silero_vad")
pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(module.__file__).with_name("demo_voice") / "wavs"
RATE = 44_100


def long_recording(path: Path, clips: int = 24) -> list[tuple[float, float]]:
    """Demo clips with pauses of 0.3 to 1 s between them, as 44.1 kHz stereo. Returns where each stretch of sound lies:
    from the first to the last moment that is less than 45 dB below the loudest."""
    import soxr

    dice = numpy.random.default_rng(3)
    pieces, loud, time = [], [], 0.0
    for clip in sorted(DEMO.glob("*.flac"))[:clips]:
        samples, rate = soundfile.read(clip, dtype="float32")
        step = rate // 100
        power = numpy.square(samples[: len(samples) // step * step].reshape(-1, step)).mean(1)
        above = numpy.flatnonzero(power > power.max() * 10**-4.5) / 100
        # stretches of sound, parted where 120 ms and more are quiet
        parts = numpy.split(above, numpy.flatnonzero(numpy.diff(above) > 0.12) + 1)
        loud += [(time + part[0], time + part[-1] + 0.01) for part in parts]
        pause = dice.normal(0, 1e-4, round(dice.uniform(0.3, 1.0) * rate)).astype("float32")
        pieces += [samples, pause]
        time += (len(samples) + len(pause)) / rate
    samples = soxr.resample(numpy.concatenate(pieces), rate, RATE)
    soundfile.write(path, numpy.stack([samples, 0.8 * samples], 1), RATE)
    return loud


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    return folder / "talk.wav", long_recording(folder / "talk.wav")


@pytest.fixture(scope="module")
def spans(recording, tmp_path_factory):
    layout = lay_out(recording[0], tmp_path_factory.mktemp("scratch") / "talk.f32", 24_000)
    seconds = layout.samples / layout.rate
    assert abs(seconds - soundfile.info(str(recording[0])).duration) < 0.001
    return cut(find_speech(speech_probabilities(layout, load_vad()), seconds, 12.0), seconds, 3.0, 12.0, 30.0)


def test_every_cut_falls_in_a_pause_and_no_word_is_lost(recording, spans):
    _, loud = recording
    assert all(later.start >= earlier.stop for earlier, later in zip(spans, spans[1:], strict=False))
    for span in spans:
        for time in (span.start, span.stop):
            inside = [(a, b) for a, b in loud if a + 0.01 < time < b - 0.01]
            assert not inside, f"the cut at {time:.2f} s lies in {inside}"
    for a, b in loud:
        assert any(span.start <= a + 0.01 and b - 0.01 <= span.stop for span in spans), f"{a:.2f} to {b:.2f} s is lost"


def test_lengths_are_as_asked(spans):
    lengths = [span.stop - span.start for span in spans]
    assert all(3 <= length <= 12.5 for length in lengths) and not any(span.problem for span in spans)
    assert sum(lengths) / len(lengths) > 6


def counting(audio, rate, language):
    return f"Clip {len(audio)}.", "en"


def test_a_long_recording_becomes_clips(recording, tmp_path):
    path, loud = recording
    dataset = prepare_dataset(path, tmp_path / "out", transcriber=counting, progress=False)
    rows, report = dataset.rows(), dataset.report
    assert {row["source"] for row in rows} == {"talk.wav"} and report["rejected"] == 0
    assert report["recorded_seconds"] == pytest.approx(soundfile.info(str(path)).duration, abs=0.01)
    heard = sum(b - a for a, b in loud)
    assert 0.98 * heard < report["seconds"] < report["recorded_seconds"]
    assert report["split"] == "the last clips of a recording, by text"
    last = [row["split"] for row in rows]
    assert last[-1] == "heldout" and "heldout" not in last[: -last.count("heldout")]


def test_without_speech_or_without_pauses_the_reason_is_told(tmp_path):
    noise = numpy.random.default_rng(0).normal(0, 0.05, 20 * 24_000).astype("float32")
    soundfile.write(tmp_path / "noise.wav", noise, 24_000)
    with pytest.raises(UserError, match="no speech in its 20 s"):
        prepare_dataset(tmp_path / "noise.wav", tmp_path / "out", transcriber=lambda *_: ("", "en"), progress=False)
    (whole,) = cut([(1.0, 36.0)], 40.0, 3.0, 12.0, 30.0)
    assert "without a pause" in whole.problem


@pytest.mark.parametrize("seed", range(20))
def test_any_speech_is_held_by_spans_within_the_limits(seed):
    dice = numpy.random.default_rng(seed)
    speech, time = [], dice.uniform(0, 3)
    for _ in range(dice.integers(1, 120)):
        length, pause = dice.exponential(2.5) + 0.2, dice.exponential(0.6) + 0.2
        speech.append((time, time + length))
        time += length + pause
    spans = cut(speech, time, 3.0, 12.0, 30.0)
    for a, b in speech:
        assert sum(span.start <= a and b <= span.stop for span in spans) == 1
    for span in spans:
        assert span.stop - span.start <= 30 or span.problem
        assert not any(a < t < b for a, b in speech for t in (span.start, span.stop))
    assert all(later.start >= earlier.stop - 1e-9 for earlier, later in zip(spans, spans[1:], strict=False))
