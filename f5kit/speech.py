"""What is asked of a voice and what it gives: settings, chunks and the speech itself.

Audio is float32 samples (nw,) at the model's rate, mels are raw log-mels (n, d).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from f5kit.audio import player, write_audio
from f5kit.errors import UserError
from f5kit.provenance import Provenance

METHODS = ("euler", "midpoint", "rk4", "heun3", "dopri5", "bosh3", "adaptive_heun")
LONGEST_TEXT = 20_000  # characters that are spoken into one sound, about 25 minutes


class Cancelled(UserError):
    """A speech that its caller stopped."""


@dataclass(frozen=True)
class Settings:
    """How to say a text. Raises UserError, which names the setting, for a value out of range."""

    speed: float = 1.0
    """2 takes half as long; 0.25 to 4."""
    steps: int = 32
    """Of the solver. 7, 16 and 32 are the usual choices: a preview, good, and best."""
    cfg_strength: float = 2.0
    """Guidance by text and reference; 0 is none and takes half the time."""
    sway: float | None = -1.0
    """Bends the steps towards the beginning, where words are decided; None leaves them even."""
    method: str = "euler"
    """The solver: "euler", or one of torchdiffeq's, such as "midpoint"."""
    seed: int = 0
    """The same seed says the same thing the same way, to the byte on the same machine."""
    duration: float | None = None
    """Seconds the whole text shall take, in place of what is expected of it."""
    pause: float = 0.4
    """Seconds of silence between paragraphs."""
    sentence_pause: float = 0.15
    """Seconds of silence put between two sentences that are said in chunks of their own; within one the model rests."""
    longest_silence: float | None = None
    """Seconds beyond which a silence within the speech is shortened; None leaves all."""
    retry_leaks: bool = True
    """Make a chunk that begins with the reference's last words once more, from another seed."""
    best_of: int = 1
    """Make each chunk so many times and keep the one that a recogniser understands best."""
    batch: int | None = None
    """Chunks in one pass of the model; by default 1 on a CPU and 8 on a GPU. Changes speed and memory alone."""

    def __post_init__(self):
        _require(_within(self.speed, 0.25, 4), f"speed is {self.speed}; choose between 0.25 and 4")
        _require(_whole(self.steps, 1, 1000), f"steps is {self.steps}; the solver needs at least 1 and at most 1000")
        _require(_within(self.cfg_strength, 0, 100), f"cfg_strength is {self.cfg_strength}; choose between 0 and 100")
        even = self.sway is None
        _require(even or _within(self.sway, -1, 1), f"sway is {self.sway}; choose between -1 and 1, or None")
        _require(self.method in METHODS, f"method is {self.method!r}; the solvers are {', '.join(METHODS)}")
        _require(_whole(self.seed, -(2**62), 2**62), f"seed is {self.seed}; give a whole number below 2**62")
        given = self.duration is None or _within(self.duration, 0.1, 3600)
        _require(given, f"duration is {self.duration}; give the seconds the text shall take, 0.1 to 3600")
        _require(_within(self.pause, 0, 60), f"pause is {self.pause}; give 0 to 60 seconds")
        rest = self.sentence_pause
        _require(_within(rest, 0, 60), f"sentence_pause is {rest}; give 0 to 60 seconds")
        short = self.longest_silence is None or _within(self.longest_silence, 0.05, 60)
        _require(short, f"longest_silence is {self.longest_silence}; give 0.05 to 60 seconds, or None")
        _require(_whole(self.best_of, 1, 20), f"best_of is {self.best_of}; choose between 1 and 20")
        _require(self.batch is None or _whole(self.batch, 1, 256), f"batch is {self.batch}; choose between 1 and 256")

    @classmethod
    def of(cls, **settings) -> Settings:
        """Settings from keywords. Raises UserError for one that there is not."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in settings if name not in known]
        _require(not unknown, f"there is no setting {', '.join(unknown)}; the settings are {', '.join(known)}")
        return cls(**settings)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _within(value, low: float, high: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high


def _whole(value, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class Chunk:
    """A piece of the text that was spoken in one go."""

    text: str
    """As it stands in the text, blanks included: the chunks' texts join to the whole."""
    seed: int
    """With it the same voice says this chunk alone the same way."""
    start: float = 0.0
    """Seconds from the beginning of the speech."""
    end: float = 0.0
    frames: int = 0
    """Frames of its mel; 0 where there was nothing to say."""
    voice: str = ""
    """Who said it, in a script of several voices."""
    notes: tuple[str, ...] = ()
    """What was done again, and why."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Speech:
    """What a voice said. Shows itself as a player in a notebook."""

    audio: Tensor
    """(nw,), float32."""
    sample_rate: int
    mel: Tensor
    """(n, d), all chunks in a row, as the model made them."""
    text: str
    seed: int
    chunks: tuple[Chunk, ...]
    """The pieces of text that were spoken one by one, and when."""
    model: str = ""
    """What spoke, by name (`provenance.model_name`)."""

    @property
    def provenance(self) -> Provenance:
        """What its sound files say of themselves."""
        return Provenance(True, self.model)

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate

    @property
    def timings(self) -> list[tuple[float, float, str]]:
        """(start, end, text) of every chunk, in seconds."""
        return [(chunk.start, chunk.end, chunk.text) for chunk in self.chunks]

    def save(self, path: str | Path) -> Path:
        """Write a sound file; the suffix says which kind (wav, flac, mp3, ogg)."""
        return write_audio(path, self.audio, self.sample_rate, self.provenance)

    def _repr_html_(self) -> str:
        return player(self.audio, self.sample_rate)

    def __repr__(self) -> str:
        return f"Speech({self.seconds:.2f} s, seed {self.seed}, {self.text[:60]!r})"


def join_speech(pieces: list[Speech], text: str, seed: int) -> Speech:
    """The whole of what `Voice.stream` gave piece by piece."""
    return Speech(
        torch.cat([piece.audio for piece in pieces]), pieces[0].sample_rate, torch.cat([piece.mel for piece in pieces]),
        text, seed, tuple(chunk for piece in pieces for chunk in piece.chunks), pieces[0].model,
    )  # fmt: skip


class Progress:
    """Counts solver steps for a bar or a function `(done, total) -> None`, and stops when `cancel` is set."""

    def __init__(self, show: bool | Callable[[int, int], None], total: int, cancel: threading.Event | None):
        self.done, self.total, self.cancel = 0, total, cancel
        self._tell, self._bar = (show if callable(show) else None), None
        if show is True:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="speaking", unit="step", leave=False)

    def check(self) -> None:
        """Raise Cancelled when the caller has had enough."""
        if self.cancel is not None and self.cancel.is_set():
            self.close()
            raise Cancelled(f"cancelled after {self.done} of {self.total} steps")

    def step(self, count: int = 1) -> None:
        """So many steps more are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        if self._tell is not None:
            self._tell(min(self.done, self.total), self.total)
        self.check()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
