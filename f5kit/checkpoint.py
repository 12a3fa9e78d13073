"""Run folders and the checkpoints in them, and loading a model from anywhere.

    runs/my_voice/
      run.json                  the plan, the dataset (its path from here) and its manifest's hash
      events.jsonl              one line for each thing that happened
      best.json                 which checkpoint, raw or EMA, and why
      checkpoints/update_000400/
        model.safetensors       weights as trained ("raw")
        ema.safetensors         their running average; ema_075: three quarters of the way there from the base
        optimizer.safetensors   with these three and state.json a run resumes as if it had never stopped
        config.json  vocab.txt  what the weights mean
        data.json               what it was trained on: the dataset's name, minutes, and the speaker's consent
        state.json              counters and held-out losses
        manifest.json           sha256 of every file above, written last

A checkpoint folder appears by one rename when all of it is on the disk. A folder whose files do not match its manifest
is passed over, and the newest whole one is used.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from f5kit.cfm import CFM
from f5kit.config import PRESETS, ModelConfig
from f5kit.data import dataset_facts
from f5kit.errors import UserError
from f5kit.readings import fitting_configs
from f5kit.repository import fetch_model, own_config, repository_name
from f5kit.text import Tokenizer, english_vocab
from f5kit.weights import (
    TensorFile,
    download_published,
    file_hash,
    from_published,
    read_tensors,
    refuse_pickle,
    sync,
    write_json,
    write_tensors,
)

WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
OWN_PRESETS = ("tiny", "starter")  # small models of the kit, which read printable ASCII
_EMBEDDED = {"starter": Path(__file__).with_name("starter_voice")}  # presets whose weights come with the package


def file_of(weights: str) -> str:
    """The file in a checkpoint folder that holds these weights: "raw", "ema", or others by their own name."""
    return WEIGHTS.get(weights, f"{weights}.safetensors")


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
        except (OSError, ValueError):
            return "manifest.json is missing or damaged"
        for name, expected in manifest.items():
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            if file_hash(file) != expected:
                return f"{name} does not match its sha256"
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

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint folder, oldest first, whether whole or not."""
        folders = sorted((self.path / "checkpoints").glob("update_*"))
        return [Checkpoint(folder, int(folder.name.removeprefix("update_"))) for folder in folders]

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; a damaged one is reported and passed over."""
        for checkpoint in reversed(self.checkpoints()):
            damage = checkpoint.damage()
            if damage is None:
                return checkpoint
            print(f"{checkpoint.path} is damaged ({damage}); looking for an older one")
        return None

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

    def events(self) -> list[dict]:
        """All events so far. A line torn by a crash is left out."""
        file = self.path / "events.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return events

    def record(self, event: dict) -> None:
        """Append one event."""
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def save(self, update: int, tensors: dict[str, dict[str, Tensor]], model: CFM, state: dict) -> Checkpoint:
        """Write a checkpoint: all files under a temporary name, the manifest last, then one rename."""
        folder = self.path / "checkpoints" / f"update_{update:06d}"
        partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, group in tensors.items():
            write_tensors(partial / f"{name}.safetensors", group)
        write_meaning(partial, model)
        write_json(partial / "data.json", dataset_facts(self.path))
        write_json(partial / "state.json", state)
        write_json(partial / "manifest.json", {f.name: file_hash(f) for f in sorted(partial.iterdir())})
        sync(partial)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one of the same number
        os.replace(partial, folder)
        sync(folder.parent)
        return Checkpoint(folder, update)

    def add_weights(self, checkpoint: str, weights: str, model: CFM) -> None:
        """Keep other weights of a checkpoint beside its own, such as "ema_075", where `load_model` finds them."""
        file = self.checkpoint(checkpoint).path / file_of(weights)
        partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
        write_tensors(partial, model.state_dict())
        os.replace(partial, file)

    def rotate(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best one."""
        best = self.best["checkpoint"] if self.best else None
        for checkpoint in self.checkpoints()[:-keep]:
            if checkpoint.name != best:
                shutil.rmtree(checkpoint.path)


def relative_path(path: Path, start: Path) -> str:
    """The way from one folder to another, so that a workspace can be moved; absolute between two drives."""
    try:
        return os.path.relpath(path.resolve(), start.resolve())
    except ValueError:
        return str(path.resolve())


