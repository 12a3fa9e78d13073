"""F6: numbers that are not finite change nothing, are named with their clips, and do not come back for ever."""

from __future__ import annotations

import pytest
import torch
from small import losses, same, trainer, weights

from f5kit.errors import UserError
from f5kit.recovery import IN_A_ROW, SCALE_FLOOR
from f5kit.runs import RunFolder
from f5kit.trainer import Trainer
from f5kit.weights import read_tensors


class Poisoned(Trainer):
    """`poison` maps steps to (where, value): the "input", the "loss" or the "gradient" of that step takes the value."""

    poison: dict[int, tuple[str, float]] = {}
    held: list = []

    def _accumulate(self, parts, count):
        where, value = self.poison.get(parts[0][0].step, ("", 0.0))
        if where == "input":
            parts[0][0].mel[0, 3, 5] = value
        before = self._all()
        loss = super()._accumulate(parts, count)
        if where == "loss":
            (value * sum(p.sum() for p in self.model.parameters())).backward()
            loss = loss * value
        if where == "gradient":
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = value
        self.held = before
        return loss

    def _all(self) -> list[torch.Tensor]:
        """Weights, averages and optimizer states."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        return [t.detach().clone() for t in (*self.model.parameters(), *self.ema.weights.values(), *states)]


def unchanged(seen):
    """A callback that notes, at each skip, whether everything is what it was before the step."""

    def callback(event, trainer):
        if event["event"] == "skip":
            equal = all(torch.equal(a, b) for a, b in zip(trainer.held, trainer._all(), strict=True))
            seen.append((event["step"], equal, trainer.update))

    return callback


def test_single_updates_that_are_not_finite(room, tmp_path, report):
    bad = [(where, value) for where in ("input", "loss", "gradient") for value in (float("nan"), float("inf"))]
    poison = {3 * i + 2: bad[i % 6] for i in range(12)}
    kind, seen = type("Now", (Poisoned,), {"poison": poison}), []
    run = trainer(room, tmp_path / "run", unchanged(seen), kind=kind, updates=26, warmup_updates=1, save_every=5).fit()
    skips = [e for e in run.events() if e["event"] == "skip"]
    survived = sum(equal for _, equal, _ in seen)
    assert [e["step"] for e in skips] == sorted(poison) and all(e["clips"] for e in skips)
    updates = [e for e in run.events() if e["event"] == "update"]
    assert [e["update"] for e in updates] == list(range(1, 27)) and updates[-1]["step"] == 37
    kept = [read_tensors(c.path / "model.safetensors").values() for c in run.checkpoints()]
    poisoned = [tensors for tensors in kept if not all(t.isfinite().all() for t in tensors)]
    report("F6", injected=12, survived=survived, silent=len(poisoned), where="input, loss, gradient")


def test_many_in_a_row_go_back_with_half_the_rate(room, tmp_path, report):
    poison = {step: ("gradient", float("inf")) for step in range(7, 7 + IN_A_ROW)}
    kind, seen = type("Now", (Poisoned,), {"poison": poison}), []
    at_back = {}

    def callback(event, trainer):
        if event["event"] == "back":
            at_back.update(event, step=trainer.step, same=same(weights(trainer.run), dict(trainer.model.state_dict())))

    config = dict(updates=10, warmup_updates=1, save_every=5)
    run = trainer(room, tmp_path / "run", unchanged(seen), callback, kind=kind, **config).fit()
    assert (at_back["update"], at_back["step"], at_back["same"]) == (5, 7 + IN_A_ROW, True)
    rates = {e["step"]: (e["update"], e["lr"]) for e in run.events() if e["event"] == "update"}
    assert rates[27] == (6, rates[5][1] / 2), "the schedule of update 6, halved"
    # Stopped in the middle of it and resumed, it comes to the same end.
    again = RunFolder(tmp_path / "again")

    class Stopped(Exception):
        pass

    def stop(event, trainer):
        if event["event"] == "skip" and event["step"] == 15:
            raise Stopped

    with pytest.raises(Stopped):
        trainer(room, again.path, stop, kind=kind, **config).fit()
    trainer(room, again.path, kind=kind, **config).fit()
    equal = same(weights(run), weights(again)) and same(weights(run, "ema"), weights(again, "ema"))
    report("F6", injected=IN_A_ROW, survived=sum(e for _, e, _ in seen), silent=int(not equal), where="in a row")


def test_in_bf16_the_second_return_is_to_fp32_and_the_third_ends_it(room, tmp_path):
    poison = {step: ("loss", float("nan")) for step in range(4, 4 + 3 * IN_A_ROW)}
    kind = type("Now", (Poisoned,), {"poison": poison})
    config = dict(updates=9, warmup_updates=1, save_every=2, precision="bf16")
    with pytest.raises(UserError, match="20 updates in a row were not finite, also after going back twice"):
        trainer(room, tmp_path / "run", kind=kind, **config).fit()
    back = [e for e in RunFolder(tmp_path / "run").events() if e["event"] == "back"]
    assert [(e["rate_factor"], e["precision"]) for e in back] == [(0.5, "bf16"), (0.5, "fp32")]
    shorter = type("Now", (Poisoned,), {"poison": {s: p for s, p in poison.items() if s < 4 + 2 * IN_A_ROW}})
    run = trainer(room, tmp_path / "shorter", kind=shorter, **config).fit()
    assert run.latest().update == 9 and run.latest().state["recovery"]["precision"] == "fp32"


class Scaled(Poisoned):
    """With a loss scale, and gradients of the range of fp16: above 65,504 they are inf."""

    start = 2.0**24

    def _setup_devices(self):
        super()._setup_devices()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.start)

    def _accumulate(self, parts, count):
        loss = super()._accumulate(parts, count)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.half())
        return loss


def test_an_overflow_only_lowers_the_scale(room, tmp_path, report):
    config = dict(updates=6, warmup_updates=1, save_every=3)
    run = trainer(room, tmp_path / "scaled", kind=Scaled, **config).fit()
    events = run.events()
    overflows = [e for e in events if e["event"] == "overflow"]
    assert overflows and not [e for e in events if e["event"] == "skip"], "nothing is lost by an overflow"
    scales = [e["scale"] for e in overflows]
    assert scales == [scales[0] / 2**i for i in range(len(scales))]
    steps = [(e["step"], e["update"]) for e in events if e["event"] == "update"]
    assert steps == [(i, i + 1) for i in range(6)], "schedule, EMA and data move on together, with a fused AdamW too"
    plain = trainer(room, tmp_path / "plain", **config).fit()
    expected = [loss for loss, *_ in losses(plain).values()]
    assert [loss for loss, *_ in losses(run).values()] == pytest.approx(expected, rel=1e-2)
    resumed = RunFolder(tmp_path / "scaled").latest().state["scaler"]
    assert resumed["scale"] == scales[-1]
    report("F6", injected=len(overflows), survived=len(overflows), where="fp16 overflow")


def test_at_its_floor_an_overflow_counts(room, tmp_path):
    poison = {step: ("gradient", float("inf")) for step in range(3, 3 + IN_A_ROW)}
    low = type("Low", (Scaled,), {"start": SCALE_FLOOR, "poison": poison})
    run = trainer(room, tmp_path / "run", kind=low, updates=4, warmup_updates=1, save_every=2).fit()
    kinds = [e["event"] for e in run.events()]
    assert kinds.count("skip") == IN_A_ROW and kinds.count("back") == 1 and "overflow" not in kinds
