"""How long a text takes to say: a rate for each kind of character and pause, fitted to a dataset's clips.

Upstream takes the reference's seconds for each UTF-8 byte. A byte is no unit of speech: a Vietnamese vowel has three, a
pause has one, and a digit stands for a word. Here the reference only sets the pace; `duration_errors` compares the two.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy

from f5kit.chunks import CLAUSES, SPACED_CLAUSES, SPACED_STOPS, STOPS
from f5kit.data import Clip, Dataset

# Seconds of each kind in unhurried speech. Of fitted rates these are what scarce kinds fall back to.
USUAL = {
    "vowel": 0.080, "consonant": 0.060, "abjad": 0.095, "abugida": 0.100, "syllable": 0.140, "ideograph": 0.220,
    "mark": 0.035, "digit": 0.280, "space": 0.020, "clause": 0.180, "stop": 0.300, "other": 0.010,
}  # fmt: skip
EDGES = 0.15  # seconds of silence at both ends of a clip together
SHORTEST = 0.35  # seconds; nobody says anything in less
PACES = 0.2  # how much voices differ in pace: the usual deviation of its logarithm
_VOWELS = frozenset("aeiouyаеёиоуыэюяіїєαεηιουω")
_SYLLABLES = ("HANGUL", "HIRAGANA", "KATAKANA", "HALFWIDTH", "ETHIOPIC", "YI", "CHEROKEE")
_ALPHABETS = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "GEORGIAN", "COPTIC", "MODIFIER", "FULLWIDTH")
_ABJADS = ("ARABIC", "HEBREW", "SYRIAC", "THAANA")


@cache  # of characters, of which there are not many
def kind(character: str) -> str:
    """The kind of a character, a key of USUAL."""
    category = unicodedata.category(character)
    if character.isspace():
        return "space"
    if character in SPACED_STOPS or character in STOPS:
        return "stop"
    if character in SPACED_CLAUSES or character in CLAUSES:
        return "clause"
    if category[0] in "MN":
        return "mark" if category[0] == "M" else "digit"
    if category[0] != "L":
        return "other"
    script = unicodedata.name(character, "CJK").split()[0].split("-")[0]
    if script in ("CJK", "IDEOGRAPHIC"):
        return "ideograph"
    if script in _SYLLABLES or script in _ABJADS:
        return "syllable" if script in _SYLLABLES else "abjad"
    if script not in _ALPHABETS:
        return "abugida"
    return "vowel" if unicodedata.normalize("NFD", character)[0].lower() in _VOWELS else "consonant"


def usual_seconds(text: str) -> float:
    """Seconds of a text at the usual rates, without the silence at its ends: grows with every character."""
    return sum(USUAL[kind(c)] * n for c, n in Counter(text).items())


@dataclass(frozen=True)
class Pace:
    """Rates fitted to a voice or a language. The default is the usual ones."""

    rates: dict[str, float] = field(default_factory=lambda: dict(USUAL))
    """Seconds of each kind of character, and of single characters that have a rate of their own."""
    edges: float = EDGES
    """Seconds that every clip takes beside its characters."""
    error: float | None = None
    """The usual deviation of the logarithm of its guesses on the clips it was fitted to; None when it was not."""
    clips: int = 0
    """How many those were."""

    def seconds(self, text: str) -> float:
        """Seconds the text takes at this pace, SHORTEST at least."""
        spoken = sum(self.rates.get(c, self.rates[kind(c)]) * n for c, n in Counter(text).items())
        return max(self.edges + spoken, SHORTEST)

    def continue_from(self, reference: str, seconds: float, text: str) -> float:
        """Seconds the text takes when it continues a reference that says `reference` in `seconds`.

        A single clip tells the pace of its speaker only roughly: it is believed as far as paces differ more than
        guesses err (by the ratio of their variances), and wholly where nothing was fitted.
        """
        trust = 1.0 if self.error is None else PACES**2 / (PACES**2 + self.error**2)
        return max(self.seconds(text) * (seconds / self.seconds(reference)) ** trust, SHORTEST)


def fit_pace(texts: Sequence[str], seconds: Sequence[float]) -> Pace:
    """Rates by least squares of the relative error, drawn towards the usual ones as far as data is scarce.

    Frequent characters get rates of their own where that guesses better on clips it was not fitted to (five folds).
    """
    if len(texts) < 5:
        return Pace()
    folds = numpy.arange(len(texts)) % 5
    errors = {}
    for single in (False, True):
        left_out = []
        for fold in range(5):
            rates, edges = _solve(*_subset(texts, seconds, folds != fold), single)
            left_out += [_log_error(Pace(rates, edges), t, s) for t, s in _pairs(texts, seconds, folds == fold)]
        errors[single] = float(numpy.std(left_out))
    single = errors[True] < errors[False]
    return Pace(*_solve(texts, seconds, single), error=errors[single], clips=len(texts))


def dataset_pace(dataset: Dataset) -> Pace:
    """The pace of a dataset's training clips."""
    return _pace_of(dataset.train)


