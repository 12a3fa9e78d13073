"""Long recordings into clips, cut at pauses: the recording laid out on disk, where it is speech, and where to cut.

An hour is decoded once, block by block, into a file of 24 kHz mono that is mapped into memory; nothing here holds more
than some minutes of it. Speech is found by Silero VAD, from its own package, by the model that takes whole sequences:
it needs onnxruntime and no torchaudio, runs 32 ms windows at some hundred times real time on one core, and gives the
very probabilities of the streaming model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from f5kit.audio import flat_tops
from f5kit.errors import UserError
from f5kit.media import Sound, open_sound

VAD_RATE, _WINDOW = 16_000, 512
_STEP = 0.01  # seconds, the grid on which clipping is counted


@dataclass(frozen=True)
class Span:
    """A piece of a recording, in seconds."""

    start: float
    stop: float
    problem: str | None = None


@dataclass
class Layout:
    """A whole recording as float32 mono in a file of raw samples, and what was heard on the way."""

    path: Path
    rate: int
    samples: int
    peak: float
    offset: float
    """Mean of the samples: DC."""
    cancelled: bool
    """The channels are in opposite phase: the left one was taken."""
    clipped: np.ndarray
    """Share of clipped samples in each 10 ms, at the recording's own rate."""

    def read(self, start: float = 0.0, stop: float | None = None) -> np.ndarray:
        """Samples between two times, as a view of the file."""
        last = self.samples if stop is None else min(self.samples, round(stop * self.rate))
        return np.memmap(self.path, np.float32, "r", shape=(self.samples,))[max(0, round(start * self.rate)) : last]

    def clipped_share(self, start: float, stop: float) -> float:
        part = self.clipped[int(start / _STEP) : max(int(start / _STEP) + 1, int(stop / _STEP))]
        return float(part.mean()) if len(part) else 0.0


def lay_out(source: Path | bytes, path: Path, rate: int, name: str = "it") -> Layout:
    """Decode a recording into the file `path`, mono at `rate` Hz. Raises UserError as `open_sound` does."""
    layout, power = _lay_out(open_sound(source, name), path, rate, left=False)
    if power[0] < 0.01 * power[1]:  # 20 dB lost: the channels cancel
        layout, _ = _lay_out(open_sound(source, name), path, rate, left=True)
        layout.cancelled = True
    return layout


def _lay_out(sound: Sound, path: Path, rate: int, left: bool) -> tuple[Layout, tuple[float, float]]:
    """The layout, and the power of the mono sum and of the channels."""
    import soxr
    import torch

    stream = soxr.ResampleStream(sound.rate, rate, 1, dtype="float32", quality="VHQ") if sound.rate != rate else None
    count, peak, total, powers, clipped = 0, 0.0, 0.0, np.zeros(2), []
    step = max(1, round(sound.rate * _STEP))
    with open(path, "wb") as file:
        for block in sound.blocks:
            mono = np.ascontiguousarray(block[:, 0] if left else block.mean(1))
            powers += np.vdot(mono, mono), np.vdot(block, block) / block.shape[1]
            peak, total = max(peak, float(np.abs(mono).max())), total + float(mono.sum(dtype=np.float64))
            tops = flat_tops(torch.from_numpy(mono)).numpy()
            whole = len(tops) // step * step
            clipped.append(tops[:whole].reshape(-1, step).mean(1, dtype=np.float32))
            out = stream.resample_chunk(mono) if stream else mono
            file.write(out.data)
            count += len(mono)
        if stream:
            file.write(stream.resample_chunk(np.zeros(0, np.float32), last=True).data)
        samples = file.tell() // 4
    offset = total / count
    return Layout(path, rate, samples, peak, offset, False, np.concatenate(clipped)), tuple(powers)


def load_vad():
    """Silero VAD. Raises UserError where it is not installed."""
    try:
        from silero_vad import load_silero_vad

        return load_silero_vad(sequence=True)
    except (ImportError, TypeError):  # TypeError: a version before `sequence`
        raise UserError(
            "cutting long recordings needs Silero VAD, of the extra data: pip install 'silero-vad>=6.2.3' onnxruntime"
        ) from None


