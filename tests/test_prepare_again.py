"""Preparing again: interrupted anywhere it continues, unchanged it is opened; nothing is half-made or done twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soundfile
import torch
from preparing import TEXT, folder_with, prepared, voice

from f5kit import cleaning, prepare
from f5kit.audio import log_mel, read_audio
from f5kit.errors import UserError
from f5kit.lock import RunLock
from f5kit.prepare import prepare_dataset

pytestmark = pytest.mark.usefixtures("one_thread")  # short clips are no work to share

GOOD = [f"a{n}|{TEXT}" for n in (1, 2, 3)]


def test_prepared_again_it_is_opened_and_changed_it_is_made_anew(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", GOOD)
    first = prepare_dataset(source, tmp_path / "out", progress=False)
    made = (tmp_path / "out" / "manifest.jsonl").stat().st_mtime_ns
    again = prepare_dataset(source, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "manifest.jsonl").stat().st_mtime_ns == made
    assert again.manifest_hash == first.manifest_hash
    # The same sound and text give the same manifest anywhere.
    assert prepare_dataset(source, tmp_path / "elsewhere", progress=False).manifest_hash == first.manifest_hash
    (source / "metadata.csv").write_text("\n".join([f"a1|{TEXT} Yes.", *GOOD[1:]]))
    changed = prepare_dataset(source, tmp_path / "out", progress=False)
    assert changed.manifest_hash != first.manifest_hash
    assert prepare_dataset(source, tmp_path / "out", max_seconds=9, progress=False).info != changed.info
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "in", "out"]


def test_a_dataset_that_lost_a_clip_is_made_again(tmp_path):
    source = folder_with(tmp_path / "in", GOOD)
    dataset = prepare_dataset(source, tmp_path / "out", progress=False)
    dataset.path(dataset.clips[0]).unlink()
    assert len(prepare_dataset(source, tmp_path / "out", progress=False).clips) == 3


def counting_clips(monkeypatch) -> list[str]:
    """The clips that are written from now on."""
    real, written = cleaning.write_audio, []

    def write(path, *args):
        written.append(Path(path).stem)
        return real(path, *args)

    monkeypatch.setattr(cleaning, "write_audio", write)
    return written


def test_only_what_is_new_or_changed_is_worked_on(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", [f"a{n}|{TEXT}" for n in range(1, 9)], clips=8)
    first = prepare_dataset(source, tmp_path / "out", progress=False)
    mels = {clip.id: first.mel(clip) for clip in first.clips}
    written = counting_clips(monkeypatch)
    soundfile.write(source / "wavs" / "a3.wav", voice(seed=33), 24_000)
    soundfile.write(source / "wavs" / "a9.wav", voice(seed=9), 24_000)
    (source / "wavs" / "a5.wav").unlink()
    os.utime(source / "wavs" / "a6.wav", ns=(1, 1))  # touched, and the same
    rows = [f"a{n}|{TEXT}" for n in (1, 2, 3, 4, 6, 7, 8, 9)]
    (source / "metadata.csv").write_text("\n".join([*rows[:6], "a8|Other words now.", rows[7]]))
    second = prepare_dataset(source, tmp_path / "out", progress=False)
    assert sorted(written) == ["a3", "a9"]
    assert [clip.id for clip in second.clips] == ["a1", "a2", "a3", "a4", "a6", "a7", "a8", "a9"]
    assert not (second.folder / "clips" / "a5.flac").exists()
    assert next(clip.text for clip in second.clips if clip.id == "a8") == "Other words now."
    for clip in second.clips:
        expected = log_mel(read_audio(second.path(clip)))
        torch.testing.assert_close(second.mel(clip), expected, atol=0.005, rtol=0)
        assert clip.id in ("a3", "a9") or torch.equal(second.mel(clip), mels[clip.id])


def test_a_clip_taken_out_by_the_user_stays_out(tmp_path):
    source = folder_with(tmp_path / "in", GOOD)
    dataset = prepare_dataset(source, tmp_path / "out", progress=False)
    (dataset.folder / "decisions.json").write_text('{"drop": ["a2"]}')
    for _ in range(2):  # and again, from a folder that was replaced
        dataset = prepare_dataset(source, tmp_path / "out", progress=False)
        assert [clip.id for clip in dataset.clips] == ["a1", "a3"]
        assert "taken out by you" in dataset.rows()[1]["reasons"][0]


def test_a_failed_preparation_leaves_the_old_dataset_and_goes_on_later(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", GOOD)
    first = prepare_dataset(source, tmp_path / "out", progress=False)
    real, calls = cleaning.write_audio, []

    def fails_at_the_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cleaning, "write_audio", fails_at_the_second)
        with pytest.raises(OSError, match="No space"):
            prepare_dataset(source, tmp_path / "out", loudness=-20, progress=False)
    assert prepare.load_dataset(tmp_path / "out").manifest_hash == first.manifest_hash
    written = counting_clips(monkeypatch)
    prepare_dataset(source, tmp_path / "out", loudness=-20, progress=False)
    assert written == ["a2", "a3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


SLOW = """
import time
from f5kit import cleaning, prepare
real = cleaning.write_audio
def slowly(*args):
    time.sleep(0.05)
    return real(*args)
