"""Run folders, and the checkpoints in them that no crash can cost.

    runs/my_voice/
      run.json                  the plan, the dataset (its path from here) and its manifest's hash
      run.lock                  held while a run trains here
      events.jsonl              one line for each thing that happened
      best.json                 which checkpoint, raw or EMA, and why
      samples/                  sentences said on the way, with their spectrograms
      checkpoints/update_000400/
        model.safetensors       weights as trained ("raw")
        ema.safetensors         their running average; ema_075: three quarters of the way there from the base
        optimizer.safetensors   with these three and state.json a run resumes as if it had never stopped
        adapter.safetensors     and adapter_ema: of a LoRA run, what was trained; the weights above have it merged
        config.json  vocab.txt  what the weights mean
        data.json               the dataset's name and length, and what the speaker has agreed to
        state.json              counters, held-out losses, what was done about trouble
        manifest.json           sha256 of every file above, written last

A checkpoint is written under a hidden name; each file is flushed to the disk, then the folder; then one rename makes it
a checkpoint. So it is whole or not there. Bits that rot later are found by the manifest: such a folder is passed over,
and set aside as damaged_update_000400 by the next run, and the newest whole one is used.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from f5kit.errors import UserError
from f5kit.weights import file_hash, sync, write_json, write_tensors

WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
_ROOM = 1.2  # a save needs this many times its size

# What a resumed run takes from the plan it is given: it alters memory, speed and bookkeeping only.
_FREE = {
    "micro_frames", "checkpointing", "compile", "workers", "save_every", "evaluate_every", "sample_every",
    "keep_checkpoints", "keep_every", "patience", "ema_offload",
}  # fmt: skip
_SINCE = {"lora_rank": 0}  # settings that runs of older versions did not have, and how they were trained
# The run's course: a resumed run keeps its own, unless a change is asked for. All else can never change.
_COURSE = {"updates", "learning_rate", "warmup_updates", "ema_horizon", "optimizer", "precision"}


def file_of(weights: str) -> str:
    """The file in a checkpoint folder that holds these weights: "raw", "ema", or others by their own name."""
    return WEIGHTS.get(weights, f"{weights}.safetensors")


def dataset_facts(run: Path) -> dict:
    """Name, seconds, clips and consent of the dataset that a run folder was trained on; {} when it is not there."""
    try:
        told = json.loads((run / "run.json").read_text(encoding="utf-8"))["dataset"]
        info = json.loads((run / told / "dataset.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return {}
    return {key: info[key] for key in ("name", "seconds", "clips", "consent") if key in info}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder."""

    path: Path
    update: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> dict:
        """Counters and held-out losses."""
        return json.loads((self.path / "state.json").read_text(encoding="utf-8"))

    def damage(self) -> str | None:
        """What is wrong with the folder's files, or None when they all match the manifest."""
        try:
            manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
            files = [(self.path / name, name, expected) for name, expected in manifest.items()]
        except (OSError, ValueError, AttributeError):
            return "manifest.json is missing or damaged"
        for file, name, expected in files:
            try:
                if not file.is_file():
                    return f"{name} is missing"
                if file_hash(file) != expected:
                    return f"{name} does not match its sha256"
            except (OSError, ValueError) as error:
                return f"{name!r} cannot be read ({error})"
        return None


