"""Which configs a set of weights can have: its shapes tell the architecture, and not how to read it.

Upstream's v0 and v1 give equal names and shapes, and so do its models of Vocos' and BigVGAN's mels. What shapes leave
open are the readings; `probe.py` finds the right one by listening.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from f5kit.config import PRESETS, MelConfig, ModelConfig

Shapes = Mapping[str, tuple[int, ...]]

# What is published: a name, and the preset whose reading it has.
_FAMILIES = {"dit": ("F5TTS_v1", "F5TTS"), "unett": ("E2TTS",)}
_BIGVGAN = {"F5TTS"}  # families that are published for BigVGAN's mels too (F5TTS_Base_bigvgan)


def fitting_configs(shapes: Shapes) -> dict[str, ModelConfig]:
    """{name: config} of every published reading that has exactly this architecture.

    `shapes` are those of `transformer.*`, by name. A config of published size has the preset's name, one of another
    size the family's name and the size, as F5TTS_v1_64x2; "_bigvgan" stands behind the readings of BigVGAN's mels.
    Empty when the names are none of these models'.
    """
    sizes = _architecture(shapes)
    if sizes is None:
        return {}
    backbone = sizes.pop("backbone")
    readings = {}
    for family in _FAMILIES[backbone]:
        name = _name(family, sizes)
        config = PRESETS.get(name, PRESETS[f"{family}_Base"]).replace(**sizes, name=name)
        readings[name] = config
        if family in _BIGVGAN:
            name += "_bigvgan"
            readings[name] = config.replace(name=name, mel=MelConfig("bigvgan"))
    return readings


def _name(family: str, sizes: dict) -> str:
    """The preset of these sizes (its vocabulary may have been extended), else the sizes themselves."""
    for name in (f"{family}_Base", f"{family}_Small"):
        if PRESETS[name] == PRESETS[name].replace(**{**sizes, "vocab_size": PRESETS[name].vocab_size}):
            return name
    return f"{family}_{sizes['dim']}x{sizes['depth']}"


def _architecture(shapes: Shapes) -> dict | None:
    """The fields of ModelConfig that names and shapes tell, or None for another kind of model."""
    get = {name.removeprefix("transformer."): shape for name, shape in shapes.items()}
    block = "transformer_blocks.0.attn" if "transformer_blocks.0.attn.to_q.weight" in get else "layers.0.2"
    unett = block.startswith("layers")
    feed = "layers.0.4.ff.0.0.weight" if unett else "transformer_blocks.0.ff.ff.0.0.weight"
    needed = (f"{block}.to_q.weight", feed, "text_embed.text_embed.weight", "rotary_embed.inv_freq")
    if any(name not in get for name in needed) or "proj_out.weight" not in get:
        return None
    (inner, dim), (rows, text_dim) = get[needed[0]], get[needed[2]]
    dim_head = 2 * get["rotary_embed.inv_freq"][0]
    if get["proj_out.weight"][0] != MelConfig().n_mels or inner % dim_head:
        return None
    mult = get[feed][0] / dim
    return dict(
        backbone="unett" if unett else "dit",
        dim=dim,
        depth=_count(get, r"layers\.(\d+)\." if unett else r"transformer_blocks\.(\d+)\."),
        heads=inner // dim_head,
        dim_head=dim_head,
        ff_mult=int(mult) if mult.is_integer() else mult,
        text_dim=text_dim,
        conv_layers=_count(get, r"text_embed\.text_blocks\.(\d+)\."),
        vocab_size=rows - 1,
        qk_norm="rms_norm" if f"{block}.q_norm.weight" in get else None,
        long_skip_connection="long_skip_connection.weight" in get,
    )


def _count(names, pattern: str) -> int:
    return len({found[1] for name in names if (found := re.match(pattern, name))})
