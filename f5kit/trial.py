"""A real update with the largest batch that a run will meet, timed and weighed: what a plan predicted, measured.

The weights are fresh and the mels are noise: neither changes what an update costs. On a GPU memory is what its
allocator counts; elsewhere every tensor is counted as it is made and when it goes, as in memory.py.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch

from f5kit.cfm import CFM, Draws, draw
from f5kit.checkpoint import fresh_model
from f5kit.config import ModelConfig, TrainConfig
from f5kit.data import Batch, collate, to_device
from f5kit.lora import add_adapters
from f5kit.memory import GIB, counted
from f5kit.optim import EMA, build_optimizer, trained_parameters
from f5kit.recovery import shortage_of
from f5kit.text import Tokenizer
from f5kit.tuning import apply_environment, autocast, compile_blocks


@dataclass(frozen=True)
class Trial:
    """What one update took."""

    frames: int
    """Padded, in each of its passes."""
    allocated_gb: float
    """The most that was allocated at once; where it did not fit, what was reached until then."""
    reserved_gb: float
    """The most that the allocator held, with what it lost by rounding; elsewhere than on a GPU the same."""
    seconds_per_pass: float
    """Forward and backward."""
    seconds_per_update: float
    """Clipping, optimizer and average, once all passes are done."""
    seconds_to_begin: float
    """What the first update took longer than the others: warming up, or compiling."""
    finite: bool
    """The loss and its gradient, in the last of the updates."""
    shortage: str | None
    """What the allocator said where it did not fit."""


def try_update(
    config: ModelConfig, train: TrainConfig, device: str, longest: int, tokens: int, *, passes: int = 2,
    repeats: int = 2,
) -> Trial:
    """One update of `passes` forward passes, each of as many clips of the longest length as `train.micro_frames` holds.

    It is done `repeats` times after a first one that warms up, and the quickest counts. A shortage of memory is
    reported in the result, never raised.
    """
    items, reached = max(train.micro_frames // longest, 1), _Gauge(device)
    update, taken, said = None, [], None
    try:
        batches = [_noise(config, items, longest, tokens, i) for i in range(passes)]
        with reached:
            update = Update(config, train, device)
            taken = [update.do(batches) for _ in range(1 + repeats)]
    except (RuntimeError, MemoryError) as error:
        said = shortage_of(error)
    finite = update is not None and update.finite
    update = None  # and only here, for the error held on to it as well
    _sweep(device)
    if said:
        return Trial(items * longest, *reached.gb(), float("inf"), float("inf"), float("inf"), False, said)
    a_pass, rest = (min(seconds) for seconds in zip(*taken[1:], strict=True))
    first = taken[0][0] * passes + taken[0][1] - a_pass * passes - rest
    return Trial(items * longest, *reached.gb(), a_pass, rest, max(first, 0.0), finite, None)


class Update:
    """A model with what trains it, as trainer.py sets it up."""

    def __init__(self, config: ModelConfig, train: TrainConfig, device: str):
        apply_environment(device)
        vocab = Tokenizer([" ", *(f"#{i}" for i in range(1, config.vocab_size))])
        self.train, self.device, self.finite = train, torch.device(device), True
        self.model: CFM = fresh_model(config, vocab).to(device).train()
        if train.lora_rank:
            add_adapters(self.model, train.lora_rank)
        self.model.transformer.recompute = train.checkpointing
        if train.compile:
            compile_blocks(self.model)
        self.ema = EMA(self.model, train.ema_horizon, "cpu" if train.ema_offload else None)
        self.weights = [parameter for _, parameter in trained_parameters(self.model)]
        self.optimizer = build_optimizer(self.weights, train)
        self.scaler = torch.amp.GradScaler(device) if train.precision == "fp16" and device == "cuda" else None

    def do(self, batches: list[tuple[Batch, Draws]]) -> tuple[float, float]:
        """Seconds of one pass, and of what follows the last."""
        started = self._now()
        for batch, draws in batches:
            batch, draws = to_device(batch, self.device), to_device(draws, self.device)
            with autocast(self.device, self.train.precision):
                loss = self.model(batch, draws) / (draws.span.sum() * batch.mel.shape[-1])
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        passed = self._now()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.train.grad_clip)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.ema.follow(self.model, 1)
        self.optimizer.zero_grad(set_to_none=True)
        self.finite = bool(norm.isfinite() & loss.isfinite())  # of the last: fp16 may begin with a scale too high
        return (passed - started) / len(batches), self._now() - passed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class _Gauge:
    """The most memory that was in use within a with block."""

    def __init__(self, device: str):
        self.cuda, self.counter = device == "cuda", counted()

    def __enter__(self):
        if self.cuda:
            _sweep("cuda")
            torch.cuda.reset_peak_memory_stats()
        else:
            self.counter.__enter__()

    def __exit__(self, *error):
        if not self.cuda:
            self.counter.__exit__(*error)

    def gb(self) -> tuple[float, float]:
        """Allocated and reserved."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        return self.counter.peak / GIB, self.counter.peak / GIB


def _noise(config: ModelConfig, items: int, frames: int, tokens: int, step: int) -> tuple[Batch, Draws]:
    """A batch of clips with random mels and texts; the last is a little shorter, so that masks are needed."""
    g = torch.Generator().manual_seed(step)
    lengths = [frames] * (items - 1) + [max(frames - 1, 1) if items > 1 else frames]
    mels = [torch.randn(n, config.mel.n_mels, generator=g) - 4 for n in lengths]
    texts = [torch.randint(config.vocab_size, (min(tokens, n),), generator=g).tolist() for n in lengths]
    batch = collate(mels, texts, [str(i) for i in range(items)], step, range(items))
    return batch, draw(batch, "trial")


def _sweep(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
