"""F11: a Hub that refuses, breaks off, goes silent, or whose pusher is killed. No revision is ever a half of one.

The Hub is `tests/hub_server.py` behind real HTTP; huggingface_hub is the library as it is, led there by HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from hub_server import serve  # noqa: E402

from f5kit.errors import UserError  # noqa: E402
from f5kit.push import Push, PushJob  # noqa: E402

TOKEN = "hf_" + "faultyToken" * 3
# Every request that a push makes, in their order.
STAGES = ["POST /api/repos", "GET /api/models/you/voice", "/preupload/", "/lfs/", "PUT /stored", "/commit/", "/tree/"]
KINDS = [429, 500, "reset", "lost", "stall", "kill"]
PATIENCE, PAUSE = 4.0, 0.1
NAMES = ["README.md", "config.json", "model.safetensors", "vocab.txt"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def write_voice(folder: Path, version: int) -> dict[str, str]:
    """The files of one version of a voice, all different from those of another, and their hashes."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / name).write_bytes(f"{name} of version {version}\n".encode() * 5000)
    return hashes({name: (folder / name).read_bytes() for name in NAMES})


def hashes(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def push(folder: Path) -> Push:
    return Push(PushJob("you/voice", str(folder), NAMES, "Publish the voice"), TOKEN, patience=PATIENCE, pause=PAUSE)


def halves(hub, versions: list[dict[str, str]]) -> int:
    """Revisions that are no whole version (the first is empty: it comes with the repository)."""
    repository = hub.repositories["you/voice"]
    return sum(hashes(files) not in versions for _, files in repository.revisions[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_request(kind, hub, tmp_path, report):
    versions = [write_voice(tmp_path / "voice", 0)]
    faults = [hub.fail(stage, kind) for stage in STAGES]
    if kind == "kill":
        pushes, killed = [], []

        def victim():
            killed.append(pushes[-1].pid)
            os.kill(pushes[-1].pid, signal.SIGKILL)

        hub.victim = victim
        pushes.append(push(tmp_path / "voice"))
        for _ in range(len(STAGES)):  # a push starts its process a few times; after that a reader runs the cell again
            try:
                pushes[-1].wait()
                break
            except UserError as error:
                assert "run this again" in str(error)
                pushes.append(push(tmp_path / "voice"))
        assert len(set(killed)) == len(STAGES)
    else:
        assert push(tmp_path / "voice").wait() == f"{hub.endpoint}/you/voice"
    assert all(fault.met == 1 for fault in faults), faults
    repository = hub.repositories["you/voice"]
    assert hashes(repository.files) == versions[0] and repository.private
    assert halves(hub, versions) == 0
    assert len(repository.revisions) == 2  # a commit whose answer was lost is not made twice
    report("F11", injected=len(faults), survived=len(faults), every_request=kind)


def test_a_push_killed_at_any_time_leaves_the_older_version(hub, tmp_path, report):
    old = write_voice(tmp_path / "voice", 0)
    push(tmp_path / "voice").wait()
    new, survived, injected = write_voice(tmp_path / "voice", 1), 0, 0
    for stage in ("/preupload/", "PUT /stored", "/commit/"):
        job = push(tmp_path / "voice")
        fault = hub.fail(stage, "stall")
        while not fault.met and not job.done:
            job.wait(0.02)
        job.cancel()
        injected += 1
        survived += hashes(hub.repositories["you/voice"].files) == old
    assert survived == injected
    stored = [path for method, path in hub.requests if method == "PUT"]
    assert push(tmp_path / "voice").wait()
    assert hashes(hub.repositories["you/voice"].files) == new and halves(hub, [old, new]) == 0
    again = [path for method, path in hub.requests if method == "PUT"][len(stored) :]
    assert not again  # what was uploaded before the kill was not uploaded again
    report("F11", injected=injected, survived=survived, where="a push killed")


def test_a_refusal_is_told_and_not_repeated(hub, tmp_path):
    write_voice(tmp_path / "voice", 0)
    hub.refuse["/commit/"] = 403
    job = push(tmp_path / "voice")
    with pytest.raises(UserError, match=r"did not take you/voice \(.* 403\): give a token that may do this"):
        job.wait()
    assert job.starts == 1 and len(hub.repositories["you/voice"].revisions) == 1
    assert TOKEN not in str(job.trouble)
