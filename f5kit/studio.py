"""Where requests are spoken: a bounded queue, and a thread or two for each device that make all mels and sounds.

    submit ──queue──▶ speaker threads ──pieces of speech──▶ tell
                           │  ▲
                        Wanted mels      the device's threads: they make those of like length in one pass
                           ▼  │
                          device

A speaker thread follows `Voice.stream` and waits wherever that makes a mel or a sound. So callers share passes of the
model, and each hears what the same seed says alone. What is small stays in its own thread: reading a reference, asking
the model how long letters last, and the rare second try in fp32.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from f5kit.cfm import CFM
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.passes import Wanted, make_mels
from f5kit.recovery import shortage_of
from f5kit.speech import Cancelled, Settings, Speech
from f5kit.tuning import autocast

LIKE = 0.7  # pieces share a pass when the shorter has at least this share of the longer one's frames


class Busy(Exception):
    """The queue is full, or the studio closes: come back in `seconds`."""

    def __init__(self, message: str, seconds: int):
        super().__init__(message)
        self.seconds = seconds


@dataclass(eq=False)
class Job:
    """A text to speak."""

    voice: Callable[[], Voice]
    """Gives the voice, in the speaker's thread: an uploaded reference is read there."""
    text: str
    settings: dict
    tell: Callable[[Speech | Exception | None], None]
    """Gets each piece of speech, and at last None, or what went wrong. Called from another thread."""
    first: float | None = None
    """Seconds of the first piece, for who listens while it is made; None speaks in whole chunks."""
    cancel: threading.Event = field(default_factory=threading.Event)


