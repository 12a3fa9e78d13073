"""How far sampling in half precision strays from fp32: f5kit beside upstream, each cast the way it casts itself.

    .venv-parity/bin/python benchmarks/half_precision.py      writes benchmarks/results/half_precision.json

Both get the same weights, text and reference, and start from the same fp32 noise. f5kit keeps rotary angles, times,
noise and the flow's state in fp32 and casts what enters the network; upstream casts all of them (its load_checkpoint).
Upstream also draws its noise in half precision: a row of its own shows what that does, since other noise is another
sample. A difference is the root mean square over the frames made, relative to that of the fp32 sample.

The models are small and their weights random, with queries and keys made larger so that attention is not flat: the
figures compare two ways of casting on equal terms, and say nothing about the sound of a trained model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from copy import deepcopy
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import f5kit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
from models import make_models  # noqa: E402
from structures import VOCAB, structures  # noqa: E402

SECONDS = {5: 469, 30: 2813}  # mel frames
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = dict(steps=7, cfg_strength=2.0)
SWAY = -1.0
SHARPER = 3.0


def configs() -> list:
    """One of each way to place the text and the positions, with the published 64 channels a head."""
    wide = dict(dim=128, heads=2, dim_head=64, depth=4)
    names = ("F5TTS_v1_Small", "F5TTS_Small", "E2TTS_Small")
    return [structures()[name].replace(**wide) for name in names]


def sharpen(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".to_q." in name or ".to_k." in name:
                parameter *= SHARPER


class Task:
    """One sentence of n frames to sample, a third of which is given."""

    def __init__(self, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.n, self.seed = n, seed
        self.reference = torch.randn(1, n // 3, 100, generator=g)
        self.noise = torch.randn(1, n, 100, generator=g)
        self.text = torch.randint(VOCAB, (1, n // 7), generator=g)  # some 13 letters a second

    def ours(self, model) -> Tensor:
        text, noise = self.text.tolist(), self.noise
        *_, out = model.sample(self.reference, text, [self.n], noise=noise, sway=SWAY, **OPTIONS)
        return out[:, self.n // 3 :].float()

    def theirs(self, model, own_noise: bool) -> Tensor:
        """`own_noise`: drawn by upstream itself, in the model's type and from a seed."""

        def draw(*_, dtype, **__) -> Tensor:
            return self.noise[0].to(dtype)

        options = dict(seed=self.seed, sway_sampling_coef=SWAY, **OPTIONS)
        if own_noise:
            out, _ = model.sample(self.reference, self.text, self.n, **options)
        else:
            with patch("torch.randn", draw):
                out, _ = model.sample(self.reference, self.text, self.n, **options)
        return out[:, self.n // 3 :].float()


def difference(half: Tensor, full: Tensor) -> float:
    return ((half - full).square().mean().sqrt() / full.square().mean().sqrt()).item()


def measure(config, seconds: int, seeds: list[int], dtypes: dict) -> list[dict]:
    """One row for each type and implementation, with the difference of every seed."""
    rows = {}
    for seed in seeds:
        torch.manual_seed(seed)
        theirs, ours = make_models(config, torch.float32)
        sharpen(theirs)
        ours.load_state_dict(theirs.state_dict())
        task = Task(SECONDS[seconds], seed)
        ways = {
            "f5kit": (ours, task.ours),
            "upstream": (theirs, lambda m, task=task: task.theirs(m, own_noise=False)),
            "upstream, its own noise": (theirs, lambda m, task=task: task.theirs(m, own_noise=True)),
        }
        # Copied first: upstream's models keep a thread's cache once they have sampled, and can't be copied then.
        halves = {(name, who): deepcopy(ways[who][0]).to(dtype) for name, dtype in dtypes.items() for who in ways}
        full = {who: sample(model) for who, (model, sample) in ways.items()}
        assert difference(full["f5kit"], full["upstream"]) < 1e-4, "the two don't agree in fp32"
        for (name, who), model in halves.items():
            started = time.monotonic()
            made = ways[who][1](model)
            row = rows.setdefault((name, who), dict(model=config.name, seconds=seconds, type=name, who=who))
            row.setdefault("differences", []).append(difference(made, full[who]))
            print(*row.values(), f"({time.monotonic() - started:.0f} s)", flush=True)
    return list(rows.values())


def circumstances() -> dict:
    """What the figures depend on."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    changed = " and uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "command": "python benchmarks/half_precision.py " + " ".join(sys.argv[1:]),
        "commit": git("rev-parse", "HEAD") + changed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": f"CPU {models[0] if models else platform.processor()}, {os.cpu_count()} cores, 1 thread used",
        "versions": {"python": platform.python_version(), "f5kit": f5kit.__version__}
        | {name: version(name) for name in ("torch", "f5-tts")},
        "models": "random weights, dim 128, depth 4, 2 heads of 64 channels; queries and keys times 3",
        "sampling": "7 steps, guidance 2, sway -1, a third of the frames given",
        "difference": "root mean square of (half - fp32) over that of fp32, on the frames made; one figure a seed",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--types", default="bf16,fp16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dtypes = {name: DTYPES[name] for name in arguments.types.split(",")}
    before = circumstances()
    rows = [
        row
        for config in configs()
        for seconds in SECONDS
        for row in measure(config, seconds, list(range(arguments.seeds)), dtypes)
    ]
    ours = {(r["model"], r["seconds"], r["type"]): max(r["differences"]) for r in rows if r["who"] == "f5kit"}
    others = [r for r in rows if r["who"] != "f5kit"]
    larger = [r for r in others if min(r["differences"]) <= ours[r["model"], r["seconds"], r["type"]]]
    result = ROOT / "benchmarks" / "results" / "half_precision.json"
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps({**before, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"f5kit's difference is the smaller one in {len(others) - len(larger)} of {len(others)} comparisons")
    return 1 if larger else 0


if __name__ == "__main__":
    sys.exit(main())
