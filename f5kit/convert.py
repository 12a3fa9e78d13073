"""Convert models between checkpoint worlds.

    python -m f5kit.convert SOURCE OUT --to f5kit    [--config NAME] [--vocab FILE] [--weights ema|raw]
    python -m f5kit.convert SOURCE OUT --to upstream [--config NAME] [--vocab FILE] [--weights ema|raw]

SOURCE is anything that `load_model` takes (a run folder, a checkpoint, an export, a published `.safetensors` with its
vocab.txt, a preset's name, a repository "user/name" of the Hub), or a `.pt` of upstream's Trainer or of its releases. A
`.pt` is a pickle: it is read by a process of its own that accepts tensors only, with torch 2.10 or newer.

OUT is a new folder.

`--to f5kit` writes model.safetensors (fp32), config.json and vocab.txt: `plan_run`, `Trainer`, `Voice.load` take it.

`--to upstream` writes, beside config.json for the way back:

    model_400.safetensors   the published layout: `ema_model.*`, `initted`, and `step` 0, so that upstream's EMA starts
                            afresh; load with `f5-tts_infer-cli --ckpt_file`, finetune on with
                            `f5-tts_finetune-cli --finetune --pretrain`
    vocab.txt               its vocabulary; `--vocab_file`, or `--tokenizer custom --tokenizer_path`
    model.yaml              its architecture; `--model_cfg`

Upstream's Trainer finetunes from the `.safetensors`, so no `.pt` is written. Upstream has no mean and deviation of mels
and fewer tokenizers: a model that needs them is refused.

Weights that carry no config.json need `--config`: F5TTS_v1_Base, F5TTS_Base, F5TTS_Base_bigvgan, E2TTS_Base and their
Small forms. Which of them fit is listed when it is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

import torch

from f5kit.cfm import CFM
from f5kit.checkpoint import export_model, load_model, read_meaning, write_meaning
from f5kit.config import MelConfig, ModelConfig
from f5kit.errors import UserError
from f5kit.repository import fetch_model, repository_name
from f5kit.weights import PICKLES, convert_pickle, to_published, write_tensors

UPSTREAM_TOKENIZERS = ("char", "pinyin", "byte", "custom")
_UPSTREAM_CLASS = {"dit": "DiT", "unett": "UNetT", "mmdit": "MMDiT"}
# f5kit's field and upstream's argument, by the backbones that take it.
_COMMON = ("dim", "depth", "heads", "dim_head", "ff_mult", "text_mask_padding", "qk_norm")
_WITH_CONVOLUTIONS = (*_COMMON, "text_dim", "conv_layers", "pe_attn_head")
_FIELDS = {
    "dit": (*_WITH_CONVOLUTIONS, "average_upsampling", "long_skip_connection"),
    "unett": _WITH_CONVOLUTIONS,
    "mmdit": _COMMON,
}
_RENAMED = {"average_upsampling": "text_embedding_average_upsampling"}


def convert_model(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    config: str | ModelConfig | None = None,
    vocab: str | Path | None = None,
    weights: str | None = None,
) -> Path:
    """Write the model `source` as a folder `out` for "f5kit" or "upstream", and return the folder.

    `config` and `vocab` say what weights mean that carry no config.json and vocab.txt; `weights` is "ema" or "raw", by
    default a run's choice, else EMA. The folder appears when all of it is written.

    Raises UserError for a source that can't be read, a model the other side can't hold, and a folder that is taken.
    """
    out = Path(out)
    if to not in ("f5kit", "upstream"):
        raise UserError(f"the model can't be converted to {to!r}; choose f5kit or upstream")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not empty: name a new folder")
    model = open_model(source, config=config, vocab=vocab, weights=weights)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if to == "f5kit":
            export_model(model, partial, torch.float32)
        else:
            write_upstream(model, partial)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def open_model(
    source: str | Path,
    *,
    config: str | ModelConfig | None = None,
    vocab: str | Path | None = None,
    weights: str | None = None,
) -> CFM:
    """`load_model`, and a `.pt` too, which is converted to safetensors first (`weights.convert_pickle`)."""
    if repository_name(source):
        found = fetch_model(str(source), pickles=True, show=True)
        source, config, vocab = found.weights, config or found.config(), vocab or found.vocab
    path = Path(source)
    if path.suffix not in PICKLES:
        return load_model(source, config=config, vocab=vocab, weights=weights)
    if config is None and (path.parent / "config.json").is_file():
        config = read_meaning(path.parent, vocab=vocab)[0]
    which = weights or "ema"
    model = load_model(convert_pickle(path, which), config=config, vocab=vocab or path.parent / "vocab.txt")
    model.origin = f"{path} ({which} weights)"
    return model


def write_upstream(model: CFM, folder: Path) -> Path:
    """Write a model in upstream's published layout, fp32, and return its weights file.

    Raises UserError for a model that upstream has no way to hold.
    """
    config = model.config
    require_upstream(config)
    folder.mkdir(parents=True, exist_ok=True)
    found = re.search(r"(?:update_|model_)(\d+)", model.origin)
    file = folder / f"model_{int(found[1]) if found else 0}.safetensors"
    write_tensors(file, to_published(model.state_dict()))
    write_meaning(folder, model)
    write_yaml(config, folder / "model.yaml")
    return file


def write_yaml(config: ModelConfig, path: Path) -> None:
    """What upstream's code needs to know of a model, for its `--model_cfg`. UserError for one that it can't hold."""
    import yaml

    require_upstream(config)
    path.write_text(yaml.safe_dump(upstream_config(config), sort_keys=False), encoding="utf-8")


def require_upstream(config: ModelConfig) -> None:
    """Raise UserError, naming what stands in the way, for a config that upstream can't express."""
    if (config.mel_mean, config.mel_std) != (0.0, 1.0):
        raise UserError(
            f"{config.name} reads mels scaled by mean {config.mel_mean:g} and deviation {config.mel_std:g}, which "
            "upstream does not know: take there what was finetuned from a published model"
        )
    if config.letter_lengths:
        raise UserError(
            f"{config.name} spreads its text by the lengths of letters, and upstream evenly: "
            "take there what was finetuned from a published model"
        )
    if config.tokenizer not in UPSTREAM_TOKENIZERS:
        raise UserError(
            f"{config.name} has the tokenizer {config.tokenizer!r}, which upstream lacks; "
            f"it has {', '.join(UPSTREAM_TOKENIZERS)}: take there a model with one of these"
        )
    if config.mel != MelConfig(config.mel.kind):
        raise UserError(f"{config.name} reads {config.mel}, and upstream's inference knows {MelConfig()} alone")


