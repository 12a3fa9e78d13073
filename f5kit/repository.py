"""A model from a repository of the Hub, by name: "user/name", "user/name/folder", or one of its weights files.

Three layouts are read: that of f5kit's exports (model.safetensors, config.json, vocab.txt), upstream's
(F5TTS_v1_Base/model_1250000.safetensors with a vocab.txt beside it), and what people upload: weights by any name, a
vocabulary here or in the folder above, with upstream's yaml or without. Where two readings of a repository are possible
nothing is guessed; the error lists them.

The card and the licence are shown before any weights are fetched. A token is sent only where the Hub asks for one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from f5kit.config import MelConfig, ModelConfig
from f5kit.errors import UserError
from f5kit.host import secret
from f5kit.push import hub_errors
from f5kit.text import Tokenizer
from f5kit.weights import PICKLES

_NAME = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})((?:/[\w.-]+)*)")
_OTHER_WEIGHTS = re.compile(r"optimizer|adapter|duration|vocoder|discriminator", re.IGNORECASE)
_BESIDE = ("config.json", "vocab.txt", "model.yaml", "export.json", "reference.wav", "reference.txt")
_CARD = 700  # characters of it that are shown
_MOST_FILES = 10_000


@dataclass(frozen=True)
class Fetched:
    """A model's files on this machine."""

    repo_id: str
    revision: str
    """The commit they belong to; empty where only the cache was asked."""
    weights: Path
    vocab: Path | None
    """Where it lies, beside the weights or above them."""

    @property
    def folder(self) -> Path:
        return self.weights.parent

    def config(self) -> ModelConfig | None:
        """What upstream's yaml says of the weights, where one lies there and no config.json of f5kit."""
        found = [] if own_config(self.folder) else sorted(self.folder.glob("*.yaml"))
        config = read_yaml_config(found[0]) if len(found) == 1 else None
        if config and self.vocab and config.tokenizer != "byte":
            tokenizer = Tokenizer.load(self.vocab, config.tokenizer, config.normaliser)
            config = config.replace(vocab_size=len(tokenizer.vocab))
        return config


def repository_name(source: str | Path) -> tuple[str, str] | None:
    """("user/name", "folder/file" or "") when `source` reads as a repository and is nothing on this disk."""
    text = str(source)
    found = _NAME.fullmatch(text)
    if not found or Path(text).exists() or ".." in PurePosixPath(text).parts:
        return None
    if not found[2] and text.endswith((".safetensors", *PICKLES)):  # a file that is missing, and no repository
        return None
    return found[1], found[2].strip("/")


def fetch_model(source: str, *, pickles: bool = False, show: bool = False) -> Fetched:
    """Fetch what a model needs and nothing else; what is in the cache is not fetched again.

    pickles: whether a `.pt` is taken where there is nothing else (`f5kit.convert` does that). show: print licence and
    card before the weights come. Offline (HF_HUB_OFFLINE) the cache answers. Raises UserError for a repository that
    cannot be had, has no model, or has several.
    """
    from huggingface_hub import constants

    repo_id, inside = repository_name(source) or (source, "")
    trouble = f"there is no folder {source} here, and the Hub did not give {repo_id}"
    with hub_errors(trouble, "check its name, the token and the connection"):
        if constants.HF_HUB_OFFLINE:
            folder, revision, token = _cached(repo_id), "", None
            names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        else:
            names, revision, token = _list(repo_id)
        weights, wanted = choose_files(repo_id, _safe(repo_id, names), inside, pickles)
        cards = [name for name in ("README.md",) if name in names]
        if not constants.HF_HUB_OFFLINE:
            folder = _fetch(repo_id, revision, cards, token)
        if show:
            print(describe_repository(repo_id, folder, revision))
        if not constants.HF_HUB_OFFLINE:
            folder = _fetch(repo_id, revision, [*cards, *wanted], token)
    vocab = next((folder / name for name in wanted if PurePosixPath(name).name == "vocab.txt"), None)
    return Fetched(repo_id, revision, folder / weights, vocab)


def choose_files(repo_id: str, names: Sequence[str], inside: str, pickles: bool) -> tuple[str, list[str]]:
    """(the weights, every file to fetch with them) from a repository's list. UserError when it cannot be told."""
    named = [name for name in names if name == inside]
    below = [name for name in names if not inside or name.startswith(f"{inside}/")]
    weights = named or _pick([n for n in below if n.endswith(".safetensors") and not _OTHER_WEIGHTS.search(n)])
    pickled = [name for name in named or below if name.endswith(PICKLES) and not _OTHER_WEIGHTS.search(name)]
    if not weights and inside and not below:
        raise UserError(f"{repo_id} has no {inside}; it has {_some(names)}")
    if (not weights or weights == pickled) and pickled:
        if not pickles:
            raise UserError(
                f"{repo_id} holds its weights as a pickle ({_some(pickled)}), which can run code when read: convert "
                f"it, python -m f5kit.convert {repo_id}/{pickled[0]} OUT --to f5kit"
            )
        weights = pickled
    if not weights:
        raise UserError(f"{repo_id} holds no weights of a model; it has {_some(names) or 'nothing'}")
    if len(weights) > 1:
        raise UserError(
            f"{repo_id} holds {len(weights)} models ({_some(weights)}): name one, as in "
            f"load_model('{repo_id}/{weights[-1]}')"
        )
    place = PurePosixPath(weights[0]).parent
    above = [parent for parent in (place, *place.parents)]
    vocab = next((str(p / "vocab.txt") for p in above if str(p / "vocab.txt") in names), None)
    yaml = [n for n in names if n.endswith(".yaml") and PurePosixPath(n).parent == place]
    beside = [str(place / name) for name in _BESIDE if str(place / name) in names]
    return weights[0], sorted({weights[0], *beside, *yaml, *([vocab] if vocab else [])})


