"""The MMDiT backbone: text and mel frames are two streams with weights of their own that meet in joint attention.

    b  items    n  mel frames    nt  text tokens    d  mel bins    dim  the model's width    h  heads

Reference: Stable Diffusion 3 (arXiv 2403.03206); F5-TTS, src/f5_tts/model/backbones/mmdit.py (v1.1.20). Upstream's
text positions stop counting at token 1024: ours count on, so longer texts read differently there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from f5kit.config import ModelConfig
from f5kit.layers import (
    AdaLayerNorm,
    AdaLayerNorm_Final,
    Attention,
    ConvPositionEmbedding,
    FeedForward,
    RotaryEmbedding,
    TimestepEmbedding,
    angles,
    attend,
    rotate,
    run_block,
    zero_outside,
)


class TokenEmbedding(nn.Module):
    """Tokens (b nt), -1 where there is none, to (b nt dim): a table and positions."""

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.text_embed = nn.Embedding(vocab_size + 1, dim)  # row 0 is filler: what a withheld text consists of

    def forward(self, text: Tensor, own: Tensor | None, drop: Tensor | None) -> Tensor:
        tokens = text + 1
        if drop is not None:
            tokens = tokens.masked_fill(drop[:, None], 0)
        x = self.text_embed(tokens)  # b nt dim
        theta = angles(x.shape[1], x.shape[2], x.device)
        return zero_outside(x + torch.cat((theta.cos(), theta.sin()), dim=-1).to(x.dtype), own)


class AudioEmbedding(nn.Module):
    """The noisy mel and the mel it is conditioned on, side by side, projected to the model's width."""

    def __init__(self, mel_dim: int, dim: int):
        super().__init__()
        self.linear = nn.Linear(mel_dim * 2, dim)
        self.conv_pos_embed = ConvPositionEmbedding(dim)

    def forward(self, x: Tensor, cond: Tensor, mask: Tensor | None) -> Tensor:
        x = self.linear(torch.cat((x, cond), dim=-1))
        return x + self.conv_pos_embed(x, mask)  # in this order the sum lies in memory as x does, frame by frame


