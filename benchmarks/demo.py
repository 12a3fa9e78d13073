"""Measure the demo: the whole road from nothing, and once more to see it resume.

    python benchmarks/demo.py

Writes results/demo.json (command, commit, hardware, versions, date, seconds of each stage, losses) and
results/demo.png (the loss, and one held-out sentence as recorded, before and after). The README quotes both.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from matplotlib.figure import Figure

from f5kit import RunFolder, load_dataset, log_mel, read_audio
from f5kit.checkpoint import describe_model
from f5kit.evaluate import loss_of_averages

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
RUN = "my_voice"


def run_demo(workspace: Path) -> tuple[float, dict]:
    """(seconds, result.json) of one run of all notebooks."""
    started = time.monotonic()
    command = [sys.executable, str(ROOT / "notebooks" / "run.py"), "--demo", "--workspace", str(workspace)]
    subprocess.run(command, check=True)
    return time.monotonic() - started, json.loads((workspace / "result.json").read_text(encoding="utf-8"))


def processor() -> str:
    """The processor's name and the cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def draw(workspace: Path, path: Path) -> None:
    """The loss of the run, and the same sentence recorded, before and after."""
    run = RunFolder(workspace / "runs" / RUN)
    dataset = load_dataset(run.dataset_folder)
    judged = workspace / "judged" / RUN
    sentence = json.loads((judged / "report.json").read_text(encoding="utf-8"))["sentences"][0]["text"]
    names = {"recorded": "recordings", "before": "before", "after": "after"}
    sounds = {name: judged / "sounds" / f"{system}_001.wav" for name, system in names.items()}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2)
    events = [event for event in run.events() if event["event"] == "evaluate"]
    axes = left.subplots()
    axes.plot([e["update"] for e in events], [e["loss_raw"] for e in events], label="held out, raw weights")
    axes.plot([e["update"] for e in events], [e["loss_ema"] for e in events], label="held out, EMA")
    averages = loss_of_averages(dataset, describe_model(run.info["model"]))
    axes.axhline(averages, color="grey", linestyle=":", label="best guess from averages alone")
    axes.set(xlabel="update", ylabel="flow-matching loss")
    axes.legend()
    for plot, (name, sound) in zip(right.subplots(3, 1, sharex=True), sounds.items(), strict=True):
        plot.imshow(log_mel(read_audio(sound)).T, origin="lower", aspect="auto")
        plot.set(ylabel=name, yticks=[])
    plot.set(xlabel=f"frame: {sentence!r}")
    figure.savefig(path, dpi=80)


def main() -> None:
    from importlib.metadata import version

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "demo"
        first, result = run_demo(workspace)
        again, _ = run_demo(workspace)
        run = RunFolder(workspace / "runs" / RUN)
        averages = loss_of_averages(load_dataset(run.dataset_folder), describe_model(run.info["model"]))
        draw(workspace, RESULTS / "demo.png")
    record = {
        "command": "python benchmarks/demo.py", "commit": commit.stdout.strip(), "date": date.today().isoformat(),
        "hardware": processor(), "versions": result["versions"] | {"f5kit": version("f5kit")},
        "seconds": result["seconds"], "seconds_in_all": round(first, 1), "seconds_when_resumed": round(again, 1),
        "losses": result["losses"][RUN], "loss_of_averages": round(averages, 4),
        "judged": result["stages"]["04_choose_checkpoint"]["judged"],
    }  # fmt: skip
    (RESULTS / "demo.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