def speech_probabilities(layout: Layout, vad) -> np.ndarray:
    """How likely each 32 ms hold speech, in blocks of minutes: each starts a second early, so that the model's state
    has settled."""
    import soxr

    per_window = layout.rate * _WINDOW // VAD_RATE  # samples
    block, early, found = 10_000, 32, []  # windows
    for first in range(0, -(-layout.samples // per_window), block):
        begin = max(0, first - early)
        audio = layout.read()[begin * per_window : (first + block) * per_window] - np.float32(layout.offset)
        audio = soxr.resample(audio, layout.rate, VAD_RATE, quality="HQ") if layout.rate != VAD_RATE else audio
        found.append(vad.audio_forward(audio)[first - begin :][:block])
    return np.concatenate(found)


def find_speech(probabilities: np.ndarray, seconds: float, longest: float) -> list[tuple[float, float]]:
    """(start, stop) of every stretch of speech between pauses of 200 ms; of 100 ms inside what is longer than that."""
    from silero_vad.utils_vad import get_speech_timestamps_from_probs

    def stretches(part, pause_ms: int, offset: float) -> list[tuple[float, float]]:
        found = get_speech_timestamps_from_probs(
            part, sampling_rate=VAD_RATE, audio_length_samples=len(part) * _WINDOW, speech_pad_ms=0,
            min_silence_duration_ms=pause_ms, min_speech_duration_ms=100,
        )  # fmt: skip
        return [(offset + s["start"] / VAD_RATE, min(seconds, offset + s["end"] / VAD_RATE)) for s in found]

    window, speech = _WINDOW / VAD_RATE, []
    for start, stop in stretches(probabilities, 200, 0.0):
        first, last = round(start / window), round(stop / window)
        inner = stretches(probabilities[first:last], 100, start) if stop - start > longest else []
        speech += inner or [(start, stop)]
    return speech


def cut(
    speech: list[tuple[float, float]],
    seconds: float,
    shortest: float,
    longest: float,
    hard: float,
    margin: float = 0.25,
) -> list[Span]:
    """Spans of `shortest` to `longest` seconds where the pauses allow it, of at most `hard`, that hold all speech.

    Every cut lies in a pause, as far from speech as the pause allows, at most `margin`. Among the ways to cut, the one
    is taken that keeps the lengths best and cuts at long pauses (dynamic programming). Speech that goes on for more
    than `hard` seconds without a pause becomes a span with a problem.
    """
    n = len(speech)
    best, came_from = [0.0] + [float("inf")] * n, [0] * (n + 1)
    for j in range(1, n + 1):
        pause = speech[j][0] - speech[j - 1][1] if j < n else 1.0
        for i in range(j - 1, -1, -1):
            length = speech[j - 1][1] - speech[i][0] + 2 * margin
            inner = speech[i + 1][0] - speech[i][1] if i < j - 1 else 0.0
            if i < j - 1 and (length > hard or inner > 1.5):  # a long silence belongs to no clip
                break
            cost = best[i] + 0.1 + 2 * max(0.0, 0.5 - pause)
            cost += 5 + length - longest if length > longest else 4 * max(0.0, 1 - length / shortest)
            if cost < best[j]:
                best[j], came_from[j] = cost, i
    spans, j = [], n
    while j:
        i = came_from[j]
        before = speech[i][0] - (speech[i - 1][1] if i else 0.0)
        after = (speech[j][0] if j < n else seconds) - speech[j - 1][1]
        start = speech[i][0] - min(margin, before / 2 if i else before)
        stop = speech[j - 1][1] + min(margin, after / 2 if j < n else after)
        problem = None
        if stop - start > hard:
            problem = f"{stop - start:.1f} s of speech without a pause, and a clip has up to {hard:g} s"
        spans.append(Span(start, stop, problem))
        j = i
    return spans[::-1]
