"""One writer for a folder: a lock that a second run meets at once and that a dead run leaves to the next.

The system's own file lock (flock) ends with its process, however that ended, so nothing can be stale. Some network
drives have no such lock; there the file's text decides: its holder counts as gone when its process is, or, on another
machine, when the file was not touched for ten minutes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from f5kit.errors import UserError

_TOUCH_EVERY = 30.0  # seconds
_GONE_AFTER = 600.0


class RunLock:
    """The lock of a folder, for the time of a with block. Entering raises UserError where another run holds it, which
    says what is `doing` there."""

    def __init__(self, folder: str | Path, doing: str = "trained"):
        self.path, self._doing = Path(folder) / "run.lock", doing
        self._touched = 0.0

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+", encoding="utf-8")
        try:
            taken = not self._lock()
        except OSError:  # no lock on this drive
            taken = self._holder_lives()
        if taken:
            self._file.close()
            told = f"{self.path.parent} is being {self._doing} by {self._holder_name()}"
            raise UserError(f"{told}: stop that run, or choose another folder")
        self._write({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        return self

    def __exit__(self, *_) -> None:
        self._write({})
        self._file.close()

    def touch(self) -> None:
        """Say that the holder lives; cheap enough for every update."""
        if time.monotonic() - self._touched > _TOUCH_EVERY:
            self._touched = time.monotonic()
            try:
                os.utime(self.path)
            except OSError:
                pass  # a drive that fails now fails the next save too, which is reported

    def _lock(self) -> bool:
        """Whether the lock is ours. Raises OSError where the drive knows no locks."""
        try:
            import fcntl
        except ImportError:  # Windows
            import msvcrt

            self._file.seek(1 << 20)  # a byte far behind the text, which others want to read
            try:
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)
            except OSError:
                return False
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write(self, holder: dict) -> None:
        try:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(holder) if holder else "")
            self._file.flush()
        except OSError:
            pass  # a full disk: the lock itself holds without its text

    def _holder(self) -> dict:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _holder_name(self) -> str:
        holder = self._holder()
        return f"process {holder['pid']} on {holder['host']}" if "pid" in holder else "another process"

    def _holder_lives(self) -> bool:
        holder = self._holder()
        if "pid" not in holder:
            return False
        if holder["host"] != socket.gethostname():
            return time.time() - self.path.stat().st_mtime < _GONE_AFTER
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # it lives and is another user's
        return True
