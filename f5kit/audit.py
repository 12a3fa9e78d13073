"""What can be wrong with a clip: measures of its sound, findings in its text, and what each of them costs it.

A fault that spoils training rejects a clip; a suspicion is a flag, which leaves the clip in and puts it before the
reader's ears. Sound is measured on the clip as it will be trained on, clipping and level on the recording as it came.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from f5kit.errors import UserError
from f5kit.text import Tokenizer, normalise

MAX_CHARACTERS_PER_SECOND = 25.0  # nobody speaks so fast: the text belongs to another recording


@dataclass(frozen=True)
class Check:
    """One thing that is looked at, and how the report ranks clips by it."""

    says: str
    rank: str
    """SQL over a clip's columns and measures: the greater, the worse."""


# measures are those of `measure_sound`, by name; `{name}` in a rank stands for one
CHECKS = {
    "clipping": Check("flat tops: recorded too loud", "{clipped}"),
    "noise": Check("little speech above the noise", "-{snr}"),
    "silence": Check("long pauses inside the clip", "{pause}"),
    "bandwidth": Check("nothing above some frequency: once MP3, a telephone or a lower rate", "-{bandwidth}"),
    "level": Check("recorded far more quietly or loudly than the others", "abs({rms_dbfs} - {median_rms})"),
    "offset": Check("DC offset", "abs({offset})"),
    "pace": Check("characters a second far from the others: text and sound disagree", "abs(pace - {median_pace})"),
    "repeats": Check("phrases that come again and again", "{flag}"),
    "digits": Check("digits, which a model reads as letters it does not know", "{flag}"),
    "letters": Check("letters that the model's vocabulary lacks", "{flag}"),
    "script": Check("letters of another script than the language's", "{flag}"),
    "same text": Check("another clip says the same", "{flag}"),
    "asr": Check("a recogniser hears something else", "{cer}"),
}

NOISY, NARROW, LONG_PAUSE, DISAGREES = 15.0, 10_000.0, 1.5, 0.3  # dB, Hz, seconds, character error rate

_LATIN = (
    "af az ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms nl no pl pt ro sk sl sq sv sw tl tr uz vi"
)
_SCRIPTS = dict.fromkeys(_LATIN.split(), ("LATIN",))
_SCRIPTS |= dict.fromkeys("ru uk bg be kk ky mk mn tg".split(), ("CYRILLIC",))
_SCRIPTS |= dict.fromkeys("ar fa ur ps".split(), ("ARABIC",)) | dict.fromkeys("hi mr ne".split(), ("DEVANAGARI",))
_SCRIPTS |= {"el": ("GREEK",), "he": ("HEBREW",), "bn": ("BENGALI",), "ta": ("TAMIL",), "te": ("TELUGU",)}
_SCRIPTS |= {"th": ("THAI",), "ka": ("GEORGIAN",), "hy": ("ARMENIAN",), "ko": ("HANGUL",), "zh": ("CJK", "LATIN")}
_SCRIPTS |= {"ja": ("HIRAGANA", "KATAKANA", "CJK", "KATAKANA-HIRAGANA"), "sr": ("CYRILLIC", "LATIN")}


# ---- Sound


def measure_sound(audio: Tensor, mel: Tensor, rate: int) -> dict[str, float]:
    """snr (dB), bandwidth (Hz), pause (the longest inside, seconds) of a clip (nw,) with its log-mel (n, d)."""
    return {
        "snr": round(estimate_snr(mel), 2),
        "bandwidth": round(estimate_bandwidth(audio.numpy(), rate)),
        "pause": round(longest_pause(audio.numpy(), rate), 3),
    }


def estimate_snr(mel: Tensor) -> float:
    """Speech over steady noise in dB, from a log-mel (n, d): between -10 and 60.

    Minimum statistics: speech leaves every band now and then, so the quiet moments of a band tell its noise (Martin,
    2001). Powers are smoothed over 5 frames; a smoothed quantile lies below the mean of noise, by a factor that was
    found with white noise.
    """
    # A band of an HTK mel adds up as many magnitudes as it is wide, which is in proportion to its frequency + 700 Hz.
    width = np.logspace(0, math.log10(1 + 12_000 / 700), mel.shape[1])
    power = (2 * mel.double()).exp().numpy() / width  # n d
    if len(power) > 5:
        power = np.lib.stride_tricks.sliding_window_view(power, 5, axis=0).mean(-1)
    noise = 1.5 * np.quantile(power, 0.1, axis=0)
    speech = np.maximum(power.mean(0) - noise, 1e-12).sum()
    return float(np.clip(10 * np.log10(speech / max(noise.sum(), 1e-12)), -10, 60))


