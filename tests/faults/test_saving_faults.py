"""F1 kills while saving, F2 disks that fail, F3 bits that rot: the last whole checkpoint is never lost."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from small import losses, same, trainer, weights

from f5kit.errors import UserError
from f5kit.runs import RunFolder
from f5kit.weights import read_tensors


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the child does not get on"
        time.sleep(0.001)


def committed(run: Path) -> int:
    """The last checkpoint that a saving child says is done."""
    file = run / "committed"
    return int(file.read_text().split()[-1]) if file.is_file() and file.stat().st_size else 0


def outcome(run: Path) -> str:
    """After a kill: "survived", "lost" when what was done is gone, "silent" when a wrong one would be used."""
    newest = RunFolder(run).latest()
    if newest is None or newest.update < committed(run):
        return "lost" if committed(run) else "survived"
    values = read_tensors(newest.path / "model.safetensors")["a"]
    return "survived" if bool((values == newest.update).all()) else "silent"


def test_kills_at_random_instants_of_saving(tmp_path, zygote, report):
    rng, ends = random.Random(0), []
    for kill in range(100):
        before = committed(tmp_path)
        pid = zygote.start("save", run=tmp_path, first=before + 1)
        wait_until(lambda: committed(tmp_path) > before)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        assert zygote.kill(pid) == -9
        ends.append(outcome(tmp_path))
        assert kill == 0 or len(list((tmp_path / "checkpoints").glob("update_*"))) <= 5, "rotation goes on"
    report("F1", injected=100, survived=ends.count("survived"), silent=ends.count("silent"), where="saving")


def test_kills_at_every_phase_of_a_save(tmp_path, zygote, report):
    ends = []
    zygote.start("save", run=tmp_path, megabytes=1, count=4)
    assert zygote.end() == 0
    for phase in range(1, 200):
        first = committed(tmp_path) + 1
        zygote.start("save", run=tmp_path, megabytes=1, first=first, count=1, die_at=phase)
        if zygote.end() == 0:  # the save has fewer operations
            break
        ends.append(outcome(tmp_path))
    assert len(ends) >= 15, f"a save has only {len(ends)} phases?"
    report("F1", injected=len(ends), survived=ends.count("survived"), silent=ends.count("silent"), where="phases")


def test_kills_of_a_training_process(room, tmp_path, zygote, report):
    config = dict(updates=90, warmup_updates=9, save_every=2, keep_checkpoints=2)
    whole = trainer(room, tmp_path / "whole", **config).fit()
    run, rng, survived, kills = RunFolder(tmp_path / "killed"), random.Random(1), 0, 25
    for _ in range(kills):
        seen = len(run.events())
        pid = zygote.start("train", room=room, run=run.path, **config)
        wait_until(lambda: len(run.events()) > seen + rng.randint(3, 8))  # noqa: B023
        time.sleep(rng.uniform(0, 0.03))
        assert zygote.kill(pid) == -9
        reached = [e["update"] for e in run.events() if e["event"] == "update"][-1]
        newest = run.latest()
        survived += reached - (newest.update if newest else 0) <= config["save_every"] + 1
    zygote.start("train", room=room, run=run.path, **config)
    assert zygote.end() == 0
    equal = all(same(weights(whole, name), weights(run, name)) for name in ("model", "ema", "optimizer"))
    assert equal and losses(run) == losses(whole)
    report("F1", injected=kills, survived=survived, silent=int(not equal), where="training")


def test_a_save_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """A kill cannot show a missing flush, a power cut would: so the order of the calls is looked at."""
    from zygote import save

    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("rename", str(a), str(b))), replace(a, b)))
    save(str(tmp_path), megabytes=1, count=1)
    final = tmp_path / "checkpoints" / "update_000001"
    renamed = next(i for i, call in enumerate(done) if call[0] == "rename" and call[2] == str(final))
    partial = done[renamed][1]
    flushed = {call[1] for call in done[:renamed] if call[0] == "fsync"}
    for file in final.iterdir():  # each under its own name, or under the hidden one it was renamed from
        name = f"{partial}/{file.name}"
        hidden = {call[1] for call in done if call[0] == "rename" and call[2] == name}
        assert flushed & {name, *hidden}, f"{file.name} was not flushed"
    assert partial in flushed, "the folder's list of files was not flushed"
    assert ("fsync", str(final.parent)) in done[renamed:], "the rename was not flushed"
    hashed = [c for c in done[:renamed] if c[0] == "rename" and c[2].endswith("manifest.json")]
    assert hashed == [c for c in done[:renamed] if c[0] == "rename"][-1:], "the manifest comes last"


def test_disks_that_fail_while_saving(room, tmp_path, zygote, report):
    clean = trainer(room, tmp_path / "clean", updates=6, warmup_updates=1, save_every=2).fit()
    size = max(file.stat().st_size for file in clean.latest().path.iterdir())
    faults = [("full", i * size // 20 + 1) for i in range(20)]
    faults += [(error, operation) for error in ("EIO", "EROFS") for operation in range(1, 11)]
    survived = silent = 0
    for number, (fault, at) in enumerate(faults):
        run = RunFolder(tmp_path / str(number))
        zygote.start("train_with_bad_disk", room=room, run=run.path, fault=fault, at=at)
        ended = zygote.end()
        told = len((run.path / "told").read_text().splitlines()) if (run.path / "told").is_file() else 0
        whole = [c.update for c in run.checkpoints() if c.damage() is None]
        survived += ended == 0 and told == 1 and whole == [2, 6] and same(weights(run), weights(clean))
        silent += ended == 0 and told != 1
    report("F2", injected=len(faults), survived=survived, silent=silent, offsets="20 full, 10 EIO, 10 read-only")


def test_room_is_asked_for_before_a_save(room, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    with pytest.warns(UserWarning, match="training goes on"), pytest.raises(UserError, match="make room and run again"):
        trainer(room, tmp_path / "run", updates=2, warmup_updates=0).fit()
    events = RunFolder(tmp_path / "run").events()
    assert "are free" in next(e for e in events if e["event"] == "save_failed")["reason"]
    monkeypatch.undo()
    run = trainer(room, tmp_path / "run", updates=2, warmup_updates=0).fit()
    assert run.latest().update == 2


def test_damaged_checkpoints_are_refused(room, tmp_path, report):
    run = trainer(room, tmp_path / "run", updates=4, warmup_updates=1, save_every=2).fit()
    files = sorted(run.checkpoints()[-1].path.iterdir())
    rng, refused, injected = random.Random(0), 0, 0

    def check() -> bool:
        newest = run.latest()
        return run.checkpoints()[-1].damage() is not None and newest is not None and newest.update == 2

    for kind, count in (("flip", 100), ("cut", 30), ("missing", len(files))):
        for number in range(count):
            file = files[number % len(files)] if number < 2 * len(files) else rng.choices(
                files, [f.stat().st_size for f in files])[0]  # fmt: skip
            whole = file.read_bytes()
            spoilt = bytearray(whole)
            if kind == "flip":
                spoilt[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            file.unlink() if kind == "missing" else file.write_bytes(
                spoilt if kind == "flip" else whole[: rng.randrange(len(whole))])  # fmt: skip
            injected, refused = injected + 1, refused + check()
            file.write_bytes(whole)
    assert run.latest().update == 4
    report("F3", injected=injected, survived=refused, silent=injected - refused)


def test_a_damaged_checkpoint_is_set_aside_and_trained_again(room, tmp_path, capsys):
    config = dict(updates=4, warmup_updates=1, save_every=2)
    run = trainer(room, tmp_path / "run", **config).fit()
    expected = weights(run)
    (run.latest().path / "ema.safetensors").write_bytes(b"")
    trainer(room, tmp_path / "run", **config).fit()
    assert "damaged (ema.safetensors does not match" in capsys.readouterr().out
    assert (run.path / "checkpoints" / "damaged_update_000004").is_dir()
    assert same(weights(run), expected) and torch.isfinite(next(iter(expected.values()))).all()
