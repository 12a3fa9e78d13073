"""Where a dataset is made: a hidden folder beside it that takes its place by one rename."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from f5kit.data import FORMAT
from f5kit.errors import UserError


def check_place(source: str | Path, out: Path) -> None:
    """Raises UserError when the dataset would stand in its source, or in the place of something else."""
    if not str(source).startswith("hf://"):
        here, there = Path(source).resolve(), out.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise UserError(f"{out} and {source} overlap; choose a place apart from the recordings")
    if out.exists() and not (out / "dataset.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is no dataset of f5kit; choose another folder, or remove it")


def partial_folder(out: Path) -> Path:
    """The hidden folder beside `out`."""
    return out.with_name(f".{out.name}.partial")


def work_folder(out: Path) -> Path:
    """That folder as an interrupted run left it, or begun with what `out` knows."""
    folder = partial_folder(out)
    if not (folder / "journal.sqlite").exists() and read_json(out / "dataset.json").get("format") == FORMAT:
        for kind in (out / "features").glob("*"):
            (folder / "features" / kind.name).mkdir(parents=True, exist_ok=True)
            for shard in kind.glob("*.f16"):
                link(shard, folder / "features" / kind.name / shard.name)
        with suppress(FileNotFoundError):
            shutil.copyfile(out / "journal.sqlite", folder / "journal.sqlite")
    with suppress(FileNotFoundError):
        shutil.copyfile(out / "decisions.json", folder / "decisions.json")
    (folder / "clips").mkdir(exist_ok=True)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    (folder / "scratch").mkdir()
    return folder


def link(path: Path, to: Path) -> None:
    """A second name for a file, or a copy of it where there are no links."""
    try:
        os.link(path, to)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        shutil.copyfile(path, to)


def put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished folder to `out`; what was prepared there before makes way and is removed."""
    shutil.rmtree(partial / "scratch", ignore_errors=True)
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(partial, out)
    shutil.rmtree(old, ignore_errors=True)


def read_json(path: Path) -> dict:
    """A JSON object from a file; an empty one for what is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def prepared_from(out: Path) -> str | None:
    """The state that a finished dataset was made from."""
    return read_json(out / "dataset.json").get("source_hash")


def dropped(out: Path) -> frozenset[str]:
    """Clips that the user has taken out, from decisions.json."""
    return frozenset(map(str, read_json(out / "decisions.json").get("drop", ())))
