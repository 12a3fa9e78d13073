"""Changing a model's vocabulary without losing what it knows: rows of the text table move by token, new ones are added.

A vocabulary's token i owns row i + 1 of the table `text_embed` (row 0 is filler), and nothing else in the model knows
how many tokens there are.
"""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from f5kit.cfm import CFM
from f5kit.checkpoint import (
    WEIGHTS,
    RunFolder,
    load_model,
    load_tokenizer,
    read_meaning,
)
from f5kit.config import ModelConfig
from f5kit.errors import UserError
from f5kit.runs import Checkpoint, write_meaning
from f5kit.text import Tokenizer
from f5kit.weights import WithoutWeights, file_hash, read_tensors, sync, write_json, write_tensors

TABLE = "transformer.text_embed.text_embed.weight"  # in every backbone
# Letters that have no canonical decomposition, and the one whose sound or shape is nearest.
_NEAREST = dict(zip("đĐıßøØłŁæÆœŒðÐ¿¡«»", 'dDisoOlLaAoOdD?!""', strict=True))


def extend_vocab(
    source: str | Path,
    new: Iterable[str],
    out: str | Path,
    *,
    related: Mapping[str, str] | None = None,
    normaliser: str | None = None,
    config: str | ModelConfig | None = None,
) -> Path:
    """Write the folder `out`: the model `source` with more tokens behind its own, whose ids stay as they are.

    `source` is anything `load_model` takes; of a run or a checkpoint, raw and averaged weights and the optimizer all
    go along. `new` holds the tokens, as `coverage` gives them; those that are there already are passed over. A new
    token's row starts as that of a letter it is related to: as `related` says ({"ñ": "n"}), else the letter without
    its accents, or in the other case, when the vocabulary has it; else as the mean of all rows. `normaliser` changes
    how text is cleaned, as in "basic+numbers:es".

    The folder appears whole, by one rename; one made by this function before is replaced. Raises UserError when
    there is nothing to add, for tokens that no text can hold, and for related letters that are not known.
    """
    old = _tokenizer(source, config)
    if old.name == "byte":
        raise UserError(f"{source} reads bytes: it has every character already")
    tokens = [token for token in dict.fromkeys(unicodedata.normalize("NFC", t) for t in new) if token not in old.vocab]
    for token in tokens:
        if not token.strip() or set(token) & set("\r\n") or (old.name == "char" and len(token) != 1):
            raise UserError(f"{token!r} can't be a token of the {old.name} tokenizer: give single characters")
    if not tokens and normaliser in (None, old.normaliser):
        raise UserError(f"{source} knows every one of these characters: use it as it is")
    return remap_vocab(
        source, [*old.vocab, *sorted(tokens)], out, related=related, normaliser=normaliser, config=config
    )


def remap_vocab(
    source: str | Path,
    vocab: Sequence[str],
    out: str | Path,
    *,
    related: Mapping[str, str] | None = None,
    normaliser: str | None = None,
    config: str | ModelConfig | None = None,
) -> Path:
    """Write the folder `out`: the model `source` with the vocabulary `vocab`, each token with the row it had before.

    Tokens it lacks are left out; new ones start as in `extend_vocab`. Arguments, folder and errors are the same.
    """
    old, out = _tokenizer(source, config), Path(out)
    tokenizer = Tokenizer(list(vocab), old.name, normaliser or old.normaliser)
    sources = row_sources(old.vocab, tokenizer.vocab, related or {})
    if out.exists() and not (out / "extended.json").is_file():
        raise UserError(f"{out} exists and was not made by this function: choose another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write(source, partial, tokenizer, sources, config)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def find_extended(base: str | Path, folder: str | Path) -> str:
    """`folder` when it holds the model `base` with another vocabulary, else `base`: what to train from."""
    file = Path(folder) / "extended.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf-8"))["base"] == _name(base):
        return str(folder)
    return str(base)


def row_sources(old: Sequence[str], new: Sequence[str], related: Mapping[str, str]) -> list[int | None]:
    """For each token of `new` the index in `old` of the token whose row it starts with; None is the mean of all."""
    place = {token: i for i, token in enumerate(old)}
    strange = [f"{letter!r}" for letter in related.values() if letter not in place]
    if strange:
        raise UserError(f"related names {', '.join(strange)}, which the vocabulary lacks: name letters it has")
    found = []
    for token in new:
        candidates = [token, related.get(token), *_relatives(token)]
        found.append(next((place[c] for c in candidates if c in place), None))
    return found


