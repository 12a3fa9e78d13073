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

import contextlib
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from f5kit.checkpoint import RunFolder, file_of
from f5kit.errors import UserError
from f5kit.push import Push, PushJob, hub_errors
from f5kit.repository import find_token
from f5kit.weights import TensorFile, sync, write_tensors

_RESUME = re.compile(r"resume-(\d{6,})-([0-9a-f]{16})\.tar")
_INSIDE = re.compile(r"(run|best)\.json|events\.jsonl|checkpoints/update_\d{6,}/[A-Za-z0-9_][\w.-]*")
_BLOCK = 1 << 20
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
            if _INSIDE.fullmatch(f"checkpoints/{checkpoint.name}/{file.name}"):
                _link(file, folder / file.name)
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


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # a file system without links
        shutil.copyfile(file, place)


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


# ---- places


def open_place(place: str | Path) -> FolderPlace | HubPlace:
    """Where copies go. Raises UserError for a place that is not there or cannot be written."""
    if str(place).startswith("hub:"):
        return HubPlace(str(place).removeprefix("hub:"))
    return FolderPlace(mount_drive() / "f5kit" if str(place) == "drive" else Path(place))


def mount_drive() -> Path:
    """Colab's Google Drive, mounted: the folder MyDrive. Colab asks its user. Raises UserError elsewhere."""
    folder = Path("/content/drive/MyDrive")
    if folder.is_dir():
        return folder
    try:
        from google.colab import drive
    except ImportError:
        raise UserError("Google Drive can be mounted on Colab alone: name a folder, or 'hub:you/name'") from None
    try:
        drive.mount("/content/drive")
    except Exception as error:
        why = type(error).__name__
        raise UserError(f"Google Drive was not mounted ({why}): allow it, or name another place") from None
    return folder


class FolderPlace:
    """A folder, on a disk or behind a network."""

    def __init__(self, folder: Path):
        self.folder, self.name = folder, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}): name another place for copies") from None

    def newest(self) -> int | None:
        """The update of the newest resume file; its content is not read."""
        return max((int(match[1]) for _, match in self._resumes()), default=None)

    def put(self, stage: Path, update: int, exports: int) -> None:
        """Copy what is staged. What was there stays until the new copy has been read back."""
        folder = self.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".partial-*"):
            _discard(left)
        partial = folder / f".partial-resume-{update:06d}"
        written = _write_tar(stage / "resume", partial)
        if _sha256(partial) != written:
            raise UserError(f"{partial} is not what was written: its disk or its connection fails")
        os.replace(partial, folder / f"resume-{update:06d}-{written[:16]}.tar")
        for file, match in self._resumes():
            if int(match[1]) != update or match[2] != written[:16]:
                _discard(file)
        (export,) = (stage / "exports").iterdir()
        self._put_export(export, folder / "exports", exports)

    def _put_export(self, export: Path, folder: Path, keep: int) -> None:
        folder.mkdir(exist_ok=True)
        partial = folder.parent / f".partial-{export.name}"
        shutil.copytree(export, partial, dirs_exist_ok=True)
        for file in export.iterdir():
            if _sha256(file) != _sha256(partial / file.name):
                raise UserError(f"{partial / file.name} is not what was written: its disk or its connection fails")
        shutil.rmtree(folder / export.name, ignore_errors=True)
        os.replace(partial, folder / export.name)
        for old in sorted(folder.glob("update_*"))[:-keep]:
            _discard(old)

    def fetch(self, folder: Path) -> int | None:
        """Unpack the newest whole resume file into a folder; returns its update, None when there is none."""
        for file, match in sorted(self._resumes(), key=lambda pair: int(pair[1][1]), reverse=True):
            if _sha256(file).startswith(match[2]):
                unpack(file, folder)
                return int(match[1])
            print(f"{file} is damaged; looking for an older one")
        return None

    def _resumes(self) -> list[tuple[Path, re.Match]]:
        there = (self.folder / self.name).iterdir() if (self.folder / self.name).is_dir() else []
        return [(file, match) for file in there if (match := _RESUME.fullmatch(file.name))]