def estimate_bandwidth(audio: np.ndarray, rate: int) -> float:
    """The frequency in Hz at which the spectrum breaks off, half the rate where it does not.

    Speech fades towards high frequencies; a resampler or a codec leaves a cliff: 20 dB within 600 Hz and nothing
    comes back above it.
    """
    size = 1024
    frames = len(audio) // size
    if frames < 4:
        return rate / 2
    windows = audio[: frames * size].reshape(frames, size) * np.hanning(size).astype(np.float32)
    power = np.square(np.abs(np.fft.rfft(windows, axis=1))).mean(0)
    level = 10 * np.log10(np.convolve(power, np.ones(5) / 5, "same") + 1e-14)
    width = round(600 * size / rate)  # bins
    drops = level[:-width] - level[width:]
    highest = np.maximum.accumulate(level[::-1])[::-1]  # of this bin and all above
    cliffs = [
        k for k in range(round(3000 * size / rate), len(drops) - 4)
        if drops[k] > 20 and highest[k + width] < level[k] - 18
    ]  # fmt: skip
    return (cliffs[0] + width / 2) * rate / size if cliffs else rate / 2


def longest_pause(audio: np.ndarray, rate: int) -> float:
    """Seconds of the longest stretch, not at the ends, that is 40 dB below the loud parts."""
    step = rate // 50
    power = np.square(audio[: len(audio) // step * step].reshape(-1, step)).mean(1)
    if not len(power):
        return 0.0
    loud = np.flatnonzero(power > 1e-4 * np.quantile(power, 0.95))
    return float(np.diff(loud).max() - 1) / 50 if len(loud) > 1 else 0.0


# ---- Text


def clean_text(text: str) -> tuple[str, list[str]]:
    """NFC, white space joined, control characters removed; and what was mended."""
    text = unicodedata.normalize("NFC", text)
    kept = "".join(c for c in text if c.isspace() or (unicodedata.category(c) not in ("Cc", "Cs") and c != "\ufeff"))
    return " ".join(kept.split()), ["control characters removed from the text"] if kept != text else []


def check_text(text: str, place: str, seconds: float, frames: int) -> None:
    """Raises UserError, naming the place, for a text that nobody can read aloud, or not in that time."""
    if not text:
        raise UserError(f"{place}: the text is empty; write what is spoken")
    if not any(c.isalnum() for c in text):
        raise UserError(f"{place}: the text {text[:20]!r} has no letter and no digit; write what is spoken")
    pace = len(normalise(text)) / seconds
    if pace > MAX_CHARACTERS_PER_SECOND or len(text) > frames:
        raise UserError(
            f"{place}: {pace:.0f} characters a second, and speech has up to {MAX_CHARACTERS_PER_SECOND:g}; "
            "the text belongs to another recording, or the recording is cut"
        )


def text_flags(
    text: str, language: str | None, normaliser: str, tokenizer: Tokenizer | None, known: frozenset[str]
) -> dict[str, str]:
    """Suspicions about a text, {check: what}. `known` are the tokenizer's tokens."""
    flags = {}
    if found := find_repeat(text):
        flags["repeats"] = f"{found!r} again and again"
    if digits := re.findall(r"\d+", normalise(text, normaliser)):
        flags["digits"] = f"digits: {', '.join(dict.fromkeys(digits[:5]))}"
    if tokenizer is not None:
        lacking = dict.fromkeys(token for token in tokenizer.tokens(text) if token not in known)
        if lacking:
            flags["letters"] = f"the vocabulary lacks {' '.join(map(repr, list(lacking)[:10]))}"
    if share := wrong_script(text, language):
        flags["script"] = f"{share:.0%} of its letters are none of {language!r}"
    return flags


def find_repeat(text: str) -> str | None:
    """What a text says three times and more in a row (four, when it is a single word), as recognisers do when lost."""
    words = re.findall(r"\w+", text.casefold())
    for size in range(1, min(12, len(words) // 3) + 1):
        times = 4 if size == 1 else 3
        run = 1
        for i in range(size, len(words)):
            run = run + 1 if words[i] == words[i - size] else 1
            if run > size * (times - 1):
                return " ".join(words[i - size + 1 : i + 1])
    # Scripts without spaces: a piece of a word, often.
    looped = re.search(r"([^\W\d_]{2,10}?)\1{4,}", text[:1000])
    return looped[1] if looped else None


def wrong_script(text: str, language: str | None) -> float:
    """Share of letters that are not of the language's script; 0 for a language that is not known here."""
    expected = _SCRIPTS.get((language or "").split("-")[0].split("_")[0].lower())
    if not expected:
        return 0.0
    scripts = Counter(unicodedata.name(c, "?").split()[0] for c in text if c.isalpha())
    return 1 - sum(scripts[name] for name in expected) / max(1, scripts.total())