class JointAttention(Attention):
    """Attention over an item's frames and tokens together; each stream has its own projections and positions.

    The text's output is not projected in the last block (`last`), where nobody reads it.
    """

    def __init__(self, config: ModelConfig, last: bool):
        dim, inner = config.dim, config.heads * config.dim_head
        super().__init__(dim, config.heads, config.dim_head, config.dropout, config.qk_norm, None)
        self.to_q_c, self.to_k_c, self.to_v_c = (nn.Linear(dim, inner) for _ in range(3))
        self.c_q_norm, self.c_k_norm = (
            nn.RMSNorm(config.dim_head, eps=1e-6) if config.qk_norm else None for _ in range(2)
        )
        self.to_out_c = None if last else nn.Linear(inner, dim)

    def forward(self, x: Tensor, c: Tensor, mask: Tensor | None, ropes: tuple) -> tuple[Tensor, Tensor | None]:
        """x (b n dim), c (b nt dim), mask (b n+nt) or None, ropes of frames and tokens. Returns the same two shapes."""
        rope, c_rope = ropes
        frames = self._heads(x, (self.to_q, self.to_k, self.to_v), (self.q_norm, self.k_norm), rope)
        tokens = self._heads(c, (self.to_q_c, self.to_k_c, self.to_v_c), (self.c_q_norm, self.c_k_norm), c_rope)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(frames, tokens, strict=True))  # b h n+nt d
        out = attend(q, k, v.to(q.dtype), mask).transpose(1, 2).flatten(-2)
        x, c = out[:, : x.shape[1]], out[:, x.shape[1] :]
        for layer in self.to_out:
            x = layer(x)
        return x, None if self.to_out_c is None else self.to_out_c(c)

    def _heads(self, x: Tensor, projections, norms, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their positions, and values: (b h n d) each."""
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in projections)
        if norms[0] is not None:
            q, k = norms[0](q), norms[1](k)
        return rotate(q, rope), rotate(k, rope), v


class MMDiTBlock(nn.Module):
    """Joint attention, then a feed-forward in each stream, all modulated by the time. `last` ends the text's stream."""

    def __init__(self, config: ModelConfig, last: bool):
        super().__init__()
        dim = config.dim
        self.last = last
        self.attn_norm_c = AdaLayerNorm_Final(dim) if last else AdaLayerNorm(dim)
        self.attn_norm_x = AdaLayerNorm(dim)
        self.attn = JointAttention(config, last)
        if not last:
            self.ff_norm_c = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
            self.ff_c = FeedForward(dim, config.ff_mult, config.dropout)
        self.ff_norm_x = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff_x = FeedForward(dim, config.ff_mult, config.dropout)

    def forward(self, x: Tensor, c: Tensor, t: Tensor, mask: Tensor | None, ropes: tuple) -> tuple[Tensor, Tensor]:
        h, attn_gate, shift, scale, ff_gate = self.attn_norm_x(x, t)
        h_c, *modulation = (self.attn_norm_c(c, t),) if self.last else self.attn_norm_c(c, t)
        attended, attended_c = self.attn(h, h_c, mask, ropes)
        x = x + attn_gate * attended
        x = x + ff_gate * self.ff_x(self.ff_norm_x(x) * (1 + scale) + shift)
        if not self.last:
            attn_gate, shift, scale, ff_gate = modulation
            c = c + attn_gate * attended_c
            c = c + ff_gate * self.ff_c(self.ff_norm_c(c) * (1 + scale) + shift)
        return x, c


class MMDiT(nn.Module):
    """Velocity of the flow at (x, time), given the mel to continue and the text. Text may outnumber the frames."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        mel_dim = config.mel.n_mels
        self.time_embed = TimestepEmbedding(config.dim)
        self.text_embed = TokenEmbedding(config.vocab_size, config.dim)
        self.audio_embed = AudioEmbedding(mel_dim, config.dim)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.transformer_blocks = nn.ModuleList(
            MMDiTBlock(config, last=i == config.depth - 1) for i in range(config.depth)
        )
        self.norm_out = AdaLayerNorm_Final(config.dim)
        self.proj_out = nn.Linear(config.dim, mel_dim)
        self.recompute = "none"  # activation checkpointing (layers.run_block): the trainer sets it
        self._zero_init()

    def _zero_init(self) -> None:
        """Every block starts as the identity and the output as 0 (DiT, adaLN-Zero)."""
        norms = (norm for b in self.transformer_blocks for norm in (b.attn_norm_x, b.attn_norm_c))
        for layer in (*(norm.linear for norm in norms), self.norm_out.linear, self.proj_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def embed_text(
        self, text: Tensor, n: int, mask: Tensor | None, drop: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """text (b nt), -1 where there is none, to (b nt dim) and which of it is text (b nt), None if all is.

        `drop` (b) is true where the text is withheld; its length stays known. The frames, n and mask, don't matter.
        """
        own = text >= 0
        own = None if bool(own.all()) else own
        return self.text_embed(text, own, drop), own

    def forward(self, x: Tensor, cond: Tensor, text: tuple, time: Tensor, mask: Tensor | None) -> Tensor:
        """x, cond (b n d), text from `embed_text`, time (b), mask (b n) or None. Returns (b n d)."""
        c, own = text
        t = self.time_embed(time)
        h = self.audio_embed(x, cond, mask)
        ropes = self.rotary_embed(h.shape[1]), self.rotary_embed(c.shape[1])
        if mask is not None or own is not None:
            mask = h.new_ones(h.shape[:2], dtype=torch.bool) if mask is None else mask
            own = c.new_ones(c.shape[:2], dtype=torch.bool) if own is None else own
            mask = torch.cat((mask, own), dim=1)  # b n+nt
        for block in self.transformer_blocks:
            h, c = run_block(block, self.recompute, h, c, t, mask, ropes)
        return self.proj_out(self.norm_out(h, t))