class RunFolder:
    """A training run on the disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        best = f"the best is {self.best['checkpoint']} {self.best['weights']}" if self.best else "none is chosen"
        return f"{self.path}: {len(self.checkpoints())} checkpoints, {best}"

    @property
    def info(self) -> dict:
        """run.json. Raises UserError when the folder holds no run."""
        file = self.path / "run.json"
        if not file.is_file():
            raise UserError(f"{self.path} holds no run: it has no run.json; train first, or name another folder")
        return json.loads(file.read_text(encoding="utf-8"))

    @property
    def dataset_folder(self) -> Path:
        """Where the dataset lies that the run was trained on."""
        return Path(os.path.normpath(self.path / self.info["dataset"]))

    def begin(self, info: dict, derived: Collection[str], change: bool = False) -> None:
        """Write run.json for a new run, or for one that goes on.

        `info` holds "model", "dataset", "manifest_hash" and the "plan"; `derived` names the settings of the plan that
        nobody asked for. A run that goes on keeps its number of updates, learning rate, optimizer and precision, unless
        `change` is true. Raises UserError when it would be another run, or when another course was asked for.
        """
        if (self.path / "run.json").is_file():
            old, now = self.info, info["plan"]["train"]
            was = {**_SINCE, **old["plan"]["train"]}
            changed = {k: (was.get(k), v) for k, v in now.items() if k not in _FREE and was.get(k) != v}
            changed |= {k: (old[k], info[k]) for k in ("model", "manifest_hash") if old[k] != info[k]}
            said = "; ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in changed.items())
            if changed.keys() - _COURSE:
                raise UserError(
                    f"{self.path} holds a run that was started otherwise ({said}): "
                    "choose another run folder, or plan the run as it was"
                )
            if changed.keys() - set(derived) and not change:
                raise UserError(
                    f"{self.path} holds a run with other settings ({said}): plan it as it was, or choose another run "
                    "folder, or say Trainer(..., change=True): then the schedule is rebuilt for the new settings"
                )
            if changed and not change:
                print(f"{self.path} goes on as it was planned; the plan of today would change {said}")
                now |= {k: a for k, (a, _) in changed.items()}
            info = {**info, "fitted": old.get("fitted", {})}
        write_json(self.path / "run.json", info)

    # Checkpoints

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint folder, oldest first, whether whole or not."""
        folders = sorted((self.path / "checkpoints").glob("update_*"))
        return [Checkpoint(folder, int(folder.name.removeprefix("update_"))) for folder in folders]

    def latest(self, set_aside: bool = False) -> Checkpoint | None:
        """The newest whole checkpoint; a damaged one is reported and passed over, and renamed when `set_aside`."""
        for checkpoint in reversed(self.checkpoints()):
            damage = checkpoint.damage()
            if damage is None:
                return checkpoint
            print(f"{checkpoint.path} is damaged ({damage}); looking for an older one")
            if set_aside:
                aside = checkpoint.path.with_name(f"damaged_{checkpoint.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(checkpoint.path, aside)
        return None

    def save(
        self,
        update: int,
        tensors: dict[str, dict[str, Tensor]],
        model: nn.Module,
        state: dict,
        about: dict[str, dict[str, str]] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint: all files under a temporary name, the manifest last, then one rename.

        `about` is the metadata of tensor files, by their name.
        Raises OSError when the disk does not take it; the checkpoints that are there stay as they are.
        """
        folder = self.path / "checkpoints" / f"update_{update:06d}"
        partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.tidy()
        self._need_room(sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values()))
        try:
            partial.mkdir()
            for name, group in tensors.items():
                write_tensors(partial / f"{name}.safetensors", group, (about or {}).get(name))
            write_meaning(partial, model)
            write_json(partial / "data.json", dataset_facts(self.path))
            write_json(partial / "state.json", state)
            for file in partial.iterdir():
                sync(file)
            write_json(partial / "manifest.json", {f.name: file_hash(f) for f in sorted(partial.iterdir())})
            sync(partial)
            self._remove(folder)  # a former one of the same number
            os.replace(partial, folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return Checkpoint(folder, update)

    def tidy(self) -> None:
        """Remove what killed saves and removals left. For the one run that holds the lock."""
        for rest in (self.path / "checkpoints").glob(".update_*"):
            shutil.rmtree(rest, ignore_errors=True)
        for rest in self.path.glob(".*.partial-*"):
            rest.unlink(missing_ok=True)

    def _need_room(self, size: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < _ROOM * size:
            needed = f"a checkpoint needs {_ROOM * size / 2**30:.2f} GB and {free / 2**30:.2f} GB are free"
            raise OSError(errno.ENOSPC, needed, str(self.path))

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint. It vanishes by a rename, so a kill leaves no half of it."""
        if folder.is_dir():
            hidden = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
            os.replace(folder, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def add_weights(self, checkpoint: str, weights: str, model: nn.Module) -> None:
        """Keep other weights of a checkpoint beside its own, such as "ema_075", where `load_model` finds them."""
        file = self.checkpoint(checkpoint).path / file_of(weights)
        partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
        write_tensors(partial, model.state_dict())
        os.replace(partial, file)
        sync(file.parent)

    def rotate(self, keep: int, every: int = 0) -> None:
        """Remove all but the newest `keep` checkpoints, the best one, and those at multiples of `every` updates."""
        best = self.best["checkpoint"] if self.best else None
        for checkpoint in self.checkpoints()[:-keep]:
            if checkpoint.name != best and not (every and checkpoint.update % every == 0):
                self._remove(checkpoint.path)

    # The choice

    @property
    def best(self) -> dict | None:
        """{"checkpoint", "weights", "loss", "why", "by"}, or None before the first checkpoint."""
        file = self.path / "best.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def choose(
        self, checkpoint: str, weights: str, why: str, loss: float | None = None, by: str = "user"
    ) -> None:
        """Point `best.json` at a checkpoint ("update_000400") and at its "raw", "ema" or added weights.

        The trainer chooses by="trainer" and changes its mind as the loss falls; a user's choice it leaves alone.
        """
        if not (self.path / "checkpoints" / checkpoint / file_of(weights)).is_file():
            raise UserError(f"{self.path} has no {weights} weights of {checkpoint}")
        best = {"checkpoint": checkpoint, "weights": weights, "loss": loss, "why": why, "by": by}
        write_json(self.path / "best.json", best)

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """The checkpoint of that name; without a name the best one, else the newest whole one."""
        name = name or (self.best["checkpoint"] if self.best else None)
        found = [c for c in self.checkpoints() if c.name == name] if name else [c for c in [self.latest()] if c]
        if not found:
            there = ", ".join(c.name for c in self.checkpoints()) or "none"
            raise UserError(f"{self.path} has no checkpoint {name or ''}; there are: {there}")
        return found[0]

    # What happened

    def events(self) -> list[dict]:
        """All events so far. A line torn by a crash is left out."""
        file = self.path / "events.jsonl"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return events

    def record(self, event: dict) -> None:
        """Append one event and flush it to the disk. A line that a crash tore is ended first."""
        with open(self.path / "events.jsonl", "ab+") as file:
            torn = False
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            file.write(b"\n" * torn + json.dumps(event).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def relative_path(path: Path, start: Path) -> str:
    """The way from one folder to another, so that a workspace can be moved; absolute between two drives."""
    try:
        return os.path.relpath(path.resolve(), start.resolve())
    except ValueError:
        return str(path.resolve())


def write_meaning(folder: Path, model: nn.Module) -> None:
    """Write what the weights of a CFM mean beside them: config.json and vocab.txt."""
    model.tokenizer.save(folder / "vocab.txt")
    reads = {"tokenizer": model.tokenizer.name, "normaliser": model.tokenizer.normaliser}  # what it does, not a plan
    write_json(folder / "config.json", {**model.config.to_dict(), **reads, "tokenizer_hash": model.tokenizer.hash})
