"""Thirty inputs that nobody should give: each ends in a sentence, at once, or in finite sound, and shows no path."""

from __future__ import annotations

import time

import pytest
import torch
from conftest import DEMO_VOICE

from f5kit.audio import read_audio, resample
from f5kit.errors import UserError
from f5kit.inference import Voice

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = {
    "empty": "", "blanks": " \n\t ", "NUL": "a\0b", "emoji": "Well done 👍🏽", "emoji alone": "😀",
    "100,000 characters": "word " * 20_000, "100,000 without a blank": "x" * 100_000, "one letter": "a",
    "one mark": "?", "marks": "... !!! --", "digits": "1234567890", "a long number": "9" * 40,
    "right to left": "مرحبا بالعالم", "right-to-left marks": "\u202eabc\u202c", "mixed directions": "Hello שלום",
    "combining marks": "Z\u0351\u036b\u0343a\u0363l\u0348g\u0332o", "zero-width": "a\u200bb\u200dc",
    "half a pair": "\ud800", "controls": "a\x07\x1b[31mb", "capitals": "STOP SHOUTING AT ME",
    "markup": "<b>bold</b> & <script>alert(1)</script>",
    "a path": "/etc/passwd ../../x", "one long word": "Donaudampfschifffahrtsgesellschaft" * 3,
    "line ends": "one\r\ntwo\rthree\u2028four", "not a text": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def voice():
    return Voice.load("tiny", vocoder="griffin-lim", device="cpu")


def ends_well(action, forbidden: str = str(DEMO_VOICE.parent.parent)) -> str | None:
    """The sentence of a UserError, or None after finite sound."""
    started = time.process_time()
    try:
        speech = action()
    except UserError as error:
        said = str(error)
        assert time.process_time() - started < 1, f"{time.process_time() - started:.1f} s for {said}"
        assert len(said) < 500 and forbidden not in said and "Traceback" not in said
        return said
    assert len(speech.audio) > 500 and speech.audio.isfinite().all() and speech.seconds < 120
    return None


@pytest.mark.parametrize("name", TEXTS)
def test_texts(voice, name):
    said = ends_well(lambda: voice.speak(TEXTS[name], steps=1, speed=4, progress=False))
    spoken = ("one letter", "digits", "a long number", "capitals", "markup", "a path", "one long word", "line ends")
    assert (said is None) == (name in spoken), said


def test_too_long_for_one_sound_streams(voice):
    """What speak refuses begins to sound at once where it is taken chunk by chunk."""
    piece = next(voice.stream(TEXTS["100,000 characters"], steps=1))
    assert 0.5 < piece.seconds < 5


@pytest.mark.parametrize("kind", ["silent", "of 80 s", "stereo at 8 kHz", "empty", "a text file"])
def test_references(voice, kind, tmp_path):
    import soundfile

    file, words = tmp_path / "given.wav", "What is said here."
    clip = read_audio(next(DEMO_VOICE.glob("wavs/*.flac")))
    if kind == "silent":
        soundfile.write(file, torch.zeros(48_000).numpy(), 24_000)
    elif kind == "of 80 s":
        soundfile.write(file, clip.repeat(80 * 24_000 // len(clip) + 1)[: 80 * 24_000].numpy(), 24_000)
    elif kind == "stereo at 8 kHz":
        soundfile.write(file, torch.stack([resample(clip, 24_000, 8_000)] * 2, 1).numpy(), 8_000)
    else:
        file.write_bytes(b"" if kind == "empty" else b"These are words, not sound.")
    how = {"steps": 1, "speed": 4, "progress": False}
    said = ends_well(lambda: voice.refer_to(file, words).speak("Hello.", **how), str(tmp_path))
    assert (said is None) == (kind in ("of 80 s", "stereo at 8 kHz")), said
    if said:
        assert "given.wav" in said


def test_a_reference_text_of_another_language(voice):
    clip = next(DEMO_VOICE.glob("wavs/*.flac"))
    said = ends_well(lambda: voice.refer_to(clip, "Это другой язык.").speak("Hello.", steps=1, speed=4, progress=False))
    assert "lacks 'Э' 'т' 'о'" in said and clip.name in said
