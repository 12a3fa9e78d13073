"""The F5-TTS backbone: a diffusion transformer over mel frames with the text beside them.

    b  items    n  mel frames    nt  text tokens    d  mel bins    dt  text channels

Reference: F5-TTS, src/f5_tts/model/backbones/dit.py (v1.1.20). v0 and v1 have equal weights' names and shapes; the
config says which one it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from f5kit.config import ModelConfig
from f5kit.layers import (
    AdaLayerNorm,
    AdaLayerNorm_Final,
    Attention,
    FeedForward,
    InputEmbedding,
    RotaryEmbedding,
    TextEmbedding,
    TimestepEmbedding,
    run_block,
)


class DiTBlock(nn.Module):
    """Attention and feed-forward, each shifted, scaled and gated by the time embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim = config.dim
        self.attn_norm = AdaLayerNorm(dim)
        self.attn = Attention(
            dim, config.heads, config.dim_head, config.dropout, config.qk_norm, config.pe_attn_head
        )
        self.ff_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff = FeedForward(dim, config.ff_mult, config.dropout)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor | None, rope: Tensor) -> Tensor:
        h, attn_gate, shift, scale, ff_gate = self.attn_norm(x, t)
        x = x + attn_gate * self.attn(h, mask, rope)
        h = self.ff_norm(x) * (1 + scale) + shift
        return x + ff_gate * self.ff(h)


class DiT(nn.Module):
    """Velocity of the flow at (x, time), given the mel to continue and the text."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        mel_dim = config.mel.n_mels
        self.time_embed = TimestepEmbedding(config.dim)
        self.text_embed = TextEmbedding(
            config.vocab_size, config.text_dim, config.conv_layers, config.text_mask_padding, config.average_upsampling,
            mel_dim if config.letter_lengths else None,
        )  # fmt: skip
        self.input_embed = InputEmbedding(mel_dim, config.text_dim, config.dim)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.transformer_blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.long_skip_connection = (
            nn.Linear(config.dim * 2, config.dim, bias=False) if config.long_skip_connection else None
        )
        self.norm_out = AdaLayerNorm_Final(config.dim)
        self.proj_out = nn.Linear(config.dim, mel_dim)
        self.recompute = "none"  # activation checkpointing (layers.run_block): the trainer sets it
        self._zero_init()

    def _zero_init(self) -> None:
        """Every block starts as the identity and the output as 0 (DiT, adaLN-Zero)."""
        for layer in (*(b.attn_norm.linear for b in self.transformer_blocks), self.norm_out.linear, self.proj_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def embed_text(
        self, text: Tensor, n: int, mask: Tensor | None, drop: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """text (b nt), -1 where there is none, to (b n dt). `drop` (b) is true where the text is withheld; `lengths`
        (b nt) are the frames each letter lasts, where that is known.

        Done once for a whole sampling run: the text does not change with time.
        """
        return self.text_embed(text, n, mask, drop, lengths)

    def forward(self, x: Tensor, cond: Tensor, text: Tensor, time: Tensor, mask: Tensor | None) -> Tensor:
        """x, cond (b n d), text from `embed_text` (b n dt), time (b), mask (b n) or None. Returns (b n d)."""
        t = self.time_embed(time)
        rope = self.rotary_embed(x.shape[1])
        h = residual = self.input_embed(x, cond, text, mask)
        for block in self.transformer_blocks:
            h = run_block(block, self.recompute, h, t, mask, rope)
        if self.long_skip_connection is not None:
            h = self.long_skip_connection(torch.cat((h, residual), dim=-1))
        return self.proj_out(self.norm_out(h, t))
