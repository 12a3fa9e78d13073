"""AdamW with 8-bit states beside AdamW: the losses of the demo's finetune, update by update, on the same batches.

    python benchmarks/adam8bit.py                 300 updates each; writes results/adam8bit.json and .png
    python benchmarks/adam8bit.py --updates 4 --out /tmp/x     does it run?

Both runs see the same clips, noise and times in every update, for these are keyed by seed, step and position; so their
curves may be compared update by update. The difference is that of the means of 25 updates: single updates are noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from f5kit import Trainer, detect_host, plan_run, prepare_dataset

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "f5kit" / "demo_voice"
WINDOW = 25  # updates


def losses(dataset, optimizer: str, updates: int, folder: Path) -> dict:
    """Loss of every update, and the held-out losses, of the finetune that notebook 02 does in the demo."""
    plan = plan_run("starter", dataset, detect_host(), updates=updates, optimizer=optimizer)
    plan = replace(plan, train=replace(plan.train, patience=0))  # no early end: the curves are to be of one length
    run = Trainer(plan, dataset, folder).fit()
    events = run.events()
    return {
        "updates": [event["loss"] for event in events if event["event"] == "update"],
        "held_out": [[e["update"], e["loss_raw"], e["loss_ema"]] for e in events if e["event"] == "evaluate"],
        "train": plan.train.to_dict(),
    }


def smooth(values: list[float]) -> list[float]:
    """Means of WINDOW values, or of all where there are fewer."""
    width = min(WINDOW, len(values))
    return [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]


def differences(curves: dict[str, dict]) -> dict[str, float]:
    """The largest difference of the smoothed curves and of the held-out losses, as shares of AdamW's."""
    exact, small = curves["adamw"], curves["adamw8bit"]
    pairs = zip(smooth(exact["updates"]), smooth(small["updates"]), strict=True)
    judged = zip(exact["held_out"], small["held_out"], strict=True)
    return {
        "largest_of_updates": max(abs(b - a) / a for a, b in pairs),
        "largest_of_held_out": max(abs(b[1] - a[1]) / a[1] for a, b in judged),
        "of_last_held_out": small["held_out"][-1][1] / exact["held_out"][-1][1] - 1,
    }


def draw(curves: dict[str, dict], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(smooth(curve["updates"]), style, label=f"{name}, mean of {WINDOW} updates")
        axes.plot([e[0] for e in curve["held_out"]], [e[1] for e in curve["held_out"]], style + "o", markersize=3,
                  label=f"{name}, held out")  # fmt: skip
    axes.set(xlabel="update", ylabel="loss", title="Finetuning the demo voice: AdamW and its 8-bit states")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"), help="folder")
    given = parser.parse_args()
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare_dataset(DEMO, Path(folder) / "data", progress=False)
        curves = {kind: losses(dataset, kind, given.updates, Path(folder) / kind) for kind in ("adamw", "adamw8bit")}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "command": "python benchmarks/adam8bit.py " + " ".join(sys.argv[1:]), "commit": commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "hardware": str(detect_host()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "bitsandbytes": version("bitsandbytes")},
        "differences": differences(curves), "curves": curves,
    }  # fmt: skip
    (out / "adam8bit.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(curves, out / "adam8bit.png")
    print(json.dumps(record["differences"], indent=1))


if __name__ == "__main__":
    main()
