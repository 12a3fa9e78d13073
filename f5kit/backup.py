"""Copies of a run outside the machine that trains it: Google Drive, another folder, or the Hub.

    <place>/<run>/
      resume-000400-1a2b3c4d5e6f7081.tar   what a run goes on from, in one file: its update and its sha256 are its name
      exports/update_000400/               weights in half precision, config.json, vocab.txt: what `Voice.load` takes

There is one resume file: the older one goes when the newer one has been read back and found whole, so whenever the
machine disappears, a whole one is there. The exports are small and stay, the newest few of them. One file and not many,
because Drive fails on folders of many files.

    Trainer(plan, dataset, run_dir, [Backup("drive")]).fit()
    restore_run("drive", run_dir)                   # in the next session; then fit() goes on

Copying happens in the background. The training waits for links to be made, and for nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch

from f5kit.errors import UserError
from f5kit.places import INSIDE, link, open_place
from f5kit.runs import RunFolder, file_of
from f5kit.weights import TensorFile, write_tensors

_TRIES = 5
_END = 900.0  # seconds to wait for the last copy when the run is done


class Backup:
    """A callback for `Trainer(callbacks=[...])`: copies every checkpoint that is saved to `place`.

    place: "drive" (Colab's, mounted when needed), a folder, or "hub:user/name" (a private repository). exports: how
    many of the small exports are kept. A copy that fails is told once and tried again; it never stops the training.
    Raises UserError at once for a place that cannot be written.
    """

    def __init__(self, place: str | Path, *, exports: int = 3, pause: float = 2.0):
        self.place, self.exports, self.pause = place, exports, pause
        self.blocked = 0.0
        """Seconds that the training has waited for this."""
        self.copied: list[int] = []
        """Updates that are there, read back and found whole."""
        self.trouble: str | None = None
        self._target = open_place(place)
        self._waiting: Path | None = None
        self._news = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None

    def __call__(self, event: dict, trainer=None) -> None:
        """Take note of a checkpoint; at the end of the run, wait for the last copy."""
        started = time.monotonic()
        if event["event"] == "start":
            self._target.name = trainer.run.path.resolve().name
            latest = trainer.run.latest() if trainer.run.checkpoints() else None
            if latest:  # the session before this one may not have got there
                self._stage(trainer.run, latest.path, only_newer=True)
        elif event["event"] == "save":
            self._stage(trainer.run, Path(event["path"]))
        self.blocked += time.monotonic() - started
        if event["event"] == "end" and not self.wait(_END):
            print(f"the last copy to {self.place} is not there yet ({self.trouble or 'it is on its way'})")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is to be copied. Returns whether all of it is there."""
        with self._news:
            self._news.wait_for(lambda: not self._busy and self._waiting is None, timeout)
            return not self._busy and self._waiting is None and self.trouble is None

    def _stage(self, run: RunFolder, checkpoint: Path, only_newer: bool = False) -> None:
        """Links to the checkpoint's files and copies of the run's, which rotation and the next update leave alone."""
        stage = Path(tempfile.mkdtemp(prefix=f".backup-{checkpoint.name}-", dir=run.path))
        folder = stage / "resume" / "checkpoints" / checkpoint.name
        folder.mkdir(parents=True)
        for file in checkpoint.iterdir():
            if INSIDE.fullmatch(f"checkpoints/{checkpoint.name}/{file.name}"):
                link(file, folder / file.name)
        for name in ("run.json", "best.json", "events.jsonl"):
            if (run.path / name).is_file():
                shutil.copyfile(run.path / name, stage / "resume" / name)
        if only_newer:
            (stage / "only_newer").touch()
        with self._news:
            older, self._waiting = self._waiting, stage
            self._news.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="backup")
                self._thread.start()
        if older:  # it waited for its turn, and is out of date
            shutil.rmtree(older, ignore_errors=True)

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting is not None)
                stage, self._waiting, self._busy = self._waiting, None, True
            try:
                self._copy(stage)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
                with self._news:
                    self._busy = False
                    self._news.notify_all()

    def _copy(self, stage: Path) -> None:
        update = int(next((stage / "resume" / "checkpoints").iterdir()).name.removeprefix("update_"))
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            if self._waiting is not None and attempt:  # a newer checkpoint is worth more than another try
                return
            try:
                if (stage / "only_newer").is_file() and (self._target.newest() or -1) >= update:
                    return
                if not (stage / "exports").is_dir():
                    _write_export(stage)
                self._target.put(stage, update, self.exports)
                self.copied.append(update)
                self.trouble = None
                return
            except Exception as error:
                said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}"
                if self.trouble is None:
                    print(f"the copy of update {update} to {self.place} failed ({said}); the training goes on")
                self.trouble = said


