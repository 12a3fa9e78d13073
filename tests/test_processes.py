"""Two processes train as one: the same losses, and a run that changes hands between one and two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from small import furnish, losses  # noqa: E402

from f5kit.processes import shares  # noqa: E402
from f5kit.runs import RunFolder  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {faults!r})
from small import trainer
from test_memory_faults import Exact, double
from f5kit.trainer import Trainer

class Double(Trainer):
    def _setup_model(self, checkpoint):
        super()._setup_model(checkpoint)
        self.model.double()
        self.ema.weights = {{name: tensor.double() for name, tensor in self.ema.weights.items()}}
    def _parts(self, step, members):
        for batch, draws in super()._parts(step, members):
            yield double(batch), double(draws)
    def _evaluate(self):
        self._judged = {{"update": self.update, "loss_raw": 1.0, "loss_ema": 1.0}}

_, room, run, kind, updates, stop = sys.argv
config = dict(updates=int(updates), warmup_updates=2, update_frames=1_040, micro_frames=600)
def stopped(event, trainer):
    if event["event"] == "update" and event["update"] == int(stop):
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
trainer(Path(room), Path(run), stopped, kind={{"fp64": Double, "fp32": Trainer}}[kind], **config).fit()
"""


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return furnish(tmp_path_factory.mktemp("processes") / "room")


def train(room: Path, folder: Path, processes: int, kind: str, updates: int = 20, stop: int = 0) -> RunFolder:
    script = room / "train.py"
    script.write_text(SCRIPT.format(faults=str(ROOT / "tests" / "faults")))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(script), str(room), str(folder), kind]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([*command, str(updates), str(stop)], env=env, capture_output=True, text=True, timeout=400)
    assert (done.returncode == 0) is (stop == 0), done.stdout + done.stderr
    return RunFolder(folder)


def largest_difference(a: RunFolder, b: RunFolder) -> float:
    one, two = losses(a), losses(b)
    assert one.keys() == two.keys()
    return max(abs(one[s][i] - two[s][i]) / abs(one[s][i]) for s in one for i in (0, 1))


@pytest.fixture(scope="module")
def alone(room, tmp_path_factory) -> RunFolder:
    return train(room, tmp_path_factory.mktemp("alone") / "run", 1, "fp64")


def test_two_processes_are_one(room, alone, tmp_path):
    together = train(room, tmp_path / "two", 2, "fp64")
    assert len(losses(together)) == 20
    assert largest_difference(alone, together) <= 1e-9
    single = [train(room, tmp_path / f"fp32_{n}", n, "fp32") for n in (1, 2)]
    fp32 = largest_difference(*single)
    print(f"two processes: largest difference {largest_difference(alone, together):.1e} in fp64, {fp32:.1e} in fp32")
    assert fp32 <= 1e-3


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(room, tmp_path, first, then):
    whole = train(room, tmp_path / "whole", 1, "fp32", updates=10)
    train(room, tmp_path / "run", first, "fp32", updates=10, stop=4)
    run = train(room, tmp_path / "run", then, "fp32", updates=10)
    assert run.latest().update == 10 and largest_difference(whole, run) <= 1e-3


def test_shares_are_even_and_complete():
    frames = [900, 880, 860, 500, 480, 300, 290, 120, 100]
    for processes in (1, 2, 3, 8, 20):
        found = shares(frames, processes)
        assert sorted(place for places in found for place in places) == list(range(9))
        load = [sum(frames[p] for p in places) for places in found]
        assert max(load) - min(load) <= max(frames)
    assert [sum(frames[p] for p in places) for places in shares(frames, 2)] == [2170, 2260]
