"""The blocks that the backbones are made of. Attribute names are upstream's, so that published weights load.

    b  items in the batch        n   mel frames            d   channels
    h  attention heads           nt  text tokens           dt  channels of the text embedding

`mask` (b n) is true on an item's own frames, or None when every item fills all n frames. Each block lets an item see
its own frames only, so that an item comes out the same alone and in any batch.

Reference for the arithmetic: F5-TTS, src/f5_tts/model/modules.py and backbones/dit.py (v1.1.20).
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from f5kit.alignment import monotonic_lengths

# Matrix products and fused attentions, as torch's dispatcher names them; not every version and device has them all.
_COSTLY = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (b n d) with the frames that are not an item's own set to 0."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def run_block(block: nn.Module, recompute: str, *args):
    """block(*args), keeping for the backward pass what `recompute` says.

    "none" keeps every activation. "full" keeps the block's input alone and runs the block again in the backward pass.
    "selective" keeps what matrix products and attention made, and repeats only the cheap arithmetic between them:
    norms, gates, activations, positions (Korthikanti et al., arXiv 2205.05198, by torch.utils.checkpoint's policies).
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return block(*args)
    if recompute == "full":
        return checkpoint(block, *args, use_reentrant=False)
    costly = [getattr(torch.ops.aten, name).default for name in _COSTLY if hasattr(torch.ops.aten, name)]
    return checkpoint(
        block, *args, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, costly)
    )


def frequencies(dim: int, device: torch.device | None = None) -> Tensor:
    """10000^(-2i/dim) for each pair of channels: (dim / 2), fp32."""
    return 1.0 / 10_000 ** (torch.arange(0, dim, 2, device=device).float() / dim)


