"""F14: the kernel of the finetuning notebook dies under papermill; run again, it ends with the same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from small import losses, same, weights
from test_saving_faults import wait_until

from f5kit.runs import RunFolder

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"base_model": "tiny", "updates": 16, "learning_rate": 2e-3}


def start(workspace: Path, only: str, **parameters) -> subprocess.Popen:
    given = [part for name, value in {**SETTINGS, **parameters}.items() for part in ("-p", name, str(value))]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "notebooks/run.py"), "--workspace", str(workspace), "--only", only, *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=workspace.parent, env=env, text=True, **pipes)


def finish(process: subprocess.Popen) -> str:
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said[-3000:]
    return said


def test_the_kernel_dies_while_the_notebook_trains(recordings, tmp_path, report):
    workspace = tmp_path / "workspace"
    finish(start(workspace, "01,02", source=recordings, consent="Public domain", run_name="whole"))
    run = RunFolder(workspace / "runs" / "killed")
    process = start(workspace, "02", run_name="killed")

    def half_way() -> bool:
        return process.poll() is not None or any(e["event"] == "update" and e["update"] >= 7 for e in run.events())

    wait_until(half_way, 300)
    kernel = json.loads((run.path / "run.lock").read_text())["pid"]
    os.kill(kernel, signal.SIGKILL)
    said = process.communicate(timeout=100)[0]
    assert process.returncode != 0 and "its kernel died" in said
    assert run.latest().update < 16
    finish(start(workspace, "02", run_name="killed"))
    whole = RunFolder(workspace / "runs" / "whole")
    results = [json.loads((folder.path / "result.json").read_text())["losses"] for folder in (whole, run)]
    starts = [e["resumed"] for e in run.events() if e["event"] == "start"]
    equal = results[0] == results[1] and losses(run) == losses(whole) and same(weights(run), weights(whole))
    report("F14", injected=1, survived=int(starts == [False, True] and equal), silent=int(not equal))