def _relatives(token: str) -> Iterable[str]:
    """Letters to start from, the nearest first: with one accent less, with none, and the same in the other case."""
    for letter in (token, token.lower(), token.upper()):
        yield letter
        base, *accents = unicodedata.normalize("NFD", letter)
        for count in range(len(accents) - 1, -1, -1):
            for kept in combinations(accents, count):
                yield unicodedata.normalize("NFC", base + "".join(kept))
        if letter in _NEAREST:
            yield _NEAREST[letter]


def remap_rows(table: Tensor, sources: Sequence[int | None], mean: bool = True) -> Tensor:
    """The text table (tokens + 1, d) in a new order: row 0, then for each token the row of its source.

    Where there is no source, the mean of all tokens' rows, or zeros where not `mean`.
    """
    rows = [table[:1]]
    filling = table[1:].float().mean(dim=0).to(table.dtype) if mean else torch.zeros_like(table[0])
    rows += [filling[None] if i is None else table[i + 1][None] for i in sources]
    return torch.cat(rows)


def _tokenizer(source: str | Path, config: str | ModelConfig | None) -> Tokenizer:
    return read_meaning(Path(source), config)[1] if config else load_tokenizer(source)


def _name(source: str | Path) -> str:
    """A folder's full path, or a preset's name."""
    return str(Path(source).resolve()) if Path(source).exists() else str(source)


def _write(source, folder: Path, tokenizer: Tokenizer, sources: list[int | None], config) -> None:
    """The files of the new model: a whole checkpoint for a checkpoint, weights and their meaning for anything else."""
    path = Path(source)
    path = RunFolder(path).checkpoint().path if (path / "checkpoints").is_dir() else path
    if (path / "state.json").is_file():
        damage = Checkpoint(path, 0).damage()
        if damage:
            raise UserError(f"{path} is damaged ({damage}): choose another checkpoint")
        config, old = read_meaning(path, config)
        for name in WEIGHTS.values():
            tensors = read_tensors(path / name)
            write_tensors(folder / name, {**tensors, TABLE: remap_rows(tensors[TABLE], sources)})
        kept = _remap_optimizer(read_tensors(path / "optimizer.safetensors"), old.vocab, tokenizer.vocab)
        write_tensors(folder / "optimizer.safetensors", kept)
        shutil.copy(path / "state.json", folder)
    else:
        model = load_model(source, config=config)
        config, tensors = model.config, model.state_dict()
        write_tensors(folder / "model.safetensors", {**tensors, TABLE: remap_rows(tensors[TABLE], sources)})
        for name in ("reference.wav", "reference.txt"):
            if (path / name).is_file():
                shutil.copy(path / name, folder)
    with WithoutWeights():
        config = config.replace(vocab_size=len(tokenizer.vocab), normaliser=tokenizer.normaliser)
        write_meaning(folder, CFM(config, tokenizer))
    write_json(folder / "extended.json", {"base": _name(source), "tokens": len(tokenizer.vocab)})
    if (folder / "state.json").is_file():
        write_json(folder / "manifest.json", {f.name: file_hash(f) for f in sorted(folder.iterdir())})
    sync(folder)


def _remap_optimizer(tensors: dict[str, Tensor], old: list[str], new: list[str]) -> dict[str, Tensor]:
    """The optimizer's state with the table's moments moved by token and zero for new ones.

    8-bit moments stand in blocks that do not end where rows do; of these the table's are left out, and the optimizer
    begins them anew.
    """
    own = {key: value for key, value in tensors.items() if key.rsplit("/", 1)[0] == TABLE}
    rest = {key: value for key, value in tensors.items() if key not in own}
    shape = (len(old) + 1,)
    if any(v.ndim and (v.shape[:1] != shape or not v.is_floating_point()) for v in own.values()):
        return rest
    place = {token: i for i, token in enumerate(old)}
    sources = [place.get(token) for token in new]
    return rest | {key: remap_rows(v, sources, mean=False) if v.ndim else v for key, v in own.items()}