class HubPlace:
    """A private repository of the Hub. A copy is one commit, which also takes out the one before."""

    def __init__(self, repo_id: str):
        if repo_id.count("/") != 1:
            raise UserError(f"'hub:{repo_id}' names no repository: write it as in 'hub:you/my-runs'")
        self.repo_id, self.name, self._token = repo_id, "", find_token()
        if not self._token:
            raise UserError(f"copies to {repo_id} need a token that may write: give it as the secret HF_TOKEN")

    def newest(self) -> int | None:
        found = [re.fullmatch(rf"{re.escape(self.name)}/resume/checkpoints/update_(\d+)/manifest\.json", n)
                 for n in self._list()]  # fmt: skip
        return max((int(match[1]) for match in found if match), default=None)

    def put(self, stage: Path, update: int, exports: int) -> None:
        """Push what is staged: the files themselves, of which the Hub keeps one copy however often they come."""
        root = stage / "hub" / self.name
        if not root.is_dir():
            root.mkdir(parents=True)
            for part in ("resume", "exports"):
                shutil.copytree(stage / part, root / part, copy_function=lambda a, b: _link(Path(a), Path(b)))
        files = sorted(p.relative_to(stage / "hub").as_posix() for p in root.rglob("*") if p.is_file())
        kept = {name.split("/")[2] for name in self._list() if name.startswith(f"{self.name}/exports/")}
        old = sorted(kept - {f"update_{update:06d}"}, reverse=True)[max(exports - 1, 0) :]
        stale = [f"{self.name}/resume/*", *(f"{self.name}/exports/{name}/*" for name in old)]
        job = PushJob(self.repo_id, str(stage / "hub"), files, f"{self.name}: update {update}", True, stale)
        Push(job, self._token).wait()

    def fetch(self, folder: Path) -> int | None:
        from huggingface_hub import snapshot_download

        update = self.newest()
        if update is None:
            return None
        with tempfile.TemporaryDirectory() as place, hub_errors(f"the Hub did not give {self.repo_id}", "try again"):
            wanted = f"{self.name}/resume/*"
            snapshot_download(self.repo_id, token=self._token, allow_patterns=[wanted], local_dir=place)
            for file in sorted((Path(place) / self.name / "resume").rglob("*")):
                name = file.relative_to(Path(place) / self.name / "resume").as_posix()
                if file.is_file() and _INSIDE.fullmatch(name):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(file, folder / name)
        return update

    def _list(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        with hub_errors(f"the Hub did not list {self.repo_id}", "check the token and the connection"):
            try:
                info = HfApi(token=self._token).model_info(self.repo_id, timeout=30)
            except RepositoryNotFoundError:
                return []  # the first push makes it
        return [file.rfilename for file in info.siblings or []]


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


# ---- archives


def _write_tar(folder: Path, target: Path) -> str:
    """All files of a folder in one uncompressed archive, flushed to the disk. Returns its sha256 as it was written."""
    with open(target, "wb") as raw:
        hashing = _Hashing(raw)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK) as archive:
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                archive.add(file, file.relative_to(folder).as_posix(), recursive=False)
        raw.flush()
        os.fsync(raw.fileno())
    return hashing.digest.hexdigest()


class _Hashing:
    """A file that is written to, and the hash of what went through."""

    def __init__(self, file):
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


def unpack(archive: str | Path, folder: Path) -> None:
    """Unpack a resume file. Only regular files with the names of a run are taken; UserError for anything else."""
    room = Path(archive).stat().st_size
    with tarfile.open(archive, "r:") as file:
        for member in _members(file, archive):
            room -= member.size
            if room < 0:
                raise UserError(f"{archive} promises more than it holds: it is damaged or not from f5kit")
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.extractfile(member) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, _BLOCK)
            sync(target)


def _members(file: tarfile.TarFile, archive: str | Path) -> Iterator[tarfile.TarInfo]:
    for member in file:
        if not member.isreg() or not _INSIDE.fullmatch(member.name):
            raise UserError(f"{archive} holds {member.name[:60]!r}, which is no file of a run: it is not from f5kit")
        yield member


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _discard(path: Path) -> None:
    """Remove a file or folder; emptied first, because Drive keeps what is removed in a bin that counts."""
    with contextlib.suppress(OSError):
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            os.truncate(file, 0)
            file.unlink()
        if path.is_dir():
            shutil.rmtree(path)
