"""One recording into clean clips: what a worker process does, from the file to FLAC, mel and measures."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from f5kit.audio import (
    decode,
    log_mel,
    match_lufs,
    measure_levels,
    read_audio,
    resample,
    to_mono,
    trim_silence,
    write_audio,
)
from f5kit.audit import measure_sound
from f5kit.config import MelConfig
from f5kit.data import FORMAT
from f5kit.errors import UserError
from f5kit.media import open_sound
from f5kit.slicing import Layout, Span, cut, find_speech, lay_out, load_vad, speech_probabilities

UNREAD = "unread"  # the hash of what could not be read: it is tried again the next time


@dataclass(frozen=True)
class Options:
    """All that a prepared clip depends on, beside its recording."""

    min_seconds: float = 0.3
    max_seconds: float = 30.0
    slices: tuple[float, float] = (3.0, 12.0)
    loudness: float | None = -23.0
    trim: bool = True
    mel: MelConfig = field(default_factory=MelConfig)
    format: int = FORMAT  # of the folder

    def __post_init__(self):
        if not 0.1 <= self.min_seconds < self.max_seconds:
            raise UserError(f"min_seconds is {self.min_seconds:g}; choose 0.1 or more, below {self.max_seconds:g}")
        if not self.min_seconds <= self.slices[0] < self.slices[1] <= self.max_seconds:
            raise UserError(
                f"slices are {self.slices[0]:g} to {self.slices[1]:g} s; choose two lengths between "
                f"{self.min_seconds:g} and {self.max_seconds:g}, the shorter first"
            )

    def mark(self, whole: bool) -> str:
        """A word for these options and for whether a recording is kept whole; it begins the hash of what is heard."""
        return hashlib.sha256(f"{sorted(asdict(self).items())} {whole}".encode()).hexdigest()[:16] + ":"


@dataclass(frozen=True)
class Task:
    """A recording to be heard, or spans of one that is laid out already."""

    id: str
    source: Path | bytes
    shown: str
    """How messages call it."""
    whole: bool
    """It has a text, so it is one clip; else it is cut at pauses when it is long."""
    known: str = ""
    """Hash of what was heard last time under this id."""
    layout: Layout | None = None
    spans: tuple[tuple[int, Span], ...] = ()


@dataclass
class Heard:
    """One clip, or why there is none."""

    part: int
    id: str
    problem: str | None = None
    mended: list[str] = field(default_factory=list)
    start: float | None = None
    stop: float | None = None
    measures: dict = field(default_factory=dict)
    seconds: float | None = None
    sha256: str | None = None
    """Of the clip's 16-bit samples."""
    mel: np.ndarray | None = None
    """(n, d) float16."""


@dataclass
class Result:
    """What came of a task."""

    id: str
    hash: str = ""
    same: bool = False
    """Nothing has changed since last time."""
    clips: list[Heard] = field(default_factory=list)
    layout: Layout | None = None
    """A long recording, laid out, and where it will be cut."""
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0
    """Of the recording."""


def content_hash(source: Path | bytes, shown: str) -> str:
    """sha256 of a recording's bytes. Raises UserError where they can't be had."""
    digest = hashlib.sha256()
    if isinstance(source, bytes):
        digest.update(source)
    elif source.is_file():  # a pipe would be waited for without end
        try:
            with open(source, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"{shown} cannot be read ({error.strerror}); copy it again, or allow it") from None
    return digest.hexdigest()


def hear(task: Task, folder: Path, options: Options) -> Result:
    """Do a task: clips go to `folder`/clips, long recordings to `folder`/scratch. Faults of a recording become rows."""
    if task.layout is not None:
        return Result(task.id, clips=[_hear_span(task, part, span, folder, options) for part, span in task.spans])
    result = Result(task.id, UNREAD)
    try:
        result.hash = f"{options.mark(task.whole)}{content_hash(task.source, task.shown)}"
        if result.hash == task.known:
            result.same = True
            return result
        if not task.whole and _is_long(task, options):
            _lay_out_and_cut(task, result, folder, options)
        else:
            audio, rate = decode(task.source, max(600.0, 2 * options.max_seconds), task.shown)
            result.clips = [_finish(Heard(0, task.id), *_mono(audio, rate, task.shown), task.shown, folder, options)]
            result.seconds = audio.shape[1] / rate
    except UserError as error:
        result.clips = [Heard(0, task.id, problem=_own_words(error, task))]
    return result


