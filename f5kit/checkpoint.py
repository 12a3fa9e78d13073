"""Loading a model from anywhere: a preset, the Hub, a run, a checkpoint, an export, upstream's layout; and exporting.

A folder of weights carries what they mean, config.json and vocab.txt. Weights without a config are not guessed at.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from f5kit.cfm import CFM
from f5kit.config import PRESETS, ModelConfig
from f5kit.errors import UserError
from f5kit.lora import adapted_layers, load_adapters, merge_adapters, plain_state
from f5kit.readings import fitting_configs
from f5kit.repository import fetch_model, own_config, repository_name
from f5kit.runs import WEIGHTS, RunFolder, file_of, write_meaning
from f5kit.text import Tokenizer, english_vocab
from f5kit.weights import (
    TensorFile,
    WithoutWeights,
    download_published,
    from_published,
    read_tensors,
    refuse_pickle,
    write_tensors,
)

OWN_PRESETS = ("tiny", "starter")  # small models of the kit, which read printable ASCII
_EMBEDDED = {"starter": Path(__file__).with_name("starter_voice")}  # presets whose weights come with the package


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
    adapter: str | Path | None = None,
    device: str = "cpu",
) -> CFM:
    """A model ready to speak or to train, fp32, on `device`; `model.origin` says in words what was loaded.

    `source` is a preset's name ("starter" comes with f5kit, F5TTS_v1_Base and the other published ones come from the
    Hub, "tiny" is made fresh), a run folder (its best checkpoint), a checkpoint or export folder, a folder or file in
    upstream's published layout with its vocab.txt (or `vocab`), or a repository of the Hub, "user/name", whose licence
    and card are printed first. `weights` is "ema" or "raw"; by default a run's choice, else EMA. `config` says what
    weights without a config.json mean; `readings` lists what can fit. `adapter` is the file of a LoRA run that was
    trained on this model: it is merged into the weights.

    Raises UserError for anything that can't be found, and when weights and config do not belong together.
    """
    if adapter is not None:
        model = load_model(source, weights=weights, config=config, vocab=vocab, device=device)
        model.origin += f" with {adapter}"
        return merge_adapters(load_adapters(model, adapter)).eval()
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
    try:
        with WithoutWeights():
            model = CFM(config, tokenizer)
    except (RuntimeError, OverflowError) as error:  # sizes that no memory holds
        raise UserError(f"{origin}: no model can be built by its config {config.name}: restore it") from error
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
    """Write a folder with the weights alone, in `dtype`, and what they mean: what `load_model` and `publish` take.

    Adapters are merged.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = plain_state(model) if adapted_layers(model) else model.state_dict()
    state = {k: t if k.endswith("inv_freq") else t.to(dtype) for k, t in whole.items()}
    write_tensors(folder / "model.safetensors", state)
    write_meaning(folder, model)
    return folder