def _pace_of(clips: Sequence[Clip]) -> Pace:
    """The pace of some clips; of 2,000 of them at most, spread over all."""
    some = clips[:: 1 + len(clips) // 2000]
    return fit_pace([clip.text for clip in some], [clip.seconds for clip in some])


def seconds_by_bytes(reference: str, seconds: float, text: str) -> float:
    """Upstream's rule (F5-TTS, infer/utils_infer.py): as many seconds a byte as the reference has."""
    return seconds * len(text.encode()) / len(reference.encode())


def duration_errors(clips: Sequence[Clip], references: int = 5) -> dict[str, float]:
    """How far guessed lengths of held-out clips are off, as the mean of |guess / truth - 1|.

    Both rules continue the same references, training clips spread over all of them.
    {"fitted", "by_bytes", "clips", "references"}; a clip in ten is held out here where the dataset holds none out.
    """
    held = [clip for clip in clips if clip.split == "heldout"] or clips[::10]
    left_out = {clip.id for clip in held}
    known = [clip for clip in clips if clip.id not in left_out] or clips
    pace = _pace_of(known)
    given = known[:: max(1, len(known) // references)][:references]
    fitted, by_bytes = [], []
    for reference in given:
        start = reference.text, reference.seconds
        fitted += [abs(pace.continue_from(*start, clip.text) / clip.seconds - 1) for clip in held]
        by_bytes += [abs(seconds_by_bytes(*start, clip.text) / clip.seconds - 1) for clip in held]
    return {
        "fitted": float(numpy.mean(fitted)), "by_bytes": float(numpy.mean(by_bytes)),
        "clips": len(held), "references": len(given),
    }  # fmt: skip


# ---- Fitting


def _pairs(texts, seconds, chosen):
    return [(t, s) for t, s, take in zip(texts, seconds, chosen, strict=True) if take]


def _subset(texts, seconds, chosen):
    return [list(column) for column in zip(*_pairs(texts, seconds, chosen), strict=True)]


def _log_error(pace: Pace, text: str, seconds: float) -> float:
    return float(numpy.log(pace.seconds(text) / seconds))


def _solve(texts: Sequence[str], seconds: Sequence[float], single: bool) -> tuple[dict[str, float], float]:
    """(rates, edges): ridge regression around the usual rates, brought to this voice's pace first.

    With `single`, characters that occur 30 times or more have a rate of their own, which is drawn to their kind's.
    """
    counts = [Counter(text) for text in texts]
    often = Counter(c for text in texts for c in text)
    own = sorted(c for c, n in often.items() if n >= 30 and c.isalpha()) if single else []
    kinds = list(USUAL)
    x = numpy.zeros((len(texts), len(kinds) + 1 + len(own)))  # clips; kinds, edges, single characters
    for row, count in zip(x, counts, strict=True):
        for c, n in count.items():
            row[kinds.index(kind(c))] += n
        row[len(kinds)] = 1
        row[len(kinds) + 1 :] = [count[c] for c in own]
    usual = numpy.array([*USUAL.values(), EDGES])
    y = numpy.asarray(seconds, dtype=float)
    usual = usual * numpy.median(y / (x[:, : len(usual)] @ usual))
    width = numpy.concatenate([usual, [0.5 * usual[kinds.index(kind(c))] for c in own]])  # what a rate may be off
    start = numpy.concatenate([usual, numpy.zeros(len(own))])
    rates = start + _ridge(x / y[:, None], 1 - (x @ start) / y, width)
    rates[: len(usual)] = rates[: len(usual)].clip(min=0.1 * usual)
    by_kind = dict(zip(kinds, rates[: len(kinds)].tolist(), strict=True))
    for c, more in zip(own, rates[len(usual) :].tolist(), strict=True):
        by_kind[c] = max(by_kind[kind(c)] + more, 0.1 * by_kind[kind(c)])
    return by_kind, float(rates[len(kinds)])


def _ridge(x, y, width, noise: float = 0.1):
    """argmin |x r - y|^2 / noise^2 + |r / width|^2: noise is what a clip's length is usually off, as a share."""
    scaled = x * width
    return width * numpy.linalg.solve(scaled.T @ scaled + noise**2 * numpy.eye(len(width)), scaled.T @ y)
