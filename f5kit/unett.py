"""The E2 TTS backbone: a flat U-Net transformer over the flow time and the mel frames, with the text beside them.

    b  items    n  mel frames    nt  text tokens    d  mel bins    dt  text channels

Reference: E2 TTS (arXiv 2406.18009); F5-TTS, src/f5_tts/model/backbones/unett.py (v1.1.20). Upstream's text positions
stop counting at frame 4096, and only where there are `conv_layers`, which no published E2 model has; ours count on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from x_transformers import RMSNorm  # two seconds, so nobody but the builder of an E2 model imports this file

from f5kit.config import ModelConfig
from f5kit.layers import (
    Attention,
    FeedForward,
    InputEmbedding,
    RotaryEmbedding,
    TextEmbedding,
    TimestepEmbedding,
    run_block,
)


class UNetTBlock(nn.ModuleList):
    """Skip projection, attention and feed-forward; the published names of the five parts are their numbers."""

    def __init__(self, config: ModelConfig, later_half: bool):
        dim = config.dim
        joins = later_half and config.skip_connect_type == "concat"
        super().__init__(
            [
                nn.Linear(dim * 2, dim, bias=False) if joins else None,
                RMSNorm(dim),
                Attention(dim, config.heads, config.dim_head, config.dropout, config.qk_norm, config.pe_attn_head),
                RMSNorm(dim),
                FeedForward(dim, config.ff_mult, config.dropout),
            ]
        )
        self.skip_connect_type = config.skip_connect_type

    def forward(self, x: Tensor, skip: Tensor | None, mask: Tensor | None, rope: Tensor) -> Tensor:
        skip_proj, attn_norm, attn, ff_norm, ff = self
        if skip is not None:
            if self.skip_connect_type == "concat":
                x = skip_proj(torch.cat((x, skip), dim=-1))
            elif self.skip_connect_type == "add":
                x = x + skip
        x = x + attn(attn_norm(x), mask, rope)
        return x + ff(ff_norm(x))


class UNetT(nn.Module):
    """Velocity of the flow at (x, time), given the mel to continue and the text. The time is one more position."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        mel_dim = config.mel.n_mels
        self.time_embed = TimestepEmbedding(config.dim)
        self.text_embed = TextEmbedding(
            config.vocab_size, config.text_dim, config.conv_layers, config.text_mask_padding, average_upsampling=False
        )
        self.input_embed = InputEmbedding(mel_dim, config.text_dim, config.dim)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.layers = nn.ModuleList(UNetTBlock(config, i >= config.depth // 2) for i in range(config.depth))
        self.norm_out = RMSNorm(config.dim)
        self.proj_out = nn.Linear(config.dim, mel_dim)
        self.recompute = "none"  # activation checkpointing (layers.run_block): the trainer sets it

    def embed_text(self, text: Tensor, n: int, mask: Tensor | None, drop: Tensor | None = None) -> Tensor:
        """text (b nt), -1 where there is none, to (b n dt). `drop` (b) is true where the text is withheld."""
        return self.text_embed(text, n, mask, drop)

    def forward(self, x: Tensor, cond: Tensor, text: Tensor, time: Tensor, mask: Tensor | None) -> Tensor:
        """x, cond (b n d), text from `embed_text` (b n dt), time (b), mask (b n) or None. Returns (b n d)."""
        h = self.input_embed(x, cond, text, mask)
        h = torch.cat((self.time_embed(time)[:, None], h), dim=1)  # b 1+n d
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        rope = self.rotary_embed(h.shape[1])
        skips: list[Tensor] = []
        for i, block in enumerate(self.layers):
            later_half = i >= len(self.layers) // 2
            if not later_half:
                skips.append(h)
            h = run_block(block, self.recompute, h, skips.pop() if later_half else None, mask, rope)
        return self.proj_out(self.norm_out(h)[:, 1:])