def _own_words(error: UserError, task: Task) -> str:
    """The message without the path of this machine."""
    return str(error) if isinstance(task.source, bytes) else str(error).replace(str(task.source), task.shown)


def _is_long(task: Task, options: Options) -> bool:
    sound = open_sound(task.source, task.shown)
    _check_rate(sound.rate, task.shown)
    frames = sound.declared
    for block in sound.blocks if not frames else ():
        frames += len(block)
        if frames > options.slices[1] * sound.rate:
            break
    return frames > options.slices[1] * sound.rate


def _lay_out_and_cut(task: Task, result: Result, folder: Path, options: Options) -> None:
    vad = load_vad()  # first: its absence is told before an hour is decoded
    scratch = folder / "scratch" / f"{task.id}.f32"
    scratch.parent.mkdir(exist_ok=True)
    try:
        layout = lay_out(task.source, scratch, options.mel.sample_rate, task.shown)
        result.seconds = layout.samples / layout.rate
        speech = find_speech(speech_probabilities(layout, vad), result.seconds, options.slices[1])
        if not speech:
            raise UserError(f"{task.shown} has no speech in its {result.seconds:.0f} s; record it again")
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    result.layout = layout
    result.spans = cut(speech, result.seconds, *options.slices, options.max_seconds)


def _part_name(identity: str, part: int) -> str:
    return f"{identity}~{part + 1:04d}"


def _hear_span(task: Task, part: int, span: Span, folder: Path, options: Options) -> Heard:
    layout = task.layout
    heard = Heard(part, _part_name(task.id, part), start=round(span.start, 3), stop=round(span.stop, 3))
    shown = f"{task.shown} at {span.start:.1f} s"
    try:
        if span.problem:
            raise UserError(f"{shown}: {span.problem}; record it with pauses")
        audio = torch.from_numpy(layout.read(span.start, span.stop) - np.float32(layout.offset))
        if layout.cancelled:
            heard.mended.append("channels in opposite phase: the left one is used")
        levels = asdict(measure_levels(audio, layout.rate))
        # the peak is the recording's own: resampled, full scale swings over
        levels |= {"clipped": layout.clipped_share(span.start, span.stop), "offset": layout.offset, "peak": layout.peak}
        return _finish(heard, audio, layout.rate, levels, shown, folder, options)
    except UserError as error:
        heard.problem = str(error)
        return heard


def _check_rate(rate: int, shown: str) -> None:
    if not 8000 <= rate <= 1_000_000:
        raise UserError(f"{shown} has a sample rate of {rate} Hz; speech needs 8000 Hz or more")


def _mono(audio: Tensor, rate: int, shown: str) -> tuple[Tensor, int, dict]:
    _check_rate(rate, shown)
    mono, cancelled = to_mono(audio)
    offset = float(mono.double().mean())
    return mono, rate, {**asdict(measure_levels(mono, rate)), "offset": offset, "cancelled": cancelled}


