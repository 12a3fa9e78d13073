"""The training loop. It knows no audio and no user interface: it emits events, and callbacks do the rest.

Two counters. `step` counts batches consumed and keys the data and all randomness; `update` counts updates applied and
keys the schedule and the EMA. A batch whose gradient is not finite advances `step` alone and changes nothing else.

Events, in the order they come, also kept as lines of the run's events.jsonl:

    {"event": "start", "update": 0, "step": 0, "resumed": false, ...}
    {"event": "evaluate", "update": 0, "loss_raw": 4.01, "loss_ema": 4.01, "ema_start_share": 1.0}
    {"event": "update", "update": 1, "step": 0, "loss": 4.2, "lr": 1e-5, "grad_norm": 0.9, "frames": 2400, ...}
    {"event": "machine", "update": 1, "gpu_memory_gb": 11.2, "disk_free_gb": 40.1, ...}
    {"event": "skip", "step": 7, "reason": "...", "clips": ["a", "b"]}           not finite
    {"event": "overflow", "step": 8, "scale": 32768.0}                           fp16: done again
    {"event": "out_of_memory", "step": 9, "micro_frames": 1200, "reason": "..."} done again, in smaller parts
    {"event": "back", "update": 100, "to": "update_000100", "rate_factor": 0.5}  to the last checkpoint's weights
    {"event": "save", "update": 100, "path": "..."}      or save_failed, with the reason
    {"event": "sample", "update": 100, "weights": "ema", "audio": "samples/...", ...}   from evaluate.SampleCallback
    {"event": "end", "update": 400, "minutes": 12.5, "reason": "the planned updates are done"}
"""

from __future__ import annotations

import atexit
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from f5kit.cfm import CFM, Draws, draw, held_out_loss
from f5kit.checkpoint import load_model
from f5kit.config import TrainConfig
from f5kit.data import Batch, Dataset, ahead, batches, micro_batches, to_device
from f5kit.errors import UserError
from f5kit.gauges import read_gauges
from f5kit.interrupts import Interrupts
from f5kit.lock import RunLock
from f5kit.lora import about_adapters, adapter_tensors, add_adapters, plain_state, put_adapters
from f5kit.optim import (
    EMA,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    trained_parameters,
)
from f5kit.processes import highest, joined, leave, shares, sum_gradients, total
from f5kit.recovery import SCALE_FLOOR, Recovery, shortage_of, would_fit
from f5kit.runs import Checkpoint, RunFolder, relative_path
from f5kit.tuning import apply_environment, compile_blocks
from f5kit.weights import read_tensors, write_json

_ENDS = ("", "the planned updates are done", "the held-out loss stopped falling", "time", "SIGTERM", "SIGINT")
_MACHINE_EVERY = 30.0  # seconds between two looks at the machine


