"""Does the judge stop what must be stopped? Runs of ten times the planned updates, on one minute of voice.

    python benchmarks/overfit.py [--seeds 5] [--times 10]

Each seed draws another minute of the bundled voice to train on, other clips to choose by, and others again that serve
for nothing else. The stop rule is off, so that the whole curve is seen; where it would have ended the run is said. The
chosen checkpoint must not be the last one, and must have the lower loss on the clips that nobody chose by. Writes
results/overfit.json and results/overfit.png, and exits 1 when a seed says otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from matplotlib.figure import Figure

from f5kit import Trainer, detect_host, load_dataset, load_model, plan_run, prepare_dataset
from f5kit.data import Dataset
from f5kit.evaluate import dataset_loss
from f5kit.runs import RunFolder

RESULTS = Path(__file__).resolve().parent / "results"
MINUTE, JUDGES = 60.0, 8


def split(dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """(a minute to train on with clips to choose by, the same with clips that are used for nothing else)."""
    clips = list(dataset.clips)
    random.Random(seed).shuffle(clips)
    chosen_by, unused, rest = clips[:JUDGES], clips[JUDGES : 2 * JUDGES], clips[2 * JUDGES :]
    train, seconds = [], 0.0
    for clip in rest:
        if seconds + clip.seconds <= MINUTE:
            train.append(replace(clip, split="train"))
            seconds += clip.seconds

    def with_heldout(held) -> Dataset:
        rows = train + [replace(clip, split="heldout") for clip in held]
        return Dataset(dataset.folder, dataset.info, rows, dataset.manifest_hash)

    return with_heldout(chosen_by), with_heldout(unused)


def stopped_at(events: list[dict], patience: int) -> int | None:
    """The update at which a stop rule would have ended the run."""
    lowest, at, waited = float("inf"), 0, 0
    for event in (e for e in events if e["event"] == "evaluate"):
        loss = min(event["loss_raw"], event["loss_ema"])
        if loss < lowest:
            lowest, at, waited = loss, event["update"], 0
        elif event["update"] > at:
            waited += 1
        if waited >= patience:
            return event["update"]
    return None


def one_run(dataset: Dataset, seed: int, times: int, model: str, rate: float, folder: Path) -> dict:
    training, unused = split(dataset, seed)
    planned = plan_run(model, training, detect_host("cpu"), seed=seed).train.updates
    plan = plan_run(model, training, detect_host("cpu"), updates=times * planned, learning_rate=rate, seed=seed)
    patience = plan.train.patience
    plan = replace(plan, train=replace(plan.train, patience=0))
    run: RunFolder = Trainer(plan, training, folder).fit()
    best, last = run.best, run.checkpoints()[-1]
    after = {which: dataset_loss(load_model(last.path, weights=which), unused) for which in ("raw", "ema")}
    found = dataset_loss(load_model(run.path), unused)
    curve = [[e["update"], e["loss_raw"], e["loss_ema"]] for e in run.events() if e["event"] == "evaluate"]
    return {
        "seed": seed, "planned": planned, "updates": plan.train.updates, "seconds_of_voice": round(
            sum(clip.seconds for clip in training.train), 1), "chosen": best["checkpoint"], "weights": best["weights"],
        "last": last.name, "loss_chosen_by": best["loss"], "loss_unused_chosen": found,
        "loss_unused_last": min(after.values()), "stop_rule": stopped_at(run.events(), patience), "curve": curve,
        "held": best["checkpoint"] != last.name and found < min(after.values()),
    }  # fmt: skip


def draw(rows: list[dict]) -> Figure:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        x, raw, ema = zip(*row["curve"], strict=True)
        lowest = min(range(len(x)), key=lambda i: min(raw[i], ema[i]))
        (line,) = axes.plot(x, raw, label=f"seed {row['seed']}")
        axes.plot(x, ema, "--", color=line.get_color())
        axes.plot(x[lowest], min(raw[lowest], ema[lowest]), "o", color=line.get_color())
    axes.axvline(rows[0]["planned"], color="gray", linewidth=1)
    axes.set(xlabel="update (grey: as planned)", ylabel="held-out loss (dashed: EMA)",
             title="One minute of voice, ten times too long")  # fmt: skip
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rate", type=float, default=5e-3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        prepare_dataset("demo", Path(work) / "demo", heldout=0, progress=False)
        dataset = load_dataset(Path(work) / "demo")
        for seed in range(options.seeds):
            rows.append(one_run(dataset, seed, options.times, options.model, options.rate, Path(work) / str(seed)))
            told = {key: value for key, value in rows[-1].items() if key != "curve"}
            print(json.dumps(told), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS).stdout.strip()
    record = {"command": " ".join(["python", *sys.argv]), "commit": commit, "date": date.today().isoformat(),
              "hardware": str(detect_host("cpu")), "versions": {"python": platform.python_version(),
              "torch": torch.__version__}, "runs": rows}  # fmt: skip
    (RESULTS / "overfit.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows).savefig(RESULTS / "overfit.png", dpi=110)
    held = sum(row["held"] for row in rows)
    print(f"the judge was right in {held} of {len(rows)} runs")
    sys.exit(held != len(rows))


if __name__ == "__main__":
    main()