def _finish(heard: Heard, audio: Tensor, rate: int, levels: dict, shown: str, folder: Path, options: Options) -> Heard:
    """A recording (nw,) as a clip: mended, resampled, trimmed, levelled, written, measured."""
    if levels["rms_dbfs"] < -60:
        raise UserError(f"{shown} is silent ({levels['rms_dbfs']:.0f} dBFS); record it again")
    if levels["clipped"] > 0.01:
        raise UserError(f"{shown} is clipped for {levels['clipped']:.0%} of its time; record it again, less loud")
    if levels.pop("cancelled", False):
        heard.mended.append("channels in opposite phase: the left one is used")
    if abs(levels["offset"]) > 0.1 * 10 ** (levels["rms_dbfs"] / 20):
        audio = audio - float(audio.double().mean())
        heard.mended.append(f"DC offset of {levels['offset']:.3f} removed")
    if levels["peak"] > 1:
        audio = audio / levels["peak"]
        heard.mended.append(f"peak of {levels['peak']:.2f} lowered to full scale")
    clip = resample(audio, rate, options.mel.sample_rate)
    if options.trim:
        clip = trim_silence(clip, options.mel.sample_rate)
    if options.loudness is not None:
        clip = match_lufs(clip, options.mel.sample_rate, options.loudness)
    seconds = len(clip) / options.mel.sample_rate
    if not options.min_seconds <= seconds <= options.max_seconds:
        remedy = "cut it at its pauses" if seconds > options.max_seconds else "join it with its neighbour"
        span = f"{options.min_seconds:g} to {options.max_seconds:g} s"
        raise UserError(f"{shown} lasts {seconds:.2f} s, and clips of {span} are used; {remedy}")
    path = write_audio(folder / "clips" / f"{heard.id}.flac", clip, options.mel.sample_rate)
    clip = read_audio(path, options.mel.sample_rate)  # as it was written: 16 bit
    mel = log_mel(clip, options.mel)  # n d
    heard.seconds, heard.mel = round(seconds, 4), mel.half().numpy()
    heard.sha256 = hashlib.sha256((clip * 32768).round().short().numpy().tobytes()).hexdigest()
    heard.measures = {name: round(value, 5) for name, value in levels.items()}
    heard.measures |= measure_sound(clip, mel, options.mel.sample_rate)
    sums = {
        "mel_count": mel.numel(),
        "mel_sum": float(mel.double().sum()),
        "mel_square": float(mel.double().square().sum()),
    }
    heard.measures |= sums
    return heard


# ---- Many at once


def spread(tasks, folder: Path, options: Options, jobs: int):
    """Results of tasks, from `jobs` processes; in order, and with a bounded number of tasks under way.

    `tasks` may yield None: nothing to do until a result is taken. A task whose process dies (a decoder can crash)
    is done once more alone, and when it dies again it becomes a row of its own.
    """
    if jobs == 1:
        yield from (hear(task, folder, options) for task in tasks if task is not None)
        return
    from loky import get_reusable_executor
    from loky.process_executor import TerminatedWorkerError

    def pool(n):
        return get_reusable_executor(max_workers=n, timeout=300, initializer=_start_worker)

    under_way: deque = deque()

    def take():
        task, future = under_way.popleft()
        try:
            yield future.result()
        except TerminatedWorkerError:  # and with it all that were under way
            again = [task, *(other for other, _ in under_way)]
            under_way.clear()
            yield from (_alone(one, folder, options, pool) for one in again)

    for task in tasks:
        if task is not None:
            under_way.append((task, pool(jobs).submit(hear, task, folder, options)))
        if under_way and (task is None or len(under_way) > 4 * jobs):
            yield from take()
    while under_way:
        yield from take()


def _start_worker() -> None:
    """One thread, for there are as many workers as cores; and an end when the process that started it is killed."""
    torch.set_num_threads(1)
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _alone(task: Task, folder: Path, options: Options, pool) -> Result:
    from loky.process_executor import TerminatedWorkerError

    try:
        return pool(1).submit(hear, task, folder, options).result()
    except TerminatedWorkerError:
        problem = f"{task.shown} ends the process that reads it; export it again as WAV or FLAC"
        if task.spans:
            return Result(task.id, clips=[Heard(p, _part_name(task.id, p), problem=problem) for p, _ in task.spans])
        return Result(task.id, UNREAD, clips=[Heard(0, task.id, problem=problem)])


def jobs_for(size: int | None, jobs: int | None) -> int:
    """How many processes: one for little work, because each takes seconds to start."""
    most = os.cpu_count() or 1
    return max(1, jobs or (1 if size is not None and size < 100 << 20 else min(most, 8)))