class Studio:
    """Speaks jobs on one device while `waiting` others wait: `batch` of them share a pass of the model, and as many
    passes as there are `lanes` run side by side.

    `observe` is told how many pieces each pass of the model made.
    """

    def __init__(
        self, batch: int, waiting: int, observe: Callable[[int], None] = lambda pieces: None, lanes: int = 1
    ):
        self._jobs = queue.Queue(waiting)
        self._device = _Device(batch, lanes, observe)
        self._closed, self._active, self._lock = False, set(), threading.Lock()
        self._usual = 1.0  # seconds a job takes, a running mean
        self._speakers = [threading.Thread(target=self._speak, daemon=True) for _ in range(batch * lanes)]
        for thread in self._speakers:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._jobs.qsize()

    @property
    def speaking(self) -> int:
        """Jobs that are being spoken."""
        return len(self._active)

    def submit(self, job: Job) -> None:
        """Take a job in. Raises Busy when the queue is full or the studio closes."""
        try:
            if self._closed:
                raise Busy("the server is stopping", 5)
            self._jobs.put_nowait(job)
        except queue.Full:
            seconds = min(60, 1 + int(self._usual / len(self._speakers)))  # until the next one has room
            raise Busy(f"{self.waiting} requests are waiting already", seconds) from None

    def prepare(self, voice: Voice) -> None:
        """Speak once to nobody, so that the first caller does not wait for what is made at the first use."""
        self.shared(voice).warm_up(seconds=1.0, steps=1)

    def shared(self, voice: Voice, precision: str | None = None) -> Voice:
        """The same voice, whose mels and sounds the device's threads make."""
        precision = precision or voice.precision
        vocoder = _SharedVocoder(voice.vocoder, self._device)
        shared = Voice(voice.model, voice.reference, vocoder, precision, voice.pace)
        shared.make_mels = lambda model, wanted, settings, step: self._device.make_mels(
            _Pass(model, precision, wanted, settings, step)
        )
        return shared

    def stop(self) -> None:
        """End: jobs that still speak or wait are cancelled. Can be called again."""
        self._closed = True
        with self._lock:
            for job in self._active:
                job.cancel.set()
        while True:
            try:
                self._jobs.get_nowait().tell(Cancelled("the server is stopping"))
            except queue.Empty:
                break
        for _ in self._speakers:
            self._jobs.put(None)
        for thread in self._speakers:
            thread.join()
        self._device.stop()

    def _speak(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._active.add(job)
            started = time.monotonic()
            end = self._say(job)
            with self._lock:
                self._active.discard(job)
            self._usual += 0.2 * (time.monotonic() - started - self._usual)
            job.tell(end)
            del job, end  # a thread that waits holds no speech

    def _say(self, job: Job) -> Exception | None:
        """Speak a job; what went wrong is returned."""
        try:
            if job.cancel.is_set():  # its client left while it waited
                raise Cancelled("cancelled before it began")
            for piece in self.shared(job.voice()).stream(job.text, first=job.first, cancel=job.cancel, **job.settings):
                job.tell(piece)
        except Exception as error:
            return error.with_traceback(None) if isinstance(error, UserError) else error
        return None


@dataclass(eq=False)
class _Pass:
    """Pieces that one speaker wants from a model."""

    model: CFM
    precision: str
    wanted: list[Wanted]
    settings: Settings
    step: Callable[[], None]
    done: Future = field(default_factory=Future)

    @property
    def kind(self) -> tuple:
        """What passes must have in common to be made together."""
        chosen = self.settings
        return id(self.model), self.precision, chosen.steps, chosen.cfg_strength, chosen.sway, chosen.method

    @property
    def frames(self) -> int:
        return max(piece.frames for piece in self.wanted)


class _Device:
    """The threads that make mels and sounds, and what they were asked for."""

    def __init__(self, batch: int, lanes: int, observe: Callable[[int], None]):
        self.batch, self.observe = batch, observe
        self._passes: deque[_Pass] = deque()
        self._calls: deque[tuple[Callable, Future]] = deque()
        self._asked, self._closed = threading.Condition(), False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(lanes)]
        for thread in self._threads:
            thread.start()

    def make_mels(self, asked: _Pass) -> list[Tensor]:
        """The mels of a pass; waits for them. Raises what its `step` raises."""
        self._ask(self._passes, asked)
        return asked.done.result()

    def call(self, function: Callable):
        """What the function returns, called in one of the device's threads."""
        future = Future()
        self._ask(self._calls, (function, future))
        return future.result()

    def _ask(self, line: deque, item) -> None:
        with self._asked:
            if self._closed:
                raise Cancelled("the server is stopping")
            line.append(item)
            self._asked.notify()

    def stop(self) -> None:
        with self._asked:
            self._closed = True
            self._asked.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._calls or self._passes or self._closed)
                if not (self._calls or self._passes):
                    return
                call = self._calls.popleft() if self._calls else None  # first: it ends work that was begun
                group = [] if call else self._gather()
            if call:
                _settle(call[1], call[0])
            else:
                self._make(group)
            del call, group

    def _gather(self) -> list[_Pass]:
        """The oldest pass, and others of its kind and of like length while there is room."""
        group = [self._passes.popleft()]
        room = self.batch - len(group[0].wanted)
        shortest = longest = group[0].frames
        for other in list(self._passes):
            low, high = min(shortest, other.frames), max(longest, other.frames)
            if other.kind == group[0].kind and len(other.wanted) <= room and low >= LIKE * high:
                self._passes.remove(other)
                group.append(other)
                room, shortest, longest = room - len(other.wanted), low, high
        return group

    def _make(self, group: list[_Pass]) -> None:
        """Make the mels of a group; where memory is short, one after the other."""
        try:
            mels = iter(self._sample(group))
        except Exception as error:
            if len(group) > 1 and is_shortage(error):
                for one in group:
                    self._make([one])
                return
            for one in group:
                if not one.done.done():
                    one.done.set_exception(error)
            return
        for one in group:
            own = [next(mels) for _ in one.wanted]
            if not one.done.done():
                one.done.set_result(own)

    def _sample(self, group: list[_Pass]) -> list[Tensor]:
        """All mels in one pass. Whoever is cancelled on the way is told at once; without listeners the pass ends."""

        def step() -> None:
            for one in group:
                if not one.done.done():
                    try:
                        one.step()
                    except Cancelled as error:
                        one.done.set_exception(error)
            if all(one.done.done() for one in group):
                raise Cancelled("nobody listens any more")

        wanted = [piece for one in group for piece in one.wanted]
        self.observe(len(wanted))
        first = group[0]
        with autocast(first.model.device, first.precision):
            return make_mels(first.model, wanted, first.settings, step)


class _SharedVocoder:
    """A vocoder that the device's threads use."""

    def __init__(self, vocoder, device: _Device):
        self.name, self._vocoder, self._device = vocoder.name, vocoder, device

    def decode(self, mel: Tensor) -> Tensor:
        return self._device.call(lambda: self._vocoder.decode(mel))


def _settle(future: Future, function: Callable) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def is_shortage(error: Exception) -> bool:
    """Whether an error says that memory ran short."""
    try:
        return bool(shortage_of(error))
    except Exception:
        return False