def angles(n: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Position times frequency: (n, dim / 2). Never in half precision, where frame 2048 errs by 0.8 radian."""
    return torch.arange(n, device=device).to(dtype)[:, None] * frequencies(dim, device).to(dtype)


class RotaryEmbedding(nn.Module):
    """Rotary positions (RoFormer, section 3.4.2) as complex numbers, e^(i position frequency), one for each interleaved
    pair of channels.

    `inv_freq` is part of the published layout; the angles are computed afresh in fp32, whatever type the model was
    cast to.
    """

    def __init__(self, dim_head: int):
        super().__init__()
        self.dim_head = dim_head
        self.register_buffer("inv_freq", frequencies(dim_head))

    def forward(self, n: int) -> Tensor:
        """Positions 0 to n - 1: (n, d/2), complex."""
        wide = torch.promote_types(self.inv_freq.dtype, torch.float32)  # fp64 stays fp64
        theta = angles(n, self.dim_head, self.inv_freq.device, wide)
        return torch.complex(theta.cos(), theta.sin())


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair of channels of x (b h n d) by its position's angle: a product of complex numbers."""
    pairs = torch.view_as_complex(x.to(rope.real.dtype).unflatten(-1, (-1, 2)))  # b h n d/2
    return torch.view_as_real(pairs * rope).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of q, k and v (b h n d) over an item's own frames, mask (b n): (b h n d).

    torch's fused attention gains nothing by bf16 on a CPU, where plain matrix products do: speaking takes those, a head
    at a time, so that the scores stay in the processor's cache.
    """
    plain = q.device.type == "cpu" and q.dtype == torch.bfloat16
    if not plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
        keys = None if mask is None else mask[:, None, None, :]  # b 1 1 n
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keys)
    out = torch.empty_like(q)
    for i, item in enumerate(q / math.sqrt(q.shape[-1])):
        own = slice(None) if mask is None else mask[i]
        keys, values = k[i][:, own], v[i][:, own]  # h m d
        scores = q.new_empty(q.shape[2], keys.shape[1])  # n m
        weights = torch.empty_like(scores)
        for head in range(len(item)):
            torch.mm(item[head], keys[head].mT, out=scores)
            torch.softmax(scores, dim=-1, out=weights)
            torch.mm(weights, values[head], out=out[i, head])
    return out


class Attention(nn.Module):
    """Self-attention over an item's own frames. `pe_attn_head` is how many heads get positions (None: all)."""

    def __init__(
        self, dim: int, heads: int, dim_head: int, dropout: float, qk_norm: str | None, pe_attn_head: int | None
    ):
        super().__init__()
        self.heads, self.pe_attn_head = heads, pe_attn_head
        self.to_q = nn.Linear(dim, heads * dim_head)
        self.to_k = nn.Linear(dim, heads * dim_head)
        self.to_v = nn.Linear(dim, heads * dim_head)
        self.q_norm = nn.RMSNorm(dim_head, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(dim_head, eps=1e-6) if qk_norm else None
        self.to_out = nn.ModuleList([nn.Linear(heads * dim_head, dim), nn.Dropout(dropout)])

    def forward(self, x: Tensor, mask: Tensor | None, rope: Tensor) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._position(q, rope), self._position(k, rope)  # b h n d
        x = attend(q, k, v.to(q.dtype), mask).transpose(1, 2).flatten(-2)  # b n h*d
        for layer in self.to_out:
            x = layer(x)
        return x

    def _position(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.pe_attn_head is None:
            return rotate(x, rope)
        p = self.pe_attn_head
        return torch.cat((rotate(x[:, :p], rope), x[:, p:]), dim=1)


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), linear."""

    def __init__(self, dim: int, mult: float, dropout: float):
        super().__init__()
        inner = int(dim * mult)
        self.ff = nn.Sequential(
            nn.Sequential(nn.Linear(dim, inner), nn.GELU(approximate="tanh")),
            nn.Dropout(dropout),
            nn.Linear(inner, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class AdaLayerNorm(nn.Module):
    """Layer norm whose shift, scale and gate come from the time embedding (DiT, adaLN-Zero).

    Returns the modulated x for attention, the gate of attention, and shift, scale and gate of the feed-forward.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim * 6)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate, *feed_forward = self.linear(F.silu(t))[:, None].chunk(6, dim=-1)  # b 1 d each
        return self.norm(x) * (1 + scale) + shift, gate, *feed_forward


class AdaLayerNorm_Final(nn.Module):
    """The last norm: scale and shift only, and in this order, unlike in the blocks."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim * 2)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(t))[:, None].chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class TimestepEmbedding(nn.Module):
    """Flow time (b) in [0, 1] to channels (b d): sines and cosines of 1000 t, then two linear layers."""

    def __init__(self, dim: int, freq_dim: int = 256):
        super().__init__()
        self.freq_dim = freq_dim
        self.time_mlp = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, time: Tensor) -> Tensor:
        half = self.freq_dim // 2
        frequencies = torch.exp(torch.arange(half, device=time.device).float() * -(math.log(10_000) / (half - 1)))
        theta = 1000 * time[:, None] * frequencies
        return self.time_mlp(torch.cat((theta.sin(), theta.cos()), dim=-1).to(self.time_mlp[0].weight.dtype))


class ConvPositionEmbedding(nn.Module):
    """Relative positions from two grouped convolutions of 31 frames, each with Mish."""

    def __init__(self, dim: int, kernel_size: int = 31, groups: int = 16):
        super().__init__()
        convolution = dict(kernel_size=kernel_size, groups=groups, padding=kernel_size // 2)
        self.conv1d = nn.Sequential(
            nn.Conv1d(dim, dim, **convolution), nn.Mish(), nn.Conv1d(dim, dim, **convolution), nn.Mish()
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        first, mish, second, _ = self.conv1d
        x = first(zero_outside(x, mask).mT)  # b d n
        x = second(zero_outside(mish(x).mT, mask).mT)
        return mish(x).mT


class InputEmbedding(nn.Module):
    """The noisy mel, the mel it is conditioned on and the text, side by side, projected to the model's width."""

    def __init__(self, mel_dim: int, text_dim: int, dim: int):
        super().__init__()
        self.proj = nn.Linear(mel_dim * 2 + text_dim, dim)
        self.conv_pos_embed = ConvPositionEmbedding(dim)

    def forward(self, x: Tensor, cond: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        x = self.proj(torch.cat((x, cond, text), dim=-1))
        return x + self.conv_pos_embed(x, mask)  # in this order the sum lies in memory as x does, frame by frame


class GRN(nn.Module):
    """Global response normalisation over an item's own frames (ConvNeXt V2)."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # a sum of squares over frames overflows fp16
        energy = torch.linalg.vector_norm(zero_outside(x, mask), dim=1, keepdim=True, dtype=wide)  # b 1 d
        response = (energy / (energy.mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)
        return self.gamma * (x * response) + self.beta + x


class ConvNeXtV2Block(nn.Module):
    """Depthwise convolution of 7 positions and a gated pointwise network, with a residual."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, inner)
        self.grn = GRN(inner)
        self.pwconv2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm(self.dwconv(x.mT).mT)
        h = self.grn(F.gelu(self.pwconv1(h)), mask)
        return x + self.pwconv2(h)


class TextEmbedding(nn.Module):
    """Tokens (b nt), -1 where there is none, to one text vector for each mel frame (b n dt).

    The text stands at the start of the frames and filler (row 0) behind it; the model itself learns which frames say
    which letter. `mask_padding` (v1) keeps filler at zero; v0 embeds it like a letter. `average_upsampling` spreads the
    letters over the item's frames instead: evenly (ZipVoice), or, with a `mel_dim`, by how long each letter lasts: two
    more layers know what a letter's `length` and `sound` are like (Glow-TTS's duration predictor and prior).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        conv_layers: int,
        mask_padding: bool,
        average_upsampling: bool,
        mel_dim: int | None = None,
    ):
        super().__init__()
        self.mask_padding, self.average_upsampling = mask_padding, average_upsampling
        self.text_embed = nn.Embedding(vocab_size + 1, dim)
        if conv_layers:
            self.text_blocks = nn.ModuleList(ConvNeXtV2Block(dim, dim * 2) for _ in range(conv_layers))
        self.length = nn.Linear(dim, 1) if mel_dim else None
        self.sound = nn.Linear(dim, mel_dim) if mel_dim else None

    def forward(
        self, text: Tensor, n: int, mask: Tensor | None, drop: Tensor | None, lengths: Tensor | None = None
    ) -> Tensor:
        """`lengths` (b nt) are the frames that the letters last where they are known, 0 where there is none."""
        if self.length is not None:  # letters alone go through the blocks: filler would be as long as the mel
            x, letters = self._letters(text, text.shape[1], text >= 0, drop)
            own = torch.ones(len(text), n, dtype=torch.bool, device=text.device) if mask is None else mask
            return spread_by_length(x, self._lengths(x, letters) if lengths is None else lengths, own)
        x, letters = self._letters(text, n, mask, drop)
        return spread(x, letters, mask) if self.average_upsampling else x

    def align(
        self, text: Tensor, mel: Tensor, mask: Tensor | None, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The frames (b nt) that the letters of text (b nt) last in mel (b n d), and how wrong the two layers are
        there: squared errors, summed over the mel's bins.

        `known` (b nt) are lengths that need no search, below 0 for an item that has none.
        """
        x, letters = self._letters(text, text.shape[1], text >= 0, None)  # b nt dt
        sound, heard = self.sound(x).float(), relative(mel, mask)  # b nt d, b n d
        own = torch.ones(mel.shape[:2], dtype=torch.bool, device=mel.device) if mask is None else mask
        score = 2 * sound @ heard.mT - sound.square().sum(-1, keepdim=True)  # the squared distance, but for a constant
        lengths = monotonic_lengths(score, letters.sum(1), own.sum(1))
        if known is not None:
            lengths = torch.where(known[:, :1] >= 0, known, lengths)
        misheard = (spread_by_length(sound, lengths, own) - heard)[own].square().sum()
        mistimed = (self._lengths(x, letters) - lengths)[letters].square().sum()  # in frames, of all bins
        return lengths, 0.2 * misheard + 0.03 * mel.shape[-1] * mistimed

    def lengths(self, text: Tensor) -> Tensor:
        """Frames that each letter of text (b nt), -1 where there is none, is expected to last: (b nt), 0 behind it."""
        return self._lengths(*self._letters(text, text.shape[1], text >= 0, None))

    def _letters(self, text: Tensor, n: int, mask: Tensor | None, drop: Tensor | None) -> tuple[Tensor, Tensor]:
        """A vector for each letter, at the start of the frames (b n dt), and which of them are letters (b n)."""
        tokens = F.pad(text[:, :n] + 1, (0, max(n - text.shape[1], 0)))  # b n, 0 is filler
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)
        letters = tokens != 0  # taken before the drop: v1 without text still knows how long the text was
        if drop is not None:
            tokens = tokens.masked_fill(drop[:, None], 0)
        x = zero_outside(self.text_embed(tokens), mask)  # b n dt
        if hasattr(self, "text_blocks"):
            theta = angles(n, x.shape[-1], x.device)
            x = x + torch.cat((theta.cos(), theta.sin()), dim=-1).to(x.dtype)
            keep = letters if self.mask_padding else mask
            x = zero_outside(x, keep)
            for block in self.text_blocks:
                x = zero_outside(block(x, mask), keep)
        return x, letters

    def _lengths(self, x: Tensor, letters: Tensor) -> Tensor:
        return (10 * F.softplus(self.length(x)[..., 0].float())).masked_fill(~letters, 0.0)


def relative(mel: Tensor, mask: Tensor | None) -> Tensor:
    """mel (b n d) without each item's mean over its own frames: much of the speaker and the room is gone."""
    if mask is None:
        return mel - mel.mean(1, keepdim=True)
    mean = zero_outside(mel, mask).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    return zero_outside(mel - mean, mask)


def spread_by_length(x: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Repeat the letters' vectors of x (b nt dt) over the item's frames, mask (b n), in proportion to `lengths` (b nt),
    0 behind the text. Each frame takes the letter that is being said at its middle."""
    b, n = mask.shape
    end = lengths.cumsum(1)  # b nt
    middle = (torch.arange(n, device=x.device) + 0.5) / mask.sum(1, keepdim=True) * end[:, -1:]  # b n, as the lengths
    letter = torch.searchsorted(end, middle, right=True).clamp(max=lengths.shape[1] - 1)
    return zero_outside(x.gather(1, letter[..., None].expand(b, n, x.shape[-1])), mask)


def spread(x: Tensor, letters: Tensor, mask: Tensor | None) -> Tensor:
    """Repeat the letters' vectors of x (b n dt) evenly over the item's frames; the last ones get what is left over."""
    b, n, _ = x.shape
    frame = torch.arange(n, device=x.device)[None]  # 1 n
    length = letters.sum(1, keepdim=True).clamp(min=1)  # b 1
    frames = torch.full((b, 1), n, device=x.device) if mask is None else mask.sum(1, keepdim=True)
    each = (frames // length).clamp(min=1)  # frames of each letter, one more for the last `frames % length` letters
    short = (length - frames % length).clamp(min=0)
    letter = torch.where(frame < short * each, frame // each, short + (frame - short * each) // (each + 1))
    letter = letter.clamp(max=n - 1)[..., None].expand_as(x)
    x = zero_outside(x.gather(1, letter), mask)
    return x.masked_fill(~letters.any(1)[:, None, None], 0.0)
