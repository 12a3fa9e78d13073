"""F12: two runs on one folder, stale locks, signals, time limits, clocks that jump."""

from __future__ import annotations

import errno
import json
import os
import signal
import time

import pytest
from small import losses, same, trainer, weights
from test_saving_faults import wait_until

from f5kit.errors import UserError
from f5kit.interrupts import Interrupts
from f5kit.lock import RunLock
from f5kit.runs import RunFolder

LONG = dict(updates=100_000, warmup_updates=9, save_every=50, keep_checkpoints=1)


@pytest.fixture
def busy(room, tmp_path, zygote):
    """A run in another process, under way: (run, pid). The test ends it."""
    run = RunFolder(tmp_path / "run")
    pid = zygote.start("train", room=room, run=run.path, **LONG)
    wait_until(lambda: any(e["event"] == "update" for e in run.events()))
    return run, pid


def test_a_second_run_is_refused_and_a_stale_lock_is_not_in_the_way(busy, room, zygote, report):
    run, pid = busy
    second = trainer(room, run.path, **LONG)
    second._join_processes()  # accelerate is imported once
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"is being trained by process {pid} on .*stop that run, or choose another"):
        second.fit()
    seconds = time.monotonic() - started
    before = len(run.events())
    assert seconds < 1
    assert zygote.kill(pid) == -9 and (run.path / "run.lock").read_text(), "the dead run's lock is still written there"
    resumed = trainer(room, run.path, lambda event, t: event["event"] == "update" and os.kill(os.getpid(), 15), **LONG)
    with pytest.raises(SystemExit):
        resumed.fit()
    assert len(run.events()) > before and (run.path / "run.lock").read_text() == ""
    report("F12", injected=2, survived=2, refused_after=f"{seconds:.2f}s", where="two runs, stale lock")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leads_to_a_checkpoint(busy, zygote, report, number, code):
    run, pid = busy
    started = time.monotonic()
    assert zygote.kill(pid, number) == code
    seconds = time.monotonic() - started
    reached = [e["update"] for e in run.events() if e["event"] == "update"][-1]
    assert run.latest().update == reached and run.events()[-1]["reason"] == number.name and seconds < 20
    report("F12", injected=1, survived=1, signal=number.name, saved_after=f"{seconds:.2f}s")


def test_a_time_limit_leads_to_a_checkpoint_and_the_run_goes_on_later(room, tmp_path, report):
    config = dict(updates=12, warmup_updates=1)
    whole = trainer(room, tmp_path / "whole", **config).fit()

    def slow(event, trainer):
        time.sleep(0.7 if event["event"] == "update" else 0)

    limited = trainer(room, tmp_path / "run", slow, max_minutes=0.1, **config)
    started = time.monotonic()
    run = limited.fit()
    assert 0 < run.latest().update < 12 and run.events()[-1]["reason"] == "time"
    seconds = time.monotonic() - started
    trainer(room, tmp_path / "run", **config).fit()
    assert same(weights(run), weights(whole)) and losses(run) == losses(whole)
    report("F12", injected=1, survived=1, where="time limit", ended_after=f"{seconds:.1f}s")


def test_the_limit_leaves_time_for_a_save():
    limit = Interrupts(max_minutes=1)
    assert limit.reason(margin=30) is None and limit.reason(margin=61) == "time"


def test_a_clock_that_jumps(room, tmp_path, zygote, report):
    config = dict(updates=12, warmup_updates=1, save_every=3)
    zygote.start("train", room=room, run=tmp_path / "jumps", clock_jumps=True, max_minutes=30, **config)
    assert zygote.end() == 0
    run = RunFolder(tmp_path / "jumps")
    stamps = [e["time"] for e in run.events()]
    assert max(abs(a - b) for a, b in zip(stamps[1:], stamps[:-1], strict=True)) > 86_400, "it did jump"
    assert all(0 <= e["seconds"] < 60 for e in run.events() if e["event"] == "update")
    whole = trainer(room, tmp_path / "whole", **config).fit()
    equal = run.latest().update == 12 and same(weights(run), weights(whole))
    report("F12", injected=1, survived=int(equal), where="clock")


def test_where_the_drive_has_no_locks_the_text_decides(tmp_path, monkeypatch):
    import fcntl
    import socket

    def none(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    with RunLock(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()}"), RunLock(tmp_path):
        pass
    gone = {"pid": 2**22 - 3, "host": socket.gethostname()}
    elsewhere = {"pid": 1, "host": "another"}
    for holder, age, taken in ((gone, 0, False), (elsewhere, 0, True), (elsewhere, 3600, False)):
        (tmp_path / "run.lock").write_text(json.dumps(holder))
        os.utime(tmp_path / "run.lock", (time.time() - age,) * 2)
        if taken:
            with pytest.raises(UserError, match="on another"), RunLock(tmp_path):
                pass
        else:
            with RunLock(tmp_path):
                pass
