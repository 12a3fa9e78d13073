"""F9: ten malicious checkpoints. Nothing in them is executed, nothing is written outside the folder they may use."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from hub_server import Repository, serve  # noqa: E402

from f5kit.backup import restore_run  # noqa: E402
from f5kit.checkpoint import load_model  # noqa: E402
from f5kit.convert import open_model  # noqa: E402
from f5kit.errors import UserError  # noqa: E402
from f5kit.text import english_vocab  # noqa: E402


class Calls:
    """What a pickle of it does when it is read without restriction: it calls a function."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


def saved(value, **options) -> bytes:
    torch.save(value, memory := io.BytesIO(), **options)
    return memory.getvalue()


def safetensors(header: dict, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_vocab(folder: Path) -> None:
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in english_vocab()), encoding="utf-8")


def pickled(content):
    """A case: `model.pt` with this content, opened as `f5kit.convert` opens it."""

    def open_it(folder: Path, canary: Path):
        (folder / "model.pt").write_bytes(content(canary))
        write_vocab(folder)
        return open_model(folder / "model.pt", config="F5TTS_v1_Base")

    return open_it


def a_storage_of_another_file(canary: Path) -> bytes:
    """A zip whose records are named to lead out of any folder."""
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        archive.writestr("../../../canary/data.pkl", pickle.dumps({"a": 1}))
        archive.writestr(f"../..{canary}", b"written")
    return memory.getvalue()


def packed(header: dict, data: bytes = b"", length: int | None = None, config: dict | None = None):
    """A case: `model.safetensors` with this header, loaded as an export is."""

    def open_it(folder: Path, canary: Path):
        (folder / "model.safetensors").write_bytes(safetensors(header, data, length))
        write_vocab(folder)
        usual = {"name": "tiny", "backbone": "dit", "dim": 64, "depth": 2, "heads": 2, "dim_head": 32, "ff_mult": 2}
        usual |= {"text_dim": 32, "conv_layers": 1, "vocab_size": 95}
        (folder / "config.json").write_text(json.dumps({**usual, **(config or {})}))
        return load_model(folder)

    return open_it


def resume_file(*members: tuple[tarfile.TarInfo, bytes]):
    """A case: a resume file with these members, restored as a session restores it."""

    def open_it(folder: Path, canary: Path):
        import hashlib

        place = folder / "copies" / "my_voice"
        place.mkdir(parents=True)
        with tarfile.open(fileobj=(memory := io.BytesIO()), mode="w") as archive:
            for member, data in members:
                member.name = member.name.replace("CANARY", str(canary))
                member.linkname = member.linkname.replace("CANARY", str(canary))
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        name = hashlib.sha256(memory.getvalue()).hexdigest()[:16]
        (place / f"resume-000400-{name}.tar").write_bytes(memory.getvalue())
        return restore_run(folder / "copies", folder / "runs" / "my_voice")

    return open_it


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def repository_file(name: str):
    """A case: a repository of the Hub that lists a file of this name."""

    def open_it(folder: Path, canary: Path):
        with serve("token") as hub, pytest.MonkeyPatch.context() as patch:
            hub.repositories["somebody/voice"] = repository = Repository(private=False)
            files = {"model.safetensors": safetensors({}), "vocab.txt": b" \n", "config.json": b"{}"}
            repository.add({**files, name.replace("CANARY", str(canary)): b"written"})
            for place in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
                patch.setattr(place, hub.endpoint, raising=False)
            template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            return load_model("somebody/voice")

    return open_it


HUGE = {"transformer.proj_out.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 4]}}
SMALL = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
CASES = {
    "a call in a pickle": pickled(lambda canary: saved({"a": Calls(os.system, f"touch {canary}")})),
    "a call in the format before zip": pickled(
        lambda canary: saved({"a": Calls(open, str(canary), "w")}, _use_new_zipfile_serialization=False)
    ),
    "code for exec": pickled(lambda canary: pickle.dumps({"a": Calls(exec, f"open({str(canary)!r}, 'w')")})),
    "records that lead out of the zip": pickled(a_storage_of_another_file),
    "a header longer than the file": packed(SMALL, b"\0" * 4, length=1 << 62),
    "a shape that its bytes cannot fill": packed(HUGE, b"\0" * 4),
    "a config of a model beyond any memory": packed(SMALL, b"\0" * 4, config={"dim": 1 << 30, "depth": 1 << 20}),
    "a resume file that writes elsewhere": resume_file((member("../../../../../../../..CANARY"), b"written")),
    "a resume file with a link to elsewhere": resume_file(
        (member("checkpoints/update_000400/model.safetensors", tarfile.SYMTYPE, "CANARY"), b""),
        (member("checkpoints/update_000400/model.safetensors"), b"written"),
    ),
    "a repository with a name that leads out": repository_file("../../../../../../..CANARY"),
}


def outside(root: Path, inside: Path) -> dict[Path, int]:
    """Every file around the folder that is being used, and when it was changed."""
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and inside not in p.parents}


@pytest.mark.parametrize("name", CASES)
def test_nothing_runs_and_nothing_leaves_the_folder(name, tmp_path, monkeypatch, report):
    folder, canary = tmp_path / "used" / "deep" / "folder", tmp_path / "canary"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "used" / "cache"))
    monkeypatch.chdir(folder)
    (tmp_path / "neighbour.txt").write_text("untouched")
    before = outside(tmp_path, tmp_path / "used")
    with pytest.raises(UserError) as refused:
        CASES[name](folder, canary)
    silent = canary.exists() or outside(tmp_path, tmp_path / "used") != before
    assert len(str(refused.value)) < 1000 and "busy" not in str(refused.value)  # refused, not waited out
    report("F9", injected=1, survived=int(not silent), silent=int(silent), checkpoint=name)


def test_the_payloads_are_live(tmp_path):
    """Without the restriction they do what they say: the ten cases are no dummies."""
    canary = tmp_path / "canary"
    (tmp_path / "m.pt").write_bytes(saved({"a": Calls(open, str(canary), "w")}))
    torch.load(tmp_path / "m.pt", weights_only=False)
    assert canary.exists()
    shutil.rmtree(tmp_path, ignore_errors=True)