def _write_export(stage: Path) -> None:
    """The chosen weights in half precision, and what they mean, in exports/update_000400."""
    (checkpoint,) = (stage / "resume" / "checkpoints").iterdir()
    best = stage / "resume" / "best.json"
    chosen = json.loads(best.read_text(encoding="utf-8")) if best.is_file() else {}
    weights = chosen.get("weights", "ema") if chosen.get("checkpoint") == checkpoint.name else "ema"
    partial = stage / "exports.partial" / checkpoint.name
    partial.mkdir(parents=True, exist_ok=True)
    file = TensorFile(checkpoint / file_of(weights))
    tensors = {name: file[name] if name.endswith("inv_freq") else file[name].to(torch.float16) for name in file.keys()}
    write_tensors(partial / "model.safetensors", tensors)
    for name in ("config.json", "vocab.txt", "data.json"):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, partial / name)
    os.replace(partial.parent, stage / "exports")


def restore_run(place: str | Path, run_dir: str | Path) -> RunFolder | None:
    """Bring back the newest checkpoint of the run that `Backup` copied to `place`, unless it is here already.

    Returns the run, on which `Trainer(...).fit()` goes on, or None where there is no copy. What is damaged is passed
    over. Raises UserError when the place cannot be read.
    """
    run, target = RunFolder(run_dir), open_place(place)
    target.name = run.path.resolve().name
    there = target.newest()
    here = run.latest() if run.checkpoints() else None
    if there is None or (here and here.update >= there):
        return run if here else None
    run.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=run.path) as folder:
        update = target.fetch(Path(folder))
        if update is None:
            return run if here else None
        (checkpoint,) = (Path(folder) / "checkpoints").iterdir()
        place_of = run.path / "checkpoints" / checkpoint.name
        place_of.parent.mkdir(exist_ok=True)
        shutil.rmtree(place_of, ignore_errors=True)
        os.replace(checkpoint, place_of)
        for name in ("run.json", "best.json", "events.jsonl"):
            if (Path(folder) / name).is_file():
                os.replace(Path(folder) / name, run.path / name)
    if run.best and not (run.path / "checkpoints" / run.best["checkpoint"]).is_dir():  # only its export was copied
        (run.path / "best.json").unlink()
    return run


def restore_workspace(root: str | Path, inputs: str | Path = "/kaggle/input") -> list[str]:
    """Bring in what an earlier session left, where it is mounted as an input: on Kaggle, a saved version's output.

    Below `inputs` folders of `root`'s name are looked for. Of their data/, models/ and runs/ every folder is copied
    that is not in `root`, and every run whose newest checkpoint is newer than the one here. Returns what was copied.
    """
    root, copied = Path(root), []
    for old in sorted(Path(inputs).glob(f"**/{root.name}")):
        for folder in sorted(p for part in ("data", "models", "runs") for p in (old / part).glob("*") if p.is_dir()):
            name = folder.relative_to(old)
            here, there = RunFolder(root / name), RunFolder(folder)
            if here.path.is_dir():
                newest = there.latest() if name.parts[0] == "runs" and there.checkpoints() else None
                mine = here.latest() if newest and here.checkpoints() else None
                if newest is None or (mine and mine.update >= newest.update):
                    continue
            partial = (root / name).with_name(f".{name.name}.partial-{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(".*"))
            shutil.rmtree(root / name, ignore_errors=True)
            os.replace(partial, root / name)
            copied.append(name.as_posix())
    return copied
