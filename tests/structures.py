"""Every structure that is compared with upstream, small enough to compare in a moment.

The six presets are scaled down from what config.py says of them; the others switch on what no preset uses.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
import torch

from f5kit.cfm import CFM
from f5kit.config import PRESETS, MelConfig, ModelConfig
from f5kit.text import Tokenizer

VOCAB = 60
PUBLISHED = ("F5TTS_v1_Base", "F5TTS_Base", "F5TTS_v1_Small", "F5TTS_Small", "E2TTS_Base", "E2TTS_Small")


def scaled(name: str, n_mels: int) -> ModelConfig:
    """A preset with a quarter of its heads, a quarter of their channels and a fifth of its blocks (an even number)."""
    preset = PRESETS[name]
    heads, dim_head = preset.heads // 4, preset.dim_head // 4
    return preset.replace(
        dim=heads * dim_head,
        heads=heads,
        dim_head=dim_head,
        depth=preset.depth // 10 * 2,
        text_dim=n_mels if preset.text_dim == preset.mel.n_mels else 32,
        conv_layers=preset.conv_layers // 2,
        vocab_size=VOCAB,
        mel=MelConfig(n_mels=n_mels),
    )


def structures(n_mels: int = 100) -> dict[str, ModelConfig]:
    """The configs by name. Those of the golden files have fewer mel bins, which makes the files small."""
    found = {name: scaled(name, n_mels) for name in PUBLISHED}
    v0, v1, e2 = found["F5TTS_Small"], found["F5TTS_v1_Small"], found["E2TTS_Small"]
    mmdit = v1.replace(backbone="mmdit", dim=64, heads=4, depth=3, text_dim=64, conv_layers=0)
    found |= {
        "v0 qk_norm": v0.replace(qk_norm="rms_norm"),
        "v1 qk_norm": v1.replace(qk_norm="rms_norm"),
        "v1 average_upsampling": v1.replace(average_upsampling=True),
        "v1 long_skip_connection": v1.replace(long_skip_connection=True),
        "E2 qk_norm, skip add": e2.replace(qk_norm="rms_norm", skip_connect_type="add"),
        "E2 text blocks, no skip": e2.replace(
            skip_connect_type="none", conv_layers=2, text_dim=32, text_mask_padding=True, pe_attn_head=None
        ),
        "MMDiT": mmdit,
        "MMDiT qk_norm": mmdit.replace(qk_norm="rms_norm"),
    }
    return {name: config.replace(name=name) for name, config in found.items()}


def letters(config: ModelConfig) -> Tokenizer:
    """A tokenizer of as many letters as the config asks for."""
    return Tokenizer([" ", *(chr(0x4E00 + i) for i in range(config.vocab_size - 1))])


@torch.no_grad()
def fill(model: CFM) -> CFM:
    """Weights made from their names, in fp64: the same on every machine, so that golden files need hold none.

    numpy promises this generator's stream for ever (NEP 19). No path is switched off, and the velocity is of the order
    of 1.
    """
    for name, parameter in model.double().named_parameters():
        z = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(parameter.shape))
        if name.endswith((".g", "norm.weight")):
            z = 1 + 0.3 * z
        elif ".grn." in name or parameter.ndim == 1:
            z = 0.3 * z
        elif "text_embed.text_embed" not in name:
            z = z / np.sqrt(z[0].size)
        parameter.copy_(torch.from_numpy(z))
    return model


def slug(name: str) -> str:
    """A structure's name as a file name."""
    return re.sub(r"\W+", "_", name)