cleaning.write_audio = slowly
prepare.prepare_dataset({source!r}, {out!r}, progress=False)
"""


def test_killed_again_and_again_it_continues(tmp_path, monkeypatch):
    clips = 40
    source = folder_with(tmp_path / "in", [f"a{n}|{TEXT} And {n}." for n in range(1, clips + 1)], clips=clips)
    whole = prepare_dataset(source, tmp_path / "at_once", progress=False)
    for kills in (8, 24):  # after so many clips
        child = subprocess.Popen([sys.executable, "-c", SLOW.format(source=str(source), out=str(tmp_path / "out"))])
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob(".out.partial/clips/a*.flac"))) < kills:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not (tmp_path / "out").exists()
    written = counting_clips(monkeypatch)
    dataset = prepare_dataset(source, tmp_path / "out", progress=False)
    assert 0 < len(written) < clips
    assert dataset.manifest_hash == whole.manifest_hash
    assert all(torch.equal(dataset.mel(a), whole.mel(b)) for a, b in zip(dataset.clips, whole.clips, strict=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["at_once", "in", "out"]


def test_a_file_of_features_cut_within_a_frame_is_read_and_never_grown(tmp_path):
    """As a kill leaves it while the next clip's mel is on its way to the disk."""
    source = folder_with(tmp_path / "in", GOOD)
    first = prepare_dataset(source, tmp_path / "out", progress=False)
    mels = [first.mel(clip) for clip in first.clips]
    (shard,) = (tmp_path / "out" / "features").glob("*/*.f16")
    with open(shard, "ab") as file:
        file.write(bytes(4096 - shard.stat().st_size % 4096 + 4096))
    assert shard.stat().st_size % 200  # not whole frames
    (source / "metadata.csv").write_text("\n".join([*GOOD, f"a4|{TEXT}"]))
    soundfile.write(source / "wavs" / "a4.wav", voice(seed=44), 24_000)
    second = prepare_dataset(source, tmp_path / "out", progress=False)
    assert all(torch.equal(second.mel(clip), mel) for clip, mel in zip(second.clips, mels, strict=False))
    assert second.mel(second.clips[3]).isfinite().all()


def test_two_at_a_time_are_refused(tmp_path):
    """Also where a dead process left its number, which another process has now."""
    source = folder_with(tmp_path / "in", GOOD)
    with RunLock(tmp_path / ".out.partial"):
        with pytest.raises(UserError, match=f"is being prepared by process {os.getpid()}"):
            prepare_dataset(source, tmp_path / "out", progress=False)
    (tmp_path / ".out.partial" / "run.lock").write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert len(prepare_dataset(source, tmp_path / "out", progress=False).clips) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"] and not (tmp_path / "out" / "run.lock").exists()


def test_processes_give_what_one_process_gives_and_a_crash_is_a_row(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", [f"a{n}|{TEXT} And {n}." for n in range(1, 13)], clips=12)
    one = prepare_dataset(source, tmp_path / "one", jobs=1, progress=False)
    two = prepare_dataset(source, tmp_path / "two", jobs=2, progress=False)
    assert one.manifest_hash == two.manifest_hash
    tasks = [cleaning.Task(f"t{n}", Suicidal() if n == 5 else source / "wavs" / f"a{n}.wav", f"a{n}", True)
             for n in range(1, 10)]  # fmt: skip
    results = list(cleaning.spread(tasks, tmp_path / "crash", cleaning.Options(), 2))
    assert sorted(result.id for result in results) == [f"t{n}" for n in range(1, 10)]
    problems = {result.id: result.clips[0].problem for result in results}
    assert "ends the process that reads it" in problems.pop("t5") and not any(problems.values())


class Suicidal:
    """Stands for a recording at which a decoder crashes."""

    def is_file(self):
        os.kill(os.getpid(), 9)


POOL = """
import os, time
from loky import get_reusable_executor
from f5kit.cleaning import _start_worker
print(get_reusable_executor(max_workers=1, initializer=_start_worker).submit(os.getpid).result(), flush=True)
time.sleep(60)
"""


def test_workers_end_with_a_killed_process():
    child = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True)
    worker = int(child.stdout.readline())
    child.kill()
    child.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{worker}")


def test_what_may_not_be_read_is_a_row_and_is_tried_again(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", GOOD)

    def guarded(path, *args):
        if str(path).endswith("a2.wav"):
            raise PermissionError(13, "Permission denied")
        return open(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(cleaning, "open", guarded, raising=False)
        rows, _ = prepared(source)
    assert [row["status"] for row in rows] == ["accepted", "rejected", "accepted"]
    assert rows[1]["reasons"] == ["wavs/a2.wav cannot be read (Permission denied); copy it again, or allow it"]
    assert [row["status"] for row in prepared(source)[0]] == ["accepted"] * 3


def test_folders_that_are_links_are_rows(tmp_path):
    source = folder_with(tmp_path / "in", GOOD)
    (source / "more").symlink_to(tmp_path)
    rows, _ = prepared(source)
    assert [row["status"] for row in rows] == ["accepted"] * 3 + ["rejected"]
    assert "more is a link to a folder" in rows[3]["reasons"][0]
