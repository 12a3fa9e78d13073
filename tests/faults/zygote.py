"""A process that has everything imported and forks a child for each task, so that a hundred can be killed in a minute.

    python zygote.py        reads lines of JSON, {"task": "train", "room": "...", "run": "...", ...}; for each it
                            forks, prints the child's pid, waits for its end and prints its exit status
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent


class Zygote:
    """The parent's side."""

    _pid = 0

    def __enter__(self) -> Zygote:
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-W", "ignore", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_) -> None:
        if self._pid:
            self.kill(self._pid)
        self._process.stdin.close()
        self._process.wait(30)

    def start(self, task: str, **about) -> int:
        """Start a task. Returns the child's pid."""
        if self._pid:  # a test failed before its child's end
            self.kill(self._pid)
        print(json.dumps({"task": task, **{k: str(v) if isinstance(v, Path) else v for k, v in about.items()}}),
              file=self._process.stdin, flush=True)  # fmt: skip
        self._pid = int(self._process.stdout.readline())
        return self._pid

    def end(self) -> int:
        """Wait for the child. Returns its exit status, negative for a signal."""
        status, self._pid = int(self._process.stdout.readline()), 0
        return status

    def kill(self, pid: int, number: int = signal.SIGKILL) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return self.end()


# ---- tasks, in the child


def save(run: str, megabytes: int = 8, first: int = 1, count: int = 10**6, die_at: int = 0) -> None:
    """Save checkpoints one after the other, each full of its own number; note in `committed` which were done.

    `die_at` > 0: SIGKILL at that operation (making a folder, writing tensors, flushing, renaming, removing).
    """
    import torch
    from small import SPECK

    from f5kit.checkpoint import fresh_model
    from f5kit.runs import RunFolder
    from f5kit.text import Tokenizer, english_vocab

    folder, model = RunFolder(run), fresh_model(SPECK, Tokenizer(english_vocab()))
    if die_at:
        at_operation(die_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    for update in range(first, first + count):
        tensors = {"model": {"a": torch.full((megabytes << 18,), float(update))}}
        folder.save(update, tensors, model, {"update": update})
        folder.rotate(3)
        with open(f"{run}/committed", "a") as file:
            file.write(f"{update}\n")


def at_operation(number: int, act) -> None:
    """Call act() before that operation on the disk, counted from now."""
    import safetensors.torch

    left = [number]

    def counted(function):
        def before(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                act()
            return function(*args, **kwargs)

        return before

    for module, name in (
        (os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (safetensors.torch, "save_file"),
    ):  # fmt: skip
        setattr(module, name, counted(getattr(module, name)))


def train(room: str, run: str, clock_jumps: bool = False, max_minutes: float | None = None, **config) -> None:
    """Train; with `clock_jumps` the time of day leaps back and forth by days."""
    from small import trainer

    if clock_jumps:
        now, calls = time.time, [0]

        def leaping() -> float:
            calls[0] += 1
            return now() + (86_400 * 3 if calls[0] % 2 else -86_400 * 3)

        time.time = leaping
    trainer(Path(room), Path(run), max_minutes=max_minutes, **config).fit()


def train_with_bad_disk(room: str, run: str, fault: str, at: int) -> None:
    """Six updates with a save at every second; the disk fails while the second save is under way.

    fault "full": files end after `at` bytes (a real limit of the system); "EIO" and "EROFS": that error at operation
    `at` of the save. The disk is well again after the save has failed.
    """
    from small import trainer

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def disk(event, trainer) -> None:
        if event["event"] == "update" and event["update"] == 4:
            if fault == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
            else:
                number = getattr(errno, fault)
                at_operation(at + 2, lambda: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        if event["event"] == "save_failed":
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            newest = trainer.run.latest()
            assert newest.update == 2, "the former checkpoint was lost"
            with open(trainer.run.path / "told", "a") as file:  # events.jsonl may have met the same disk
                file.write(event["reason"] + "\n")

    trainer(Path(room), Path(run), disk, updates=6, warmup_updates=1, save_every=2).fit()


def main() -> None:
    import small  # noqa: F401
    import torch

    import f5kit.trainer  # noqa: F401  imported once, for all children

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        about = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                globals()[about.pop("task")](**about)
            except KeyboardInterrupt:
                os._exit(130)
            except SystemExit as ended:
                os._exit(ended.code)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
