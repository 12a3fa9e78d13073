"""A wheel of the project holds the embedded voices and the notebooks, and the road runs from it without the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tracked files: a build leaves its folders where it runs."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git: the tracked files are not known")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and name.startswith(("f5kit/", "notebooks/", "pyproject", "README", "LICENSE")):
            (folder / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "sources" / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, str(folder / "sources")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("f5kit-*.whl"))


def test_it_holds_voices_and_notebooks(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    notebooks = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {f"f5kit/notebooks/{name}" for name in (*notebooks, "run.py")} <= names
    for folder in ("demo_voice", "starter_voice", "assets"):
        expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "f5kit" / folder).rglob("*") if p.is_file()}
        assert {name for name in expected if "__pycache__" not in name} <= names, folder
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "f5kit").glob("*.py")} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/")) or "/source/" in name]
    assert wheel.stat().st_size < 60e6


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> tuple[Path, dict]:
    """The wheel in an empty folder, and an environment that finds it and not the sources."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, {**os.environ, "PYTHONPATH": str(folder / "site"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def test_it_speaks_without_the_sources(installed):
    folder, environment = installed
    code = (
        "import f5kit; from f5kit import Voice\nprint(f5kit.__file__)\n"
        "Voice.load('starter').speak('Hello there.', steps=2, progress=False).save('hello.wav')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder / "site")) and (folder / "hello.wav").stat().st_size > 10_000


@pytest.mark.hosts
def test_the_road_runs_from_it(installed):
    folder, environment = installed
    given = {"source": "demo", "base_model": "tiny", "updates": 4, "steps": 4, "text": "A short sentence."}
    pairs = [part for name, value in given.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "f5kit.notebooks.run", "--demo", "--only", "00,01,02,05,06", *pairs]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    stages = json.loads((folder / "runs" / "demo" / "result.json").read_text())["stages"]
    assert {"00_setup", "01_prepare_data", "05_speak", "06_publish"} <= stages.keys()
