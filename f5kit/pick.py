"""The fastest way of training that fits: micro-batch, checkpointing, optimizer, where the average lies.

The biggest batch is not the aim. Recomputing costs arithmetic, 8-bit states and an average off the GPU cost time in
each update, small passes cost what every pass takes whatever its size. Each way that fits is timed by a roofline
(operations over the card's rate, plus traffic over its bandwidth), and of ways that are as fast the plainest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from f5kit.cards import card_of, reached
from f5kit.config import CHECKPOINTING
from f5kit.host import Host
from f5kit.memory import MemoryModel

CONTEXT_GB = 0.6  # what CUDA and its libraries take before the first tensor
USABLE = 0.92  # share of the memory that a plan may fill: the rest is for rounding, workspaces and what comes later
_IN_PLACE = ("adamw", "adamw8bit")  # optimizers whose states stay where they are
_AS_FAST = 1.02  # times the fastest
_LAUNCH = 6e-6  # seconds until a GPU has been told to do one operation
_BUS = 6e9  # bytes a second between a GPU and the machine's memory
_CORE = 2.5e9  # bytes a second that one processor core averages
_STEP_BYTES = 28  # moved a parameter by clipping and AdamW; what 8-bit states save of it, quantising them costs
_SLOW_ON_CPU = 25  # times: bitsandbytes' 8-bit states there


@dataclass(frozen=True)
class Way:
    """One way of training that fits."""

    checkpointing: str
    optimizer: str
    ema_offload: bool
    micro_frames: int
    """Padded frames in a pass, at most."""
    passes: int
    """In an update, about."""
    seconds: float
    """An update, estimated."""
    allocated_gb: float
    """At the largest pass, estimated."""


class Picker:
    """Ways to train on a host, for updates of so many padded frames."""

    def __init__(self, memory: MemoryModel, host: Host, update_frames: int):
        self.memory, self.host, self.update_frames = memory, host, update_frames
        self.room_gb = host.memory_gb * USABLE - CONTEXT_GB
        self.card, self.source = card_of(host)
        self.slower = 1.0
        """What a trial took, over what was estimated."""

    def ways(self, checkpointing: str = "auto", optimizer: str = "auto", micro_frames: int | None = None) -> list[Way]:
        """Those that hold the longest clip, the best first; empty when none does. What is not "auto" is kept."""
        kinds = CHECKPOINTING if checkpointing == "auto" else (checkpointing,)
        optimizers = (optimizer,)
        if optimizer == "auto":
            optimizers = _IN_PLACE if self.host.device == "cuda" else ("adamw",)
        found = self._ways(kinds, optimizers, micro_frames)
        if not found and optimizer == "auto" and self.host.device == "cuda":
            found = self._ways(kinds, ("paged_adamw8bit",), micro_frames)  # what paging costs, nobody can say before
        best = min((way.seconds for way in found), default=0.0)
        return sorted(found, key=lambda way: way.seconds > best * _AS_FAST)  # stable: the plainest comes first

    def _ways(self, kinds: Sequence[str], optimizers: Sequence[str], micro_frames: int | None) -> list[Way]:
        """Those of the given kinds that fit, the plainest first."""
        found = []
        for kind in kinds:
            for name in optimizers:
                for offload in (False, True) if self.host.device == "cuda" else (False,):
                    way = self._way(kind, name, offload, micro_frames)
                    found += [way] if way else []
            ideal = self.slower * self.seconds(kinds[0], optimizers[0], False, passes=1)
            if any(way.seconds <= ideal * _AS_FAST for way in found):
                break  # nothing is faster than that, for recomputing only adds to it: spare the counting
        return found

    def largest(self, checkpointing: str, optimizer: str, ema_offload: bool = False) -> int:
        """The most padded frames in a pass that fit."""
        single = self.memory.largest(self.room_gb, checkpointing, optimizer, ema_offload, accumulates=False)
        if single >= self.update_frames:
            return single
        return self.memory.largest(self.room_gb, checkpointing, optimizer, ema_offload)

    def _way(self, checkpointing: str, optimizer: str, ema_offload: bool, micro: int | None) -> Way | None:
        fit = self.largest(checkpointing, optimizer, ema_offload)
        frames = max(min(micro or fit, self.update_frames), self.memory.longest)
        if fit < frames and not (micro and fit >= self.memory.longest):
            return None
        passes = math.ceil(self.update_frames / frames)
        gb = self.memory.allocated_gb(frames, checkpointing, optimizer, ema_offload, accumulates=passes > 1)
        seconds = self.slower * self.seconds(checkpointing, optimizer, ema_offload, passes)
        return Way(checkpointing, optimizer, ema_offload, frames, passes, seconds, gb)

    def seconds(self, checkpointing: str, optimizer: str, ema_offload: bool, passes: int) -> float:
        """An update, by the card's data sheet."""
        cuda, trained = self.host.device == "cuda", self.memory.trained
        rate, bandwidth = reached(self.card, self.host.device, self.memory.precision)
        constant, frame = self.memory.cost(checkpointing)
        work = constant * passes + frame * self.update_frames
        busy = work.operations / rate + work.traffic / bandwidth
        waiting = work.launches * _LAUNCH if cuda else 0.0
        step = trained * _STEP_BYTES / bandwidth
        if optimizer != "adamw" and not cuda:
            step *= _SLOW_ON_CPU
        if optimizer.startswith("paged"):
            step += trained * 2 * 2.04 / _BUS
        averaging = trained * 12 / bandwidth
        if ema_offload:
            averaging = trained * (4 / _BUS + 12 / (_CORE * self.host.cores))
        return max(busy, waiting) + step + averaging