def write_meaning(folder: Path, model: CFM) -> None:
    """Write what the weights mean beside them: config.json and vocab.txt."""
    model.tokenizer.save(folder / "vocab.txt")
    reads = {"tokenizer": model.tokenizer.name, "normaliser": model.tokenizer.normaliser}  # what it does, not a plan
    write_json(folder / "config.json", {**model.config.to_dict(), **reads, "tokenizer_hash": model.tokenizer.hash})


def read_meaning(
    folder: Path, config: str | ModelConfig | None = None, vocab: str | Path | None = None, weights: Path | None = None
) -> tuple[ModelConfig, Tokenizer]:
    """Read config.json and vocab.txt of a model folder.

    `config` says what the weights mean where no config.json does: a config, or the name of a preset or of a reading
    that fits the file `weights`. `vocab` is the vocabulary where it lies elsewhere.
    """
    file = folder / "config.json"
    vocab = Path(vocab) if vocab else folder / "vocab.txt"
    if isinstance(config, str):
        config = _named_config(config, folder, weights)
        if vocab.is_file():  # a vocabulary that was extended has its model's size
            lines = len(Tokenizer.load(vocab, config.tokenizer, config.normaliser).vocab)
            config = config.replace(vocab_size=lines)
    if config is None:
        if not own_config(folder):
            raise UserError(
                f"{weights or folder} has no config.json of f5kit, and equal weights can mean different models: "
                f"say which one it is, as in load_model(folder, config='F5TTS_v1_Base'); {_what_fits(folder, weights)}"
            )
        values = json.loads(file.read_text(encoding="utf-8"))
        expected = values.pop("tokenizer_hash", None)
        config = ModelConfig.from_dict(values)
    else:
        expected = None
    tokenizer = Tokenizer.load(vocab, config.tokenizer, config.normaliser)
    if expected not in (None, tokenizer.hash):
        raise UserError(f"{vocab} is not the vocabulary that {file} was written with: restore it")
    return config, tokenizer


def readings(source: str | Path) -> dict[str, ModelConfig]:
    """{name: config} of every published reading that fits the weights of a file or folder; they are not loaded."""
    path = Path(source)
    file = path if path.is_file() else _weights_file(model_folder(path) or path, "ema")
    return fitting_configs(from_published(TensorFile(file).shapes()))


def _what_fits(folder: Path, weights: Path | None) -> str:
    """A half sentence on the readings that fit, for an error message."""
    try:
        names = list(readings(weights or folder))
    except UserError:
        names = []
    if not names:
        return "its shapes are those of no published model"
    if len(names) == 1:
        return f"its shapes fit {names[0]}"
    return (
        f"its shapes fit {', '.join(names[:-1])} and {names[-1]}, "
        "and f5kit.probe.probe_configs finds by listening which it is"
    )


def _named_config(name: str, folder: Path, weights: Path | None) -> ModelConfig:
    """A preset, or a reading of this name that fits the weights. Raises UserError with the names that do."""
    if name in PRESETS:
        return PRESETS[name]
    fits = readings(weights or folder)
    if name not in fits:
        raise UserError(f"there is no config {name!r}; {_what_fits(folder, weights)}")
    return fits[name]


def find_preset(name: str) -> ModelConfig:
    """The preset of that name. Raises UserError with the names there are."""
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}: it is no folder here, and the presets are {', '.join(PRESETS)}")
    return PRESETS[name]


def load_model(
    source: str | Path,
    *,
    weights: str | None = None,
    config: str | ModelConfig | None = None,
    vocab: str | Path | None = None,
    device: str = "cpu",
) -> CFM:
    """A model ready to speak or to train, fp32, on `device`; `model.origin` says in words what was loaded.

    `source` is a preset's name ("starter" comes with f5kit, F5TTS_v1_Base and the other published ones come from the
    Hub, "tiny" is made fresh), a run folder (its best checkpoint), a checkpoint or export folder, a folder or file in
    upstream's published layout with its vocab.txt (or `vocab`), or a repository of the Hub, "user/name", whose licence
    and card are printed first. `weights` is "ema" or "raw"; by default a run's choice, else EMA. `config` says what
    weights without a config.json mean; `readings` lists what can fit.

    Raises UserError for anything that can't be found, and when weights and config do not belong together.
    """
    asked, (source, config, vocab) = source, _on_disk(source, config, vocab, show=True)
    folder = model_folder(source)
    if folder:
        best = RunFolder(source).best
        weights = weights or (best["weights"] if best else "ema")
        file = Path(source) if Path(source).is_file() else _weights_file(folder, weights)
        origin = str(file) if asked == source else f"{asked} ({file.name})"
        return _build(*read_meaning(folder, config, vocab, file), read_tensors(file), origin, device)
    preset, tokenizer = find_preset(str(source)), load_tokenizer(source)
    if preset.name in OWN_PRESETS:
        return fresh_model(preset, tokenizer).to(device)
    file = download_published(preset.name, "weights")
    return _build(preset, tokenizer, read_tensors(file), f"{preset.name} from the Hub", device)


