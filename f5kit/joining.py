"""Making one sound of several: levels, silences, cross-fades, and whether a sound begins with its reference's end.

Audio is float32 (nw,), full scale at 1.0; mels are raw log-mels (n, d).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAK = 0.86  # likeness from which on a start counts as the reference's end said again
_TEMPLATE, _SEARCHED = 40, 120  # frames: the end that is looked for, and the start it is looked for in
_QUIET = 4.0  # natural-log units below the loudest frame: silence


def cross_fade(pieces: list[Tensor], overlap: int) -> Tensor:
    """Join sounds (nw,), each fading into the next over `overlap` samples."""
    joiner = Joiner(overlap)
    return torch.cat([*(joiner.push(piece) for piece in pieces), joiner.end()])


class Joiner:
    """Joins sounds as they come: what it returns, in a row, is their cross-fade.

    It holds back the last `overlap` samples, for they fade into what comes next.
    """

    def __init__(self, overlap: int):
        self.overlap, self._tail, self.given = overlap, torch.zeros(0), 0

    @property
    def start(self) -> int:
        """Where in the whole the middle of the next fade lies, in samples: there the next sound begins."""
        return self.given + len(self._tail) // 2

    def push(self, audio: Tensor) -> Tensor:
        """The samples that stand fast when `audio` (nw,) follows."""
        k = min(len(self._tail), len(audio))
        ramp = torch.linspace(0, 1, k)
        kept = len(self._tail) - k
        mixed = self._tail[kept:] * (1 - ramp) + audio[:k] * ramp
        whole = torch.cat((self._tail[:kept], mixed, audio[k:]))
        ready = max(len(whole) - self.overlap, kept)
        self._tail = whole[ready:]
        self.given += ready
        return whole[:ready]

    def pause(self, samples: int) -> Tensor:
        """Silence, into which what was said fades, and from which what follows fades in: so many samples more."""
        return self.push(torch.zeros(samples + self.overlap))

    def end(self) -> Tensor:
        """What was held back."""
        tail, self._tail = self._tail, torch.zeros(0)
        self.given += len(tail)
        return tail


def speech_level(audio: Tensor, sample_rate: int) -> float:
    """The root mean square of the 20 ms frames that are less than 30 dB below the loudest one; 0 for silence."""
    power = _power(audio, sample_rate)
    loudest = power.max() if len(power) else torch.zeros(())
    return float(power[power >= loudest * 1e-3].mean().sqrt()) if loudest > 0 else 0.0


def match_level(audio: Tensor, sample_rate: int, level: float, most: float = 2.0) -> Tensor:
    """Audio brought to `level` as far as a factor of `most` (2 is 6 dB) and its peak allow; silence stays."""
    own, peak = speech_level(audio, sample_rate), float(audio.abs().max()) if len(audio) else 0.0
    if own == 0 or level == 0:
        return audio
    return audio * min(max(level / own, 1 / most), most, max(0.99 / peak, 1 / most))


def shorten_silences(audio: Tensor, sample_rate: int, longest: float, threshold_dbfs: float = -50.0) -> Tensor:
    """Audio in which no silence lasts longer than `longest` seconds: each longer one loses its middle."""
    hop = max(1, sample_rate // 100)
    quiet = _power(audio, sample_rate) < 10 ** (threshold_dbfs / 10)
    kept, start, most = [], 0, round(longest * 100)
    edges = torch.diff(quiet.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    runs = zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True)
    for first, last in runs:
        if last - first > most:
            kept.append(audio[start : (first + most // 2) * hop])
            start = (last - (most - most // 2)) * hop
    return torch.cat([*kept, audio[start:]])


def leak(mel: Tensor, reference: Tensor) -> float:
    """How much the start of `mel` is like the end of its reference, -1 to 1; LEAK or more is taken for a repetition.

    The last spoken 0.4 s of the reference are laid over each place of the first 1.3 s, at three speeds; the likeness is
    the correlation of the two pictures without the reference's mean spectrum. 0 where either is too short or silent.
    """
    reference, mel = reference.float().cpu(), mel.float().cpu()[:_SEARCHED]
    spoken = _spoken(reference)
    if spoken is None or spoken[1] - spoken[0] < _TEMPLATE or len(mel) < 2 * _TEMPLATE or _spoken(mel) is None:
        return 0.0
    floor = reference.max() - 2 * _QUIET  # pauses are alike in everybody: what lies below does not count
    given, made = (_coarse(m.clamp(min=floor)) for m in (reference[spoken[0] : spoken[1]], mel))
    mean, size, found = given.mean(dim=0), _TEMPLATE // 2, -1.0
    for stretch in (0.85, 0.92, 1.0, 1.08, 1.17):
        length = round(size * stretch)
        end = F.interpolate((given[-size:] - mean).T[None], size=length, mode="linear", align_corners=False)[0].T
        windows = made.unfold(0, length, 1).transpose(1, 2) - mean  # places length bands
        found = max(found, float(_correlation(windows.flatten(1), end.flatten())))
    return found


def _coarse(mel: Tensor) -> Tensor:
    """Means of 2 frames and 4 bins: what two utterances of a word have in common."""
    return F.avg_pool2d(mel[None], (2, 4))[0]


def _correlation(rows: Tensor, one: Tensor) -> Tensor:
    """The largest correlation of any row with `one`."""
    rows, one = rows - rows.mean(dim=1, keepdim=True), one - one.mean()
    return (rows @ one / (rows.norm(dim=1) * one.norm()).clamp(min=1e-6)).max()


def _spoken(mel: Tensor) -> tuple[int, int] | None:
    """The first frame that is not silent and one past the last."""
    energy = mel.mean(dim=1)
    loud = (energy > energy.max() - _QUIET).nonzero().flatten()
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) and float(mel.max() - mel.min()) > 1 else None


def _power(audio: Tensor, sample_rate: int) -> Tensor:
    """Mean square of 20 ms frames, 10 ms apart."""
    frame = max(2, sample_rate // 50)
    if len(audio) < frame:
        return audio.square().mean()[None] if len(audio) else audio
    return audio.square().unfold(0, frame, frame // 2).mean(-1)
