"""f5kit.backup: copies to a folder and to a Hub, the training goes on meanwhile, and a broken copy costs nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_server import serve

from f5kit import backup as backup_module
from f5kit import places
from f5kit.backup import Backup, restore_run, restore_workspace
from f5kit.checkpoint import RunFolder, load_model
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.places import FolderPlace, open_place
from f5kit.plan import plan_run
from f5kit.trainer import Trainer
from f5kit.weights import read_tensors

TOKEN = "hf_" + "copyToken" * 4


class Cut(Exception):
    """The session ends."""


def planned(dataset):
    """Four updates, a checkpoint at the second."""
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=4, update_frames=600, micro_frames=600)
    return replace(plan, train=replace(plan.train, save_every=2))


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run that was cut off after its third update, and a copy of its checkpoint in a folder."""

    def cut(event, trainer):
        if event["event"] == "update" and event["update"] == 3:
            raise Cut

    folder = tmp_path_factory.mktemp("trained")
    copies = Backup(folder / "copies")
    trainer = Trainer(planned(dataset), dataset, folder / "runs" / "my_voice", [copies, cut])
    with pytest.raises(Cut):
        trainer.fit()
    assert copies.wait(300)
    return trainer.run, folder / "copies", copies


class Speaker:
    """What a callback is given: the run."""

    def __init__(self, run: RunFolder):
        self.run = run


def save(copies: Backup, run: RunFolder, update: int | None = None) -> None:
    copies({"event": "start"}, Speaker(run))
    copies({"event": "save", "path": str(run.latest().path)}, Speaker(run))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_is_copied_and_comes_back(trained, dataset, tmp_path):
    run, place, copies = trained
    assert copies.copied == [2] and copies.trouble is None
    (resume,) = (place / "my_voice").glob("resume-*.tar")
    assert resume.name.startswith("resume-000002-")
    assert not [p for p in run.path.iterdir() if p.name.startswith(".backup")]
    restored = restore_run(place, tmp_path / "my_voice")
    assert contents(restored.path / "checkpoints") == contents(run.path / "checkpoints")
    assert restored.latest().update == 2 and restored.best == run.best
    assert restored.info == run.info


def test_exports_are_small_and_speakable(trained):
    run, place, _ = trained
    folder = place / "my_voice" / "exports" / "update_000002"
    assert sorted(contents(folder)) == ["config.json", "data.json", "model.safetensors", "vocab.txt"]
    chosen = load_model(run.path)
    for name, tensor in load_model(folder).state_dict().items():
        torch.testing.assert_close(tensor, chosen.state_dict()[name], atol=1e-3, rtol=1e-3)
    assert read_tensors(folder / "model.safetensors")["transformer.proj_out.weight"].dtype == torch.float16


def test_a_restored_run_goes_on_as_if_it_had_never_stopped(trained, dataset, tmp_path):
    _, place, _ = trained
    whole = Trainer(planned(dataset), dataset, tmp_path / "whole").fit()
    where = tmp_path / "runs" / "my_voice"
    restore_run(place, where)
    copies = Backup(tmp_path / "copies")
    Trainer(planned(dataset), dataset, where, [copies]).fit()
    expected = read_tensors(whole.latest().path / "model.safetensors")
    found = read_tensors(RunFolder(where).latest().path / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    assert copies.copied[-1] == 4  # the checkpoint it started from was copied too, unless a newer one overtook it


def test_one_resume_file_and_the_newest_exports_stay(trained, tmp_path):
    run = RunFolder(shutil.copytree(trained[0].path, tmp_path / "my_voice"))
    copies = Backup(tmp_path / "copies", exports=2)
    for update in (3, 4, 5):
        run.latest().path.rename(run.path / "checkpoints" / f"update_{update:06d}")
        save(copies, run)
        assert copies.wait(60)
    there = tmp_path / "copies" / "my_voice"
    assert [p.name[:13] for p in there.glob("resume-*")] == ["resume-000005"]
    assert sorted(p.name for p in (there / "exports").iterdir()) == ["update_000004", "update_000005"]


def test_what_is_here_already_is_not_fetched(trained, tmp_path):
    run, place, _ = trained
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "my_voice"))
    before = {p: p.stat().st_mtime_ns for p in copy.path.rglob("*")}
    assert restore_run(place, copy.path).latest().update == 2
    assert {p: p.stat().st_mtime_ns for p in copy.path.rglob("*")} == before
    assert restore_run(place, tmp_path / "another") is None