def _pick(found: list[str]) -> list[str]:
    """Where model.safetensors lies beside a config, the other files there are its other weights, or none of it."""
    own = [name for name in found if PurePosixPath(name).name == "model.safetensors"]
    return own if len(own) == 1 else found


def _some(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:6]) + (", ..." if len(names) > 6 else "")


def _safe(repo_id: str, names: Sequence[str]) -> list[str]:
    """The names, when none of them leads out of the folder that they are put in."""
    for name in names:
        parts = re.split(r"[/\\]", name)
        if not name or name.startswith(("/", "\\", "~")) or ".." in parts or ":" in parts[0] or "\0" in name:
            raise UserError(f"{repo_id} lists a file {name[:60]!r}, which leads out of its folder: do not use it")
    if len(names) > _MOST_FILES:
        raise UserError(f"{repo_id} lists {len(names)} files, and a model has a few: name its folder")
    return list(names)


# ---- the Hub


def find_token() -> str | None:
    """The secret HF_TOKEN, or what a login has left."""
    from huggingface_hub import get_token

    return secret("HF_TOKEN") or get_token()


def _list(repo_id: str) -> tuple[list[str], str, str | bool]:
    """(names, commit, the token that was needed or False). Asked without one first: most models are public."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info, token = HfApi(token=False).model_info(repo_id, timeout=30), False
    except (GatedRepoError, RepositoryNotFoundError):
        token = find_token()
        if not token:
            raise
        info = HfApi(token=token).model_info(repo_id, timeout=30)
    return [file.rfilename for file in info.siblings or []], info.sha, token


def _cached(repo_id: str) -> Path:
    """The newest revision of a repository in the cache. A commit that was fetched has no name there but its own."""
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE, f"models--{repo_id.replace('/', '--')}", "snapshots")
    found = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime) if snapshots.is_dir() else []
    if not found:
        raise UserError(f"there is no folder {repo_id} here, and it is not in the cache: switch HF_HUB_OFFLINE off")
    return found[-1]


def _fetch(repo_id: str, revision: str, names: Sequence[str], token: str | bool) -> Path:
    """The folder of the cache that holds these files of that commit."""
    from huggingface_hub import hf_hub_download, snapshot_download

    if not names:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=["README.md"], token=token))
    for name in names:
        path = Path(hf_hub_download(repo_id, name, revision=revision, token=token))
    return path.parents[len(PurePosixPath(names[-1]).parts) - 1]


# ---- what the files say


def card_facts(folder: Path) -> dict:
    """The header of README.md: "license", "base_model", "language" and whatever else is there; {} without one."""
    import yaml

    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace")[:100_000] if card.is_file() else ""
    found = re.match(r"\s*---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        facts = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError:
        facts = {}
    return facts if isinstance(facts, dict) else {}


def describe_repository(repo_id: str, folder: Path, revision: str = "") -> str:
    """Licence, base model and the beginning of the card, as text."""
    facts = card_facts(folder)
    base, licence = facts.get("base_model"), facts.get("license") or facts.get("license_name")
    lines = [f"{repo_id}{f' at {revision[:8]}' if revision else ''}"]
    lines += [f"licence: {licence}" if licence else "licence: its card names none; ask its owner before you use it"]
    lines += [f"base model: {base if isinstance(base, str) else ', '.join(map(str, base))}"] if base else []
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "it has no card"
    text = re.sub(r"\A\s*---\s*\n.*?\n---\s*(?:\n|$)", "", text, flags=re.DOTALL).strip()
    text = "".join(c for c in text if c.isprintable() or c == "\n")  # a card could hold a terminal's commands
    shown = text[:_CARD].rstrip() + (" ..." if len(text) > _CARD else "")
    return "\n".join([*lines, "", *(f"    {line}" for line in shown.splitlines()), ""])


def own_config(folder: Path) -> bool:
    """Whether config.json there is f5kit's: a vocabulary or another library's config is uploaded by that name too."""
    import json

    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "backbone" in values


_BACKBONES = {"DiT": "dit", "UNetT": "unett", "MMDiT": "mmdit"}
_ARCH = ("dim", "depth", "heads", "dim_head", "ff_mult", "text_dim", "conv_layers", "text_mask_padding", "qk_norm")
_ARCH += ("pe_attn_head", "long_skip_connection")


def read_yaml_config(path: Path) -> ModelConfig | None:
    """The config in a yaml of upstream's (F5-TTS, configs/), with its classes' defaults where it is silent; else None.

    The size of the vocabulary is that of upstream's release; the vocabulary itself says the rest.
    """
    import yaml

    try:
        model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        arch, backbone, mel = dict(model["arch"]), _BACKBONES[model["backbone"]], model.get("mel_spec", {})
        values = {"ff_mult": 4, "text_dim": mel.get("n_mel_channels", 100), "conv_layers": 0}
        values |= {name: arch[name] for name in _ARCH if name in arch}
        values["text_dim"] = values["text_dim"] or mel.get("n_mel_channels", 100)
        values["average_upsampling"] = arch.get("text_embedding_average_upsampling", False)
        kind = mel.get("mel_spec_type", "vocos")
        tokenizer = {"pinyin": "pinyin", "char": "char", "byte": "byte"}.get(model.get("tokenizer"), "custom")
        name = str(model.get("name") or path.stem)
        return ModelConfig(
            name, backbone, **values, tokenizer=tokenizer, normaliser="published", mel=MelConfig(kind)
        )
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError, UnicodeDecodeError):
        return None