def upstream_config(config: ModelConfig) -> dict:
    """The part of upstream's yaml that says what the weights are (F5-TTS, configs/F5TTS_v1_Base.yaml)."""
    mel = config.mel
    return {
        "model": {
            "name": config.name,
            "tokenizer": "byte" if config.tokenizer == "byte" else "custom",
            "tokenizer_path": "vocab.txt",
            "backbone": _UPSTREAM_CLASS[config.backbone],
            "arch": {_RENAMED.get(name, name): getattr(config, name) for name in _FIELDS[config.backbone]},
            "mel_spec": {
                "target_sample_rate": mel.sample_rate,
                "n_mel_channels": mel.n_mels,
                "hop_length": mel.hop_length,
                "win_length": mel.win_length,
                "n_fft": mel.n_fft,
                "mel_spec_type": mel.kind,
            },
        }
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m f5kit.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a folder, a .safetensors, a .pt, or a preset's name")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--to", required=True, choices=("f5kit", "upstream"))
    parser.add_argument("--config", help="what the weights mean, where no config.json says so: F5TTS_v1_Base")
    parser.add_argument("--vocab", help="the vocab.txt, where it does not lie beside the weights")
    parser.add_argument("--weights", choices=("ema", "raw"), help="by default a run's choice, else ema")
    options = vars(parser.parse_args(arguments))
    try:
        folder = convert_model(**options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    for file in sorted(folder.iterdir()):
        print(f"{file}  {file.stat().st_size / 1e6:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