def describe_model(source: str | Path) -> ModelConfig:
    """The config of what `load_model` takes; but for a repository of the Hub without its weights and the network."""
    source, config, vocab = _on_disk(source)
    folder = model_folder(source)
    return read_meaning(folder, config, vocab)[0] if folder else find_preset(str(source))


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of what `load_model` takes, without its weights; a published vocabulary comes from the Hub."""
    source, config, vocab = _on_disk(source)
    folder = model_folder(source)
    if folder:
        return read_meaning(folder, config, vocab)[1]
    config = find_preset(str(source))
    if config.name in OWN_PRESETS:
        return Tokenizer(english_vocab())
    return Tokenizer.load(download_published(config.name, "vocabulary"), config.tokenizer, config.normaliser)


def model_folder(source: str | Path) -> Path | None:
    """The folder that holds config.json and vocab.txt, or None when `source` is a name without one."""
    path = Path(source)
    refuse_pickle(path)
    if (path / "checkpoints").is_dir():
        return RunFolder(path).checkpoint().path
    if path.is_dir():
        return path
    if repository_name(source):
        return fetch_model(str(source)).folder
    return path.parent if path.suffix == ".safetensors" else _EMBEDDED.get(str(source))


def _on_disk(
    source: str | Path, config: str | ModelConfig | None = None, vocab: str | Path | None = None, show: bool = False
) -> tuple:
    """(source, config, vocab) with a repository of the Hub replaced by its files here; all else as it is."""
    if not repository_name(source):
        return source, config, vocab
    found = fetch_model(str(source), show=show)
    return found.weights, config or found.config(), vocab or found.vocab


def fresh_model(config: ModelConfig, tokenizer: Tokenizer, seed: int = 0) -> CFM:
    """A model with fresh weights, the same for the same seed. Leaves torch's own random state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CFM(config, tokenizer)
    model.origin = f"{config.name} with fresh weights (seed {seed}): it has learned nothing yet"
    return model.eval()


def _weights_file(folder: Path, weights: str) -> Path:
    """The weights in a folder: those asked for, else the one file that is there."""
    if (folder / file_of(weights)).is_file():
        return folder / file_of(weights)
    if weights not in WEIGHTS:
        raise UserError(f"weights is {weights!r}; choose one of {', '.join(WEIGHTS)}")
    found = [f for f in sorted(folder.glob("*.safetensors")) if f.name != "optimizer.safetensors"]
    if len(found) != 1:
        raise UserError(f"{folder} has {len(found)} weights files where one is needed: name the file itself")
    return found[0]


def _build(config: ModelConfig, tokenizer: Tokenizer, tensors: dict[str, Tensor], origin: str, device: str) -> CFM:
    """A model with the given weights, checked name by name and shape by shape."""
    if max(config.depth, config.conv_layers) > len(tensors):  # else a config could name a million blocks
        raise UserError(f"{origin} has {len(tensors)} tensors, too few for its config {config.name}: restore it")
    with torch.device("meta"):  # no memory is spent on weights that are replaced at once
        model = CFM(config, tokenizer)
    tensors = from_published(tensors)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    if expected != given:
        wrong = sorted(k for k in expected.keys() | given.keys() if expected.get(k) != given.get(k))
        k = wrong[0]
        raise UserError(
            f"{origin} does not fit the config {config.name}: {len(wrong)} tensors differ, first {k}, "
            f"{given.get(k, 'missing')} in the file and {expected.get(k, 'unknown')} in the model: "
            "name the config the weights were trained with"
        )
    model.load_state_dict({k: t.float() for k, t in tensors.items()}, assign=True)
    model.origin = origin
    return model.to(device).eval()


def export_model(model: CFM, folder: str | Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write a folder with the weights alone, in `dtype`, and what they mean: what `load_model` and `publish` take."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: t if k.endswith("inv_freq") else t.to(dtype) for k, t in model.state_dict().items()}
    write_tensors(folder / "model.safetensors", state)
    write_meaning(folder, model)
    return folder
