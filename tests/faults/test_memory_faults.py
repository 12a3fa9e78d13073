"""F5: memory that runs short costs time, and changes no number."""

from __future__ import annotations

import pytest
import torch
from small import losses, opened, trainer

from f5kit.data import to_device
from f5kit.errors import UserError
from f5kit.runs import RunFolder
from f5kit.trainer import Trainer


class Exact(Trainer):
    """fp64, so that only a real difference shows; keeps each update's gradient; runs short of memory when told to.

    `short` is a set of (where, which call): "forward", "backward" or "step". `limit` is the largest forward pass that
    fits, in padded frames.
    """

    short: set[tuple[str, int]] = set()
    limit = 10**9

    def fit(self):
        self.gradients, self.calls = {}, {"forward": 0, "backward": 0, "step": 0}
        return super().fit()

    def _setup_optimizer(self, checkpoint):
        self.model.double()
        super()._setup_optimizer(checkpoint)
        self.ema.weights = {name: tensor.double() for name, tensor in self.ema.weights.items()}
        plain, backward, step = self._forward, self.accelerator.backward, self.optimizer.step

        def forward(batch, draws):
            self._count("forward", batch.mel[..., 0].numel())
            return plain(batch, draws)

        self._forward = forward
        self.accelerator.backward = lambda loss: (self._count("backward"), backward(loss))
        self.optimizer.step = lambda: (self._count("step"), step())

    def _count(self, where: str, frames: int = 0) -> None:
        self.calls[where] += 1
        if (where, self.calls[where]) in self.short or frames > self.limit:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {frames} frames")

    def _parts(self, step, members):
        for batch, draws in super()._parts(step, members):
            yield double(batch), double(draws)

    def _setup_data(self):
        super()._setup_data()
        self._heldout = []

    def _evaluate(self):
        self._judged = {"update": self.update, "loss_raw": 1.0, "loss_ema": 1.0}

    def _clip(self):
        self.gradients[self.step] = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        return super()._clip()


def double(value):
    value = to_device(value, "cpu")
    for name, tensor in vars(value).items():
        if torch.is_tensor(tensor) and tensor.is_floating_point():
            setattr(value, name, tensor.double())
    return value


def difference(made: Exact, clean: Exact) -> float:
    """The largest relative difference of an update's gradient."""
    return max(((made.gradients[s] - g).norm() / g.norm()).item() for s, g in clean.gradients.items())


def run(room, folder, **about):
    kind = type("Short", (Exact,), about)
    made = trainer(room, folder, kind=kind, updates=5, warmup_updates=1, update_frames=1_040, micro_frames=1_040)
    return made, made.fit()


def test_memory_runs_short_anywhere(room, tmp_path, report):
    """15 shortages: in the forward and backward pass and in the optimizer's step of five updates."""
    clean, _ = run(room, tmp_path / "clean")
    survived, largest = 0, 0.0
    for where in ("forward", "backward", "step"):
        for call in range(1, 6):
            made, folder = run(room, tmp_path / f"{where}{call}", short={(where, call)})
            events = folder.events()
            told = [e for e in events if e["event"] == "out_of_memory"]
            assert len(told) == 1 and made.calls["forward"] > clean.calls["forward"]
            error = difference(made, clean)
            largest = max(largest, error)
            rates = [[rate for *_, rate in losses(r).values()] for r in (folder, clean.run)]
            remembered = folder.info["fitted"] == {made.plan.device_name: made._micro}
            survived += error <= 1e-12 and rates[0] == rates[1] and remembered
    report("F5", injected=15, survived=survived, largest_gradient_error=f"{largest:.1e}")


def test_the_ladder_ends_at_one_clip(room, tmp_path, report):
    clean, _ = run(room, tmp_path / "clean")
    longest = max(clip.frames for clip in clean.dataset.train)
    made, folder = run(room, tmp_path / "ladder", limit=longest)
    assert made._micro <= 2 * longest and difference(made, clean) <= 1e-12
    sizes = [e["micro_frames"] for e in folder.events() if e["event"] == "out_of_memory"]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) >= 2
    plan, dataset = opened(room, updates=5, warmup_updates=1, update_frames=1_040, micro_frames=1_040)
    again = Exact(plan, dataset, folder.path)
    again.fit()  # a resumed run remembers
    assert again._micro == made._micro
    with pytest.raises(UserError, match=r"one clip of \d+ frames \(\d+ s\) does not fit.*max_seconds=") as told:
        run(room, tmp_path / "none", limit=longest - 60)
    assert RunFolder(tmp_path / "none").events()[-1]["event"] == "out_of_memory"
    report("F5", injected=2, survived=2, said=repr(str(told.value)[:40]))


def test_other_errors_are_not_taken_for_it(room, tmp_path):
    def broken(event, trainer):
        if event["event"] == "start":
            trainer._forward = None

    with pytest.raises(TypeError, match="not callable"):
        trainer(room, tmp_path / "run", broken, updates=1, warmup_updates=0).fit()