class Trainer:
    """Train the plan's model on a dataset, in a run folder. `fit()` starts the run or goes on with it.

    callbacks are called as callback(event, trainer) for every event. `change` lets a resumed run take over another
    number of updates, learning rate, optimizer or precision than it was started with: the schedule is rebuilt for the
    update it has reached. `max_minutes` is the time the host allows: a checkpoint is written before it is over.
    Under `accelerate launch` the processes share each update's clips; the result is that of one process.
    """

    def __init__(
        self,
        plan,
        dataset: Dataset,
        run_dir: str | Path,
        callbacks: Sequence[Callable] = (),
        *,
        change: bool = False,
        max_minutes: float | None = None,
    ):
        self.plan, self.dataset, self.run = plan, dataset, RunFolder(run_dir)
        self.config: TrainConfig = plan.train
        self.callbacks, self.change, self.max_minutes = list(callbacks), change, max_minutes
        self.step = self.update = 0
        self._slowest_step = self._slowest_save = self._machine_seen = 0.0
        self._unsaved: str | None = None  # why the last save failed

    def fit(self) -> RunFolder:
        """Train until the plan's updates are done, resuming from the newest whole checkpoint. Returns the run.

        A signal or the time limit ends it earlier, after a checkpoint; then KeyboardInterrupt or SystemExit follows a
        signal. Raises UserError when the folder holds a run of another model, dataset or data order, when another
        process trains in it, and when at the end the disk did not take the last checkpoint.
        """
        self._join_processes()
        lock = RunLock(self.run.path) if self.process.is_main_process else nullcontext()
        with lock as self._lock, Interrupts(self.max_minutes) as self._interrupts:
            self._open_run()
            self._restore(self.run.latest())
            self._setup_data()
            self._train()
        self._interrupts.pass_on()
        return self.run

    def _train(self) -> None:
        started = time.monotonic()
        self.emit("start", step=self.step, resumed=self._saved_at >= 0, origin=self.model.origin)
        if self._saved_at < 0:
            self._evaluate()
        while not (reason := self._reason_to_end()):
            with closing(ahead(self._batches(), self._prepare, self.config.workers)) as steps:
                for (step, members), parts in steps:
                    self._train_step(step, members, parts)
                    if self.step != step + 1 or self._reason_to_end():  # it went back, or it is over
                        break
        if self.update > self._saved_at:
            self._save()
        self.emit("end", minutes=(time.monotonic() - started) / 60, reason=reason)
        if self._unsaved:
            raise UserError(
                f"the last checkpoint of {self.run.path} could not be kept ({self._unsaved}): make room and run again, "
                "and it goes on from the one before"
            )

    def _reason_to_end(self) -> str:
        """Why the run is over, the same for all processes; empty while it is not."""
        reason = self._interrupts.reason(margin=3 * self._slowest_save + self._slowest_step)
        since = self.update - self._lowest["update"]
        if reason is None and self.config.patience and since >= self.config.patience * self.config.evaluate_every:
            reason = "the held-out loss stopped falling"
        if reason is None and self.update >= self.config.updates:
            reason = "the planned updates are done"
        return _ENDS[int(highest(_ENDS.index(reason or ""), self.accelerator.device))]

    # Setting up

    def _join_processes(self) -> None:
        """Find out which process this is. A notebook may train twice: accelerate keeps the first state for ever."""
        from accelerate import PartialState
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=not joined())
        self.process = PartialState(cpu=self.plan.device == "cpu")
        atexit.unregister(leave)
        atexit.register(leave)  # once, and not at the end of `fit`: the next run meets the same processes

    def _open_run(self) -> None:
        """Make the run folder, or check that what is in it is this run; and agree on how it goes on."""
        if self.process.is_main_process:
            info = {"model": self.plan.model, "dataset": relative_path(self.dataset.folder, self.run.path),
                    "manifest_hash": self.dataset.manifest_hash, "plan": self.plan.to_dict()}  # fmt: skip
            self.run.begin(info, self.plan.derived, self.change)
            self.run.tidy()
            self.run.latest(set_aside=True)
        self.process.wait_for_everyone()
        info = self.run.info
        self.config = TrainConfig(**info["plan"]["train"])
        self.plan = replace(self.plan, train=self.config)
        self._micro = min(self.config.micro_frames, info.get("fitted", {}).get(self.plan.device_name, 2**62))

    def _restore(self, checkpoint: Checkpoint | None, recovery: Recovery | None = None) -> None:
        """Model, averages, optimizer and counters of a checkpoint; without one, those of the beginning."""
        state = checkpoint.state if checkpoint else {}
        self.step, self.update = state.get("step", 0), state.get("update", 0)
        self._saved_at = checkpoint.update if checkpoint else -1
        self._judged = {k: state.get(k, -1) for k in ("update", "loss_raw", "loss_ema")}
        self._lowest = state.get("lowest", {"update": 0, "loss": float("inf")})
        self.recovery = recovery or Recovery(**state.get("recovery", {}))
        self._setup_devices()
        self._setup_model(checkpoint)
        self._setup_optimizer(checkpoint)

    def _setup_devices(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        precision = self.recovery.precision or self.config.precision
        if precision == "fp16" and self.plan.device != "cuda":
            raise UserError(f"the run computes in fp16, which {self.plan.device} cannot: go on with a GPU, or plan "
                            "with precision fp32 and say Trainer(..., change=True)")  # fmt: skip
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            mixed_precision={"fp32": "no"}.get(precision, precision), cpu=self.plan.device == "cpu"
        )
        apply_environment(self.accelerator.device.type)  # TF32 for what is left in fp32

    def _setup_model(self, checkpoint: Checkpoint | None) -> None:
        adapters = self.config.lora_rank
        source = checkpoint.path if checkpoint and not adapters else self.plan.model
        self.model: CFM = load_model(source, weights="raw", device=str(self.accelerator.device))
        if adapters:
            add_adapters(self.model, adapters, seed=self.config.seed)
            if checkpoint:
                put_adapters(self.model, read_tensors(checkpoint.path / "adapter.safetensors"))
        self.model.train()
        self.ema = EMA(self.model, self.config.ema_horizon, "cpu" if self.config.ema_offload else None)
        if checkpoint:
            averages = read_tensors(checkpoint.path / ("adapter_ema.safetensors" if adapters else "ema.safetensors"))
            self.ema.weights = {name: averages[name].to(t.device) for name, t in self.ema.weights.items()}
        self.model.transformer.recompute = self.config.checkpointing
        if self.config.compile:
            compile_blocks(self.model)

    def _setup_optimizer(self, checkpoint: Checkpoint | None) -> None:
        self._names, self._trained = zip(*trained_parameters(self.model), strict=True)
        expected = sum(p.numel() for p in self.model.parameters()) * 16 / 1e8  # seconds, on a slow disk
        self._slowest_save = max(self._slowest_save, expected)
        self.optimizer = build_optimizer(self._trained, self.config)
        # Autocast alone: processes share their gradients in `_gradients`, once an update.
        self._forward = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        if checkpoint and checkpoint.state.get("optimizer", self.config.optimizer) == self.config.optimizer:
            restore_optimizer(self.optimizer, self._names, read_tensors(checkpoint.path / "optimizer.safetensors"))
        if checkpoint and self.accelerator.scaler and checkpoint.state["scaler"]:
            self.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])

    def _setup_data(self) -> None:
        self.dataset = self.dataset.with_mel(self.model.config.mel)
        self._clips = self.dataset.train
        self._frames = [clip.frames for clip in self._clips]
        self.model.config = self.model.config.having_heard([clip.seconds for clip in self._clips])
        tokenizer = self.model.tokenizer
        for clip in self.dataset.clips:  # an unknown letter is told before the run, not in the middle of it
            if len(tokenizer.encode(clip.text)) > clip.frames:
                raise UserError(f"{clip.id} has more letters than mel frames: its transcript belongs to another clip")
        self._heldout = self.dataset.judging_batches(tokenizer)

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """(step, places in the training clips) for ever, from the step that is due."""
        return batches(self._frames, self.config.update_frames, self.config.seed, self.step)

    def _prepare(self, item: tuple[int, list[int]]) -> list[tuple[Batch, Draws]]:
        return list(self._parts(*item))

    def _parts(self, step: int, members: list[int]) -> Iterator[tuple[Batch, Draws]]:
        """This process's share of a batch, cut into forward passes."""
        frames = [self._frames[i] for i in members]
        mine = shares(frames, self.process.num_processes)[self.process.process_index]
        for cut in micro_batches(mine, frames, self._micro):
            positions = [mine[p] for p in cut]
            clips = [self._clips[members[p]] for p in positions]
            batch = self.dataset.batch(clips, self.model.tokenizer, step, positions)
            yield batch, draw(batch, self.config.seed)

    # One step

    def _train_step(self, step: int, members: list[int], parts: list[tuple[Batch, Draws]]) -> None:
        """One batch: forward and backward for each part of it, then one update, if the gradient is finite."""
        started = time.monotonic()
        loss = self._gradients(step, members, parts)
        norm = self._clip()
        verdict = self.recovery.judge(loss, norm, self.accelerator.scaler)
        if verdict == "again":
            self._next_scale(lower=True)
            self.emit("overflow", step=step, scale=self.accelerator.scaler.get_scale())
            return self._train_step(step, members, parts)
        self.step = step + 1
        if verdict != "apply":
            self._next_scale(lower=False)
            self.emit("skip", step=step, reason=f"loss {loss}, gradient norm {norm}",
                      clips=[self._clips[i].id for i in members])  # fmt: skip
            if verdict == "back":
                self._go_back()
            return
        try:
            rate, shortage = self._apply(), None
        except (RuntimeError, MemoryError) as error:
            shortage = shortage_of(error)
        if highest(shortage is not None, self.accelerator.device):  # weights may be half updated
            self._make_room(step, parts, shortage)
            return self._go_back(again=True)
        frames, seconds = sum(self._frames[i] for i in members), time.monotonic() - started
        self._slowest_step = max(self._slowest_step, seconds)
        self.emit("update", step=step, loss=loss, lr=rate, grad_norm=norm, frames=frames, seconds=seconds,
                  frames_per_second=frames / max(seconds, 1e-9))  # fmt: skip
        self._after_update()

    def _gradients(self, step: int, members: list[int], parts: list[tuple[Batch, Draws]]) -> float:
        """Leave the gradient of the whole batch, of all processes, in the parameters. Returns its loss.

        Where memory does not suffice it is done again in smaller parts: the sum is the same.
        """
        device = self.accelerator.device
        if any(len(batch.lens) > 1 and batch.mel[..., 0].numel() > self._micro for batch, _ in parts):
            parts = self._prepare((step, members))  # they were made ahead, before memory ran short
        count = total(sum(draws.span.sum().item() for _, draws in parts), device) * self.model.config.mel.n_mels
        while True:
            try:
                loss, shortage = self._accumulate(parts, count), None
            except (RuntimeError, MemoryError) as error:
                shortage = shortage_of(error)
            if not highest(shortage is not None, device):
                break
            self._make_room(step, parts, shortage)
            parts = self._prepare((step, members))
        sum_gradients(self._trained)
        return total(loss.item(), device)

    def _accumulate(self, parts: list[tuple[Batch, Draws]], count: float) -> torch.Tensor:
        loss = torch.zeros((), device=self.accelerator.device)
        for batch, draws in parts:
            part = self._forward(to_device(batch, loss.device), to_device(draws, loss.device)) / count
            self.accelerator.backward(part)
            loss = loss + part.detach()
        return loss

    def _make_room(self, step: int, parts: list[tuple[Batch, Draws]], shortage: str | None) -> None:
        """Halve the forward passes and remember it. Raises UserError where one holds a single clip already."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max((batch.mel[..., 0].numel() for batch, _ in parts), default=1)
        clips = max((len(batch.lens) for batch, _ in parts), default=0)
        if shortage is not None and clips == 1:
            raise UserError(f"one clip of {largest} frames ({largest / 93.75:.0f} s) does not fit into the memory of "
                            f"{self.plan.device_name}: {would_fit(largest, self.config)}")  # fmt: skip
        self._micro = int(-highest(-max(largest // 2, 1), self.accelerator.device))
        self.emit("out_of_memory", step=step, micro_frames=self._micro, reason=shortage or "in another process")
        if self.process.is_main_process:
            info = self.run.info
            info["fitted"] = {**info.get("fitted", {}), self.plan.device_name: self._micro}
            self._try_to_write(lambda: write_json(self.run.path / "run.json", info))

    def _clip(self) -> float:
        """The norm of the gradient before it was cut to the largest allowed one."""
        if self.accelerator.scaler:
            self.accelerator.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self._trained, self.config.grad_clip).item()

    def _apply(self) -> float:
        """One optimizer update from the gradients at hand. Returns its learning rate.

        Whether they are finite was decided before: a fused AdamW would not tell, and the schedule would move on.
        """
        scaler = self.accelerator.scaler
        rate = learning_rate(self.update, self.config) * self.recovery.rate_factor
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self.update += 1
        self.ema.follow(self.model, self.update)
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def _next_scale(self, lower: bool) -> None:
        """Drop gradients that are not finite. Only an overflow lowers the loss scale."""
        self.optimizer.zero_grad(set_to_none=True)
        if scaler := self.accelerator.scaler:
            scale = scaler.get_scale()
            scaler.update(max(scale * scaler.get_backoff_factor(), SCALE_FLOOR) if lower else scale)

    def _go_back(self, again: bool = False) -> None:
        """To the last checkpoint's weights. `step` stays and other data come, unless all is to be done `again`."""
        if again:
            self._restore(self.run.latest())
        else:
            step = self.step
            self.recovery.go_back(self.recovery.precision or self.config.precision)
            self._restore(self.run.latest(), self.recovery)
            self.step = step
        self.emit("back", to=f"update_{self.update:06d}", rate_factor=self.recovery.rate_factor,
                  precision=self.recovery.precision or self.config.precision)  # fmt: skip

    def _after_update(self) -> None:
        if self.process.is_main_process:
            self._lock.touch()
        if time.monotonic() - self._machine_seen > _MACHINE_EVERY:
            self._machine_seen = time.monotonic()
            self.emit("machine", **read_gauges(self.run.path, str(self.accelerator.device)))
        if self.update % self.config.evaluate_every == 0:
            self._evaluate()
        due = self.update % (self.config.evaluate_every if self._unsaved else self.config.save_every) == 0
        if due and self.update < self.config.updates:
            self._save()

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
        # What is judged out of turn, before a stop, must not move the end of the run.
        if self.update % self.config.evaluate_every == 0 and min(raw, averaged) < self._lowest["loss"]:
            self._lowest = {"update": self.update, "loss": min(raw, averaged)}
        self.emit("evaluate", loss_raw=raw, loss_ema=averaged, ema_start_share=self.ema.start_share(self.update))

    def _save(self) -> None:
        """Write a checkpoint, with its held-out losses. A disk that does not take it costs a warning, not the run."""
        if self._judged["update"] != self.update:
            self._evaluate()
        self.recovery.saved()
        started = time.monotonic()
        self._unsaved = self._try_to_write(self._write_checkpoint) if self.process.is_main_process else None
        self._slowest_save = max(self._slowest_save, time.monotonic() - started)
        if self._unsaved:
            self.emit("save_failed", reason=self._unsaved)
        else:
            self._saved_at = self.update
            self.emit("save", path=str(self.run.path / "checkpoints" / f"update_{self.update:06d}"))

    def _write_checkpoint(self) -> None:
        scaler = self.accelerator.scaler
        state = {"step": self.step, "scaler": scaler.state_dict() if scaler else None, **self._judged,
                 "optimizer": self.config.optimizer, "recovery": self.recovery.to_dict(),
                 "lowest": self._lowest}  # fmt: skip
        tensors, about = self._weights(), {}
        if not all(tensor.isfinite().all() for tensor in tensors["model"].values()):
            raise OSError("the weights are not finite")
        if self.config.lora_rank:
            tensors |= {"adapter": adapter_tensors(self.model), "adapter_ema": self.ema.weights}
            about = dict.fromkeys(("adapter", "adapter_ema"), about_adapters(self.model))
        tensors["optimizer"] = optimizer_tensors(self.optimizer, self._names)
        checkpoint = self.run.save(self.update, tensors, self.model, state, about)
        self._choose(checkpoint, state)
        self.run.rotate(self.config.keep_checkpoints, self.config.keep_every)

    def _weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """The model as it was trained and as it is on average, both without adapters beside their layers."""
        if self.config.lora_rank:
            with self.ema_weights():
                averaged = plain_state(self.model)
            return {"model": plain_state(self.model), "ema": averaged}
        weights = self.model.state_dict()
        buffers = {name: b for name, b in self.model.named_buffers() if name in weights}
        return {"model": weights, "ema": {**self.ema.weights, **buffers}}

    def _choose(self, checkpoint: Checkpoint, state: dict) -> None:
        """Let `best.json` point at this checkpoint if its loss is the lowest. A user's choice stays."""
        weights, loss = min((("raw", state["loss_raw"]), ("ema", state["loss_ema"])), key=lambda pair: pair[1])
        best = self.run.best
        if best is None or (best["by"] == "trainer" and not loss >= best["loss"]):
            which = "held-out" if self.dataset.heldout else "training"
            self.run.choose(checkpoint.name, weights, f"lowest loss on the {which} clips", loss, by="trainer")

    def _try_to_write(self, write: Callable[[], None]) -> str | None:
        """Do it; an error of the disk becomes a warning. Returns what went wrong."""
        try:
            write()
        except OSError as error:
            warnings.warn(f"writing to {self.run.path} failed, training goes on ({error})", stacklevel=2)
            return str(error)
        return None

    def emit(self, event: str, **values) -> None:
        """Record an event and hand it to the callbacks, on the main process."""
        values = {"event": event, "update": self.update, **values}
        if self.process.is_main_process:
            self._try_to_write(lambda: self.run.record({**values, "time": time.time()}))
            for callback in self.callbacks:
                callback(values, self)
