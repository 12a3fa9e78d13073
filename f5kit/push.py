"""Files on their way to the Hub: one commit, pushed by a process of its own, again and again until it is there.

A process, because the Hub's client waits without end for an answer that does not come, and nothing within a program can
stop it there; because a training shares no lock with it; and because it may be killed at any time: what was uploaded
stays uploaded, a revision appears by one commit or not at all, and the next attempt goes on from there.

The token goes to that process by a pipe: command lines and environments can be read by others.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from f5kit.errors import UserError

PATIENCE = 60.0  # seconds that the Hub may be silent before a request is given up and made again
TRIES = 6  # of one process, with growing pauses
STARTS = 5  # of processes, when one is killed or hangs
_START = 300.0  # seconds for a busy machine to start that process
_SLOWEST = 50_000  # bytes a second: an upload that is slower than this hangs
_LATER = {408, 409, 412, 425, 429, 500, 502, 503, 504}  # statuses that pass

_DONE, _REFUSED, _IN_VAIN = 0, 2, 3  # what the pushing process ends with


@dataclass(frozen=True)
class PushJob:
    """What is to be in the repository."""

    repo_id: str
    """"user/name"; made where it is not there."""
    folder: str
    """Where the files lie."""
    files: Sequence[str]
    """Their paths in the folder, and in the repository."""
    message: str
    """Of the commit."""
    private: bool = True
    """Refuse a repository that is public."""
    replace: Sequence[str] = ()
    """Patterns: what is in the repository, matches one, and is not in `files`, goes by the same commit."""

    @property
    def bytes(self) -> int:
        return sum((Path(self.folder) / name).stat().st_size for name in self.files)


class Push:
    """A job on its way, in the background. `wait()` for its address; dropping the object does not stop it."""

    def __init__(self, job: PushJob, token: str, *, patience: float = PATIENCE, pause: float = 1.0):
        self.job, self.patience, self.pause = job, patience, pause
        self.pid: int | None = None
        """Of the process that is pushing now."""
        self.starts = 0
        self.url: str | None = None
        self.trouble: str | None = None
        """What went wrong for good, in a sentence."""
        self._process: subprocess.Popen | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(token,), daemon=True, name="push to the Hub")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> str | None:
        """The repository's address; None when the time is up before. Raises UserError when the push has failed."""
        self._thread.join(timeout)
        if self.trouble:
            raise UserError(self.trouble)
        return self.url

    def cancel(self) -> None:
        """Stop. The repository keeps the revision that it has."""
        self._cancelled.set()
        if self._process:
            self._process.kill()
        self._thread.join()

    def _work(self, token: str) -> None:
        limit = _START
        with contextlib.suppress(OSError):  # a file that is gone is told by the process itself
            limit = _START + TRIES * 2 * self.patience + self.job.bytes / _SLOWEST
        order = json.dumps({"job": asdict(self.job), "patience": self.patience, "pause": self.pause, "token": token})
        said = "its process was killed"
        try:
            while self.starts < STARTS and not self._cancelled.is_set():
                if self.starts:
                    self._cancelled.wait(self.pause * 2**self.starts)
                self.starts += 1
                code, told = self._run(order, limit)
                if code == _DONE:
                    self.url = told["url"]
                    return
                said = told.get("trouble", "its process was killed")
                if code == _REFUSED:
                    self.trouble = said
                    return
        except Exception as error:  # a thread's exception would be lost
            said = type(error).__name__
        self.trouble = _not_taken(self.job, said)

    def _run(self, order: str, limit: float) -> tuple[int, dict]:
        """One process from start to end: its code and what it told."""
        package = Path(__file__).resolve().parents[1]  # where Python looks for modules: no folder of downloads
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "f5kit.push"], cwd=package, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.pid = self._process.pid
        if self._cancelled.is_set():
            self._process.kill()
        try:
            told, _ = self._process.communicate(order, timeout=limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return _IN_VAIN, {"trouble": f"no end in {limit:.0f} s"}
        try:
            return self._process.returncode, json.loads(told.splitlines()[-1])
        except (ValueError, IndexError):
            return _IN_VAIN, {}


@contextmanager
def hub_errors(trouble: str, remedy: str) -> Iterator[None]:
    """Errors of the Hub and the way to it as one sentence, without their text: it can quote what was sent."""
    try:
        yield
    except Exception as error:
        what = hub_trouble(error)
        if what is None:
            raise
        raise UserError(_sentence(trouble, what, remedy)) from None


def _sentence(trouble: str, what: str, remedy: str) -> str:
    if what.endswith((" 401", " 403")):
        remedy = f"give a token that may do this (secret HF_TOKEN); {remedy}"
    return f"{trouble} ({what}): {remedy}"


def hub_trouble(error: Exception) -> str | None:
    """The error's name and status, as in "HfHubHTTPError 403"; None for an error that is not of the Hub."""
    # By the package's name, because huggingface_hub has changed the library it speaks HTTP with.
    known = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
    if not any(kind.__module__.startswith(known) for kind in type(error).__mro__):
        return None
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"{type(error).__name__} {status}" if status else type(error).__name__


def git_hash(path: str | Path) -> str:
    """The name that git gives a file's content."""
    data = Path(path).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


# ---- in the process that pushes


def push_once(job: PushJob, token: str) -> str:
    """Push a job by one commit and compare what is there with what was to be; returns the address.

    Not by `upload_folder`, which cuts what it finds large into several commits: between two of them the repository
    would hold a half of either.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, folder = HfApi(token=token), Path(job.folder)
    url = api.create_repo(job.repo_id, private=job.private, exist_ok=True)
    info = api.model_info(job.repo_id)
    # `exist_ok` also accepts a repository that is there and public.
    if job.private and not info.private:
        raise UserError(f"{job.repo_id} is public: make it private, name another, or say private=False")
    there = [file.rfilename for file in info.siblings or []]
    stale = [name for name in there if name not in job.files and any(fnmatch.fnmatch(name, p) for p in job.replace)]
    operations = [CommitOperationAdd(name, str(folder / name)) for name in job.files]
    operations += [CommitOperationDelete(name) for name in stale]
    commit = api.create_commit(job.repo_id, operations, commit_message=job.message, parent_commit=info.sha)
    pushed = {file.path: file for file in api.list_repo_tree(job.repo_id, recursive=True, revision=commit.oid)}
    for name in job.files:
        if name not in pushed or not _same(folder / name, pushed[name]):
            raise UserError(f"{job.repo_id} lacks {name} after the push, or holds another one: run this again")
    return str(url)


def _same(path: Path, told) -> bool:
    """Whether the Hub's listing tells of this very content."""
    if not told.lfs:
        return told.blob_id == git_hash(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return told.lfs.sha256 == digest.hexdigest()


def _give_up_on_silence(patience: float) -> None:
    """Let requests of this process end when the Hub is silent: by itself the client waits without end."""
    from huggingface_hub import get_session

    session = get_session()
    if hasattr(session, "timeout"):  # before version 1 there is no such setting, and the other process keeps the time
        session.timeout = patience


def _passes(error: Exception) -> bool:
    """Whether it can be expected to go away: a broken connection, a busy server, and no refusal or fault of ours."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in _LATER if status else bool(hub_trouble(error)) or isinstance(error, OSError)


def _not_taken(job: PushJob, what: str) -> str:
    return _sentence(f"the Hub did not take {job.repo_id}", what, f"all of it is whole in {job.folder}: run this again")


def _answer(code: int, **told) -> int:
    print(json.dumps(told), flush=True)
    return code


def main() -> int:
    """Read an order from standard input, push, and print what became of it."""
    order = json.loads(sys.stdin.read())
    job = PushJob(**order["job"])
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(5)  # whoever trains comes first
    trouble = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(min(order["pause"] * 2 ** (attempt - 1), 60))
        try:
            _give_up_on_silence(order["patience"])
            return _answer(_DONE, url=push_once(job, order["token"]))
        except UserError as error:
            return _answer(_REFUSED, trouble=str(error))
        except Exception as error:
            trouble = hub_trouble(error) or type(error).__name__
            if not _passes(error):
                return _answer(_REFUSED, trouble=_not_taken(job, trouble))
    return _answer(_IN_VAIN, trouble=trouble)


if __name__ == "__main__":
    sys.exit(main())
