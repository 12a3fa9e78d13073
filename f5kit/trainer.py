"""The training loop. It knows no audio and no user interface: it emits events, and callbacks do the rest.

Two counters. `step` counts batches consumed and keys the data and all randomness; `update` counts updates applied and
keys the schedule and the EMA. A batch whose gradient is not finite advances `step` alone and changes nothing else.

Events, in the order they come, also kept as lines of the run's events.jsonl:

    {"event": "start", "update": 0, "step": 0, "resumed": false, ...}
    {"event": "evaluate", "update": 0, "loss_raw": 4.01, "loss_ema": 4.01}
    {"event": "update", "update": 1, "step": 0, "loss": 4.2, "lr": 1e-5, "grad_norm": 0.9, "frames": 2400, ...}
    {"event": "skip", "step": 7, "reason": "...", "clips": ["a", "b"]}
    {"event": "save", "update": 100, "path": "..."}
    {"event": "end", "update": 400, "minutes": 12.5}
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from f5kit.cfm import CFM, Draws, draw, held_out_loss
from f5kit.checkpoint import Checkpoint, RunFolder, load_model, relative_path
from f5kit.config import TrainConfig
from f5kit.data import Batch, Dataset, batches, micro_batches, to_device
from f5kit.errors import UserError
from f5kit.optim import EMA, build_optimizer, learning_rate, optimizer_tensors, restore_optimizer
from f5kit.weights import read_tensors, write_json

# Settings that a resumed run may change: they alter memory, speed and bookkeeping, or the schedule, which is rebuilt.
_MAY_CHANGE = {
    "micro_frames", "checkpointing", "compile", "save_every", "evaluate_every", "keep_checkpoints",
    "updates", "learning_rate", "warmup_updates", "ema_horizon",
}  # fmt: skip


class Trainer:
    """Train the plan's model on a dataset, in a run folder. `fit()` starts the run or goes on with it.

    callbacks are called as callback(event, trainer) for every event.
    """

    def __init__(self, plan, dataset: Dataset, run_dir: str | Path, callbacks: Sequence[Callable] = ()):
        self.plan, self.dataset, self.run = plan, dataset, RunFolder(run_dir)
        self.config: TrainConfig = plan.train
        self.callbacks = list(callbacks)
        self.step = self.update = 0
        self._judged = {"update": -1}

    def fit(self) -> RunFolder:
        """Train until the plan's updates are done, resuming from the newest whole checkpoint. Returns the run.

        Raises UserError when the folder holds a run of another model, dataset or data order.
        """
        checkpoint = self._open_run()
        self._setup_model(checkpoint)
        self._setup_optimizer(checkpoint)
        self._setup_data()
        started = time.monotonic()
        self._emit("start", step=self.step, resumed=checkpoint is not None, origin=self.model.origin)
        if self.update == 0:
            self._evaluate()
        for step, members in self._batches():
            if self.update >= self.config.updates:
                break
            self._train_step(step, members)
        if checkpoint is None or self.update > checkpoint.update:
            self._save()
        self._emit("end", minutes=(time.monotonic() - started) / 60)
        return self.run

    # Setting up

    def _open_run(self) -> Checkpoint | None:
        """Make the run folder, or check that what is in it is this run. Returns the checkpoint to go on from."""
        info = {"model": self.plan.model, "dataset": relative_path(self.dataset.folder, self.run.path),
                "manifest_hash": self.dataset.manifest_hash, "plan": self.plan.to_dict()}  # fmt: skip
        if (self.run.path / "run.json").is_file():
            self._check_same(self.run.info, info)
        self.run.path.mkdir(parents=True, exist_ok=True)
        write_json(self.run.path / "run.json", info)
        return self.run.latest()

    def _check_same(self, old: dict, new: dict) -> None:
        old_train, new_train = old["plan"]["train"], new["plan"]["train"]
        pairs = {k: (old_train.get(k), v) for k, v in new_train.items() if k not in _MAY_CHANGE}
        pairs |= {k: (old[k], new[k]) for k in ("model", "manifest_hash")}
        changed = [f"{k} {was!r} -> {now!r}" for k, (was, now) in pairs.items() if was != now]
        if changed:
            raise UserError(
                f"{self.run.path} holds a run that was started otherwise ({'; '.join(changed)}): "
                "choose another run folder, or plan the run as it was"
            )

    def _setup_model(self, checkpoint: Checkpoint | None) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        # A notebook may train twice with different precision; accelerate keeps the first for ever.
        AcceleratorState._reset_state(reset_partial_state=True)
        precision = {"fp32": "no"}.get(self.config.precision, self.config.precision)
        self.accelerator = Accelerator(mixed_precision=precision, cpu=self.plan.device == "cpu")
        source = checkpoint.path if checkpoint else self.plan.model
        self.model: CFM = load_model(source, weights="raw", device=str(self.accelerator.device))
        self.model.train()
        self.ema = EMA(self.model, self.config.ema_horizon)
        if checkpoint:
            averages = read_tensors(checkpoint.path / "ema.safetensors", str(self.accelerator.device))
            self.ema.weights = {name: averages[name] for name in self.ema.weights}
        self.model.transformer.recompute = self.config.checkpointing
        if self.config.compile:
            self.model.transformer.compile()

    def _setup_optimizer(self, checkpoint: Checkpoint | None) -> None:
        self._names = [name for name, _ in self.model.named_parameters()]
        self.optimizer = build_optimizer(self.model.parameters(), self.config)
        self._forward = self.accelerator.prepare(self.model)  # autocast, and DDP with several processes
        if checkpoint:
            restore_optimizer(self.optimizer, self._names, read_tensors(checkpoint.path / "optimizer.safetensors"))
            self.step, self.update = checkpoint.state["step"], checkpoint.state["update"]
            if self.accelerator.scaler:
                self.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])

    def _setup_data(self) -> None:
        self.dataset = self.dataset.with_mel(self.model.config.mel)
        self._clips = self.dataset.train
        self._frames = [clip.frames for clip in self._clips]
        tokenizer = self.model.tokenizer
        for clip in self.dataset.clips:  # an unknown letter is told before the run, not in the middle of it
            if len(tokenizer.encode(clip.text)) > clip.frames:
                raise UserError(f"{clip.id} has more letters than mel frames: its transcript belongs to another clip")
        self._heldout = self.dataset.judging_batches(tokenizer)

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """(step, places in the training clips) for ever, from the step that is due."""
        return batches(self._frames, self.config.update_frames, self.config.seed, self.step)

    # One step

    def _train_step(self, step: int, members: list[int]) -> None:
        """One batch: forward and backward for each part of it, then one update, if the gradient is finite."""
        started = time.monotonic()
        parts = list(self._parts(step, members))
        count = sum(draws.span.sum().item() for _, draws in parts) * parts[0][0].mel.shape[-1]
        count = int(self.accelerator.reduce(torch.tensor(count, device=self.accelerator.device), "sum"))
        loss = torch.zeros((), device=self.accelerator.device)
        for i, (batch, draws) in enumerate(parts):
            last = i == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self._forward):
                part = self._forward(to_device(batch, loss.device), to_device(draws, loss.device)) / count
                # DDP averages over processes; the sum was divided by the count of all of them.
                self.accelerator.backward(part * self.accelerator.num_processes)
            loss += part.detach()
        self.step = step + 1
        loss = self.accelerator.reduce(loss, "sum").item()
        rate, norm = self._apply()
        if rate is None:
            self._emit("skip", step=step, reason=f"loss {loss}, gradient norm {norm}",
                       clips=[self._clips[i].id for i in members])  # fmt: skip
            return
        frames = sum(self._frames[i] for i in members)
        self._emit("update", step=step, loss=loss, lr=rate, grad_norm=norm, frames=frames,
                   seconds=time.monotonic() - started)  # fmt: skip
        if self.update % self.config.evaluate_every == 0:
            self._evaluate()
        if self.update % self.config.save_every == 0 and self.update < self.config.updates:
            self._save()

    def _parts(self, step: int, members: list[int]) -> Iterator[tuple[Batch, Draws]]:
        """This process's share of a batch, cut into forward passes."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = list(range(len(members)))[rank::world]
        if not mine:
            raise UserError(f"a batch of {len(members)} clips cannot feed {world} processes: raise update_frames")
        shares = [members[p] for p in mine]
        for positions in micro_batches(shares, self._frames, self.config.micro_frames):
            clips = [self._clips[shares[p]] for p in positions]
            batch = self.dataset.batch(clips, self.model.tokenizer, step, [mine[p] for p in positions])
            yield batch, draw(batch, self.config.seed)

    def _apply(self) -> tuple[float | None, float]:
        """One optimizer update from the gradients at hand, unless they are not finite. Returns (rate, norm)."""
        scaler = self.accelerator.scaler
        if scaler:
            scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip).item()
        rate = learning_rate(self.update, self.config)
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            scaler.step(self.optimizer) if scaler else self.optimizer.step()
            self.update += 1
            self.ema.follow(self.model, self.update)
        if scaler:
            scaler.update()  # an overflow lowers the scale, and nothing else
        self.optimizer.zero_grad(set_to_none=True)
        return (rate if finite else None), norm

    # Judging and keeping

    @contextmanager
    def ema_weights(self):
        """The model with its averaged weights, for the time of a with block."""
        self.ema.swap(self.model)
        try:
            yield self.model
        finally:
            self.ema.swap(self.model)

    def _evaluate(self) -> None:
        with self.accelerator.autocast():
            raw = held_out_loss(self.model, self._heldout)
            with self.ema_weights():
                averaged = held_out_loss(self.model, self._heldout)
        self._judged = {"update": self.update, "loss_raw": raw, "loss_ema": averaged}
        self._emit("evaluate", loss_raw=raw, loss_ema=averaged)

    def _save(self) -> None:
        """Write a checkpoint, with its held-out losses, and let `best.json` point at the lowest one."""
        if self._judged["update"] != self.update:
            self._evaluate()
        if not self.accelerator.is_main_process:
            return
        scaler = self.accelerator.scaler
        state = {"step": self.step, "scaler": scaler.state_dict() if scaler else None, **self._judged}
        buffers = {name: b for name, b in self.model.named_buffers() if name in self.model.state_dict()}
        tensors = {"model": self.model.state_dict(), "ema": {**self.ema.weights, **buffers},
                   "optimizer": optimizer_tensors(self.optimizer, self._names)}  # fmt: skip
        checkpoint = self.run.save(self.update, tensors, self.model, state)
        weights, loss = min((("raw", state["loss_raw"]), ("ema", state["loss_ema"])), key=lambda pair: pair[1])
        best = self.run.best
        if best is None or (best["by"] == "trainer" and loss < best["loss"]):  # a user's choice stays
            which = "held-out" if self.dataset.heldout else "training"
            self.run.choose(checkpoint.name, weights, f"lowest loss on the {which} clips", loss, by="trainer")
        self.run.rotate(self.config.keep_checkpoints)
        self._emit("save", path=str(checkpoint.path))

    def _emit(self, event: str, **values) -> None:
        """Record an event and hand it to the callbacks, on the main process."""
        values = {"event": event, "update": self.update, **values}
        if self.accelerator.is_main_process:
            self.run.record({**values, "time": time.time()})
            for callback in self.callbacks:
                callback(values, self)
