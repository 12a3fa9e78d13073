"""Where copies of a run go: a folder, Google Drive, a repository of the Hub. `backup.py` decides what and when.

What is put there is a folder with `resume/` (what a run goes on from) and `exports/update_000400/` (what speaks).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from f5kit.errors import UserError
from f5kit.push import Push, PushJob, hub_errors
from f5kit.repository import find_token
from f5kit.weights import sync

_RESUME = re.compile(r"resume-(\d{6,})-([0-9a-f]{16})\.tar")
INSIDE = re.compile(r"(run|best)\.json|events\.jsonl|checkpoints/update_\d{6,}/[A-Za-z0-9_][\w.-]*")
"""The names of the files of `resume/`."""
_BLOCK = 1 << 20


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
                shutil.copytree(stage / part, root / part, copy_function=lambda a, b: link(Path(a), Path(b)))
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
                if file.is_file() and INSIDE.fullmatch(name):
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


def link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # a file system without links
        shutil.copyfile(file, place)


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
        if not member.isreg() or not INSIDE.fullmatch(member.name):
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