def test_a_copy_that_breaks_off_leaves_the_older_one(trained, tmp_path, monkeypatch):
    """The write fails in the middle, as when Drive disconnects, at ten places of the file."""
    run = RunFolder(shutil.copytree(trained[0].path, tmp_path / "my_voice"))
    place = tmp_path / "copies"
    copies = Backup(place, pause=0.01)
    save(copies, run)
    assert copies.wait(60)
    before = contents(place)
    size = next((place / "my_voice").glob("resume-*")).stat().st_size
    run.latest().path.rename(run.path / "checkpoints" / "update_000007")
    original, survived = places._Hashing.write, 0
    for tenth in range(10):
        written = [0]

        def write(self, data, limit=size * tenth // 10, written=written):
            written[0] += len(data)
            if written[0] > limit:
                self.file.write(data[: len(data) // 2])
                raise OSError(107, "Transport endpoint is not connected")
            return original(self, data)

        monkeypatch.setattr(places._Hashing, "write", write)
        monkeypatch.setattr(backup_module, "_TRIES", 1)
        save(copies, run)
        assert not copies.wait(60) and copies.trouble == "OSError"
        there = {n: d for n, d in contents(place).items() if "/.partial-" not in n}
        survived += there == before and restore_run(place, tmp_path / f"back{tenth}" / "my_voice").latest().update == 2
    assert survived == 10
    monkeypatch.setattr(places._Hashing, "write", original)
    save(copies, run)  # the connection is back
    assert copies.wait(60) and copies.trouble is None
    assert [p.name[:13] for p in (place / "my_voice").glob("*resume-*")] == ["resume-000007"]


def test_what_was_written_is_read_back(trained, tmp_path, monkeypatch):
    """A disk that says yes and keeps something else is noticed before the older copy goes."""
    run = RunFolder(shutil.copytree(trained[0].path, tmp_path / "my_voice"))
    copies = Backup(tmp_path / "copies", pause=0.01)
    original = places._write_tar

    def lying(folder, target):
        told = original(folder, target)
        data = bytearray(target.read_bytes())
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
        return told

    monkeypatch.setattr(places, "_write_tar", lying)
    monkeypatch.setattr(backup_module, "_TRIES", 1)
    save(copies, run)
    assert not copies.wait(60) and "is not what was written" in copies.trouble
    assert not list((tmp_path / "copies" / "my_voice").glob("resume-*"))


def test_a_damaged_copy_is_passed_over(trained, tmp_path, capsys):
    place = Path(shutil.copytree(trained[1], tmp_path / "copies")) / "my_voice"
    (whole,) = place.glob("resume-*")
    damaged = bytearray(whole.read_bytes())
    damaged[-5000] ^= 1
    (place / "resume-000009-0123456789abcdef.tar").write_bytes(damaged)
    assert restore_run(tmp_path / "copies", tmp_path / "my_voice").latest().update == 2
    assert "resume-000009-0123456789abcdef.tar is damaged" in capsys.readouterr().out


def test_killed_while_copying(trained, tmp_path):
    """A process is killed five times in the middle of its second copy; the first one is whole each time."""
    run = RunFolder(shutil.copytree(trained[0].path, tmp_path / "my_voice"))
    place = tmp_path / "copies"
    copies = Backup(place)
    save(copies, run)
    assert copies.wait(60)
    stage = tmp_path / "stage"
    shutil.copytree(run.latest().path, stage / "resume" / "checkpoints" / "update_000008")
    (stage / "resume" / "checkpoints" / "update_000008" / "more.safetensors").write_bytes(os.urandom(1 << 26))
    shutil.copytree(place / "my_voice" / "exports" / "update_000002", stage / "exports" / "update_000008")
    code = (
        "import sys, pathlib\nfrom f5kit.places import FolderPlace\nplace = FolderPlace(pathlib.Path(sys.argv[1]))\n"
        "place.name = 'my_voice'\nprint('go', flush=True)\nplace.put(pathlib.Path(sys.argv[2]), 8, 3)\n"
    )
    for delay in (0.005, 0.02, 0.05):
        process = subprocess.Popen([sys.executable, "-c", code, str(place), str(stage)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        newest = FolderPlace(place)
        newest.name = "my_voice"
        back = RunFolder(tmp_path / f"back{delay}")
        assert newest.fetch(back.path) in (2, 8)
        assert back.checkpoints()[-1].damage() is None or newest.newest() == 8


def test_places_that_cannot_serve_are_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_place(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="on Colab alone"):
        open_place("drive")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(UserError, match="HF_TOKEN"):
        open_place("hub:you/runs")
    with pytest.raises(UserError, match="'hub:runs' names no repository"):
        open_place("hub:runs")


def test_a_saved_version_goes_on_as_an_input(trained, dataset, tmp_path):
    """Kaggle: the output of the version before is mounted, read-only, below /kaggle/input."""
    old = tmp_path / "input" / "my-notebook" / "f5kit_workspace"
    shutil.copytree(trained[0].path, old / "runs" / "my_voice")
    shutil.copytree(dataset.folder, old / "data" / "my_voice")
    (old / "runs" / "my_voice" / ".left").touch()
    root = tmp_path / "working" / "f5kit_workspace"
    assert restore_workspace(root, tmp_path / "input") == ["data/my_voice", "runs/my_voice"]
    assert RunFolder(root / "runs" / "my_voice").latest().update == 2
    assert not (root / "runs" / "my_voice" / ".left").exists()
    assert restore_workspace(root, tmp_path / "input") == []
    (old / "runs" / "my_voice" / "checkpoints" / "update_000002").rename(
        old / "runs" / "my_voice" / "checkpoints" / "update_000009"
    )
    assert restore_workspace(root, tmp_path / "input") == ["runs/my_voice"]
    assert [c.update for c in RunFolder(root / "runs" / "my_voice").checkpoints()] == [9]
    assert restore_workspace(root, tmp_path / "nowhere") == []


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve(TOKEN) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for place in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
            monkeypatch.setattr(place, server.endpoint, raising=False)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server


def test_a_run_goes_to_the_hub_and_comes_back(trained, hub, tmp_path):
    run = RunFolder(shutil.copytree(trained[0].path, tmp_path / "runs" / "my_voice"))
    copies = Backup("hub:you/runs")
    save(copies, run)
    assert copies.wait(200), copies.trouble
    run.latest().path.rename(run.path / "checkpoints" / "update_000005")
    save(copies, run)
    assert copies.wait(200), copies.trouble
    repository = hub.repositories["you/runs"]
    assert repository.private
    resumes = {name.split("/")[3] for name in repository.files if "/resume/checkpoints/" in name}
    assert resumes == {"update_000005"}  # the older one went by the same commit
    exports = {name.split("/")[2] for name in repository.files if "/exports/" in name}
    assert exports == {"update_000002", "update_000005"}
    restored = restore_run("hub:you/runs", tmp_path / "again" / "my_voice")
    assert restored.latest().update == 5 and restored.latest().damage() is None
