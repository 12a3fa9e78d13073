"""Conditional flow matching: the loss that trains the model and the sampler that speaks with it.

    b  items    n  mel frames    d  mel bins    nt  text tokens

The flow carries noise x0 at time 0 along straight lines to the mel x1 at time 1. The model learns the line's velocity
x1 - x0 from any point x_t on it, from the mel around the missing span, and from the text of the whole clip
(F5-TTS, arXiv 2410.06885, section 3; Voicebox, arXiv 2306.15687; flow matching, arXiv 2210.02747).

All mels that enter or leave this file are raw natural-log mels. Inside, they are scaled by the config's mean and
deviation (0 and 1 in published models).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from f5kit.config import ModelConfig
from f5kit.data import Batch, to_device
from f5kit.dit import DiT
from f5kit.errors import UserError
from f5kit.layers import zero_outside
from f5kit.ode import integrate, time_grid
from f5kit.text import Tokenizer

AUDIO_DROP = 0.3  # share of clips trained without the surrounding mel (Voicebox p_drop)
TEXT_DROP = 0.2  # share trained with neither mel nor text, for classifier-free guidance (p_uncond)
SPAN = (0.7, 1.0)  # the missing span, as a share of the clip


@dataclass
class Draws:
    """The randomness of one batch, each item's its own."""

    noise: Tensor
    """b n d, x0; 0 behind an item's end."""
    time: Tensor
    """b, t in [0, 1)."""
    span: Tensor
    """b n, true on the frames to be filled in."""
    drop_audio: Tensor
    """b, true where the surrounding mel is withheld."""
    drop_text: Tensor
    """b, true where mel and text are withheld."""


def generator(*key) -> torch.Generator:
    """A CPU generator whose stream depends on the key alone: the same on every device and in every batch."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw(batch: Batch, seed: int | str) -> Draws:
    """Noise, time, span and drops for every item, keyed by (seed, step, position) and the item's own length."""
    b, n, d = batch.mel.shape
    noise, span = torch.zeros(b, n, d), torch.zeros(b, n, dtype=torch.bool)
    uniform = torch.empty(b, 5)
    for i, (length, position) in enumerate(zip(batch.lens.tolist(), batch.positions.tolist(), strict=True)):
        g = generator(seed, batch.step, position)
        uniform[i] = torch.rand(5, generator=g)
        noise[i, :length] = torch.randn(length, d, generator=g)
        filled = max(int(length * (SPAN[0] + (SPAN[1] - SPAN[0]) * uniform[i, 1].item())), 1)
        start = int((length - filled) * uniform[i, 2].item())
        span[i, start : start + filled] = True
    drop_text = uniform[:, 4] < TEXT_DROP
    return Draws(noise, uniform[:, 0], span, (uniform[:, 3] < AUDIO_DROP) | drop_text, drop_text)


def held_out_draws(batch: Batch, repeats: int, repeat: int) -> Draws:
    """Fixed draws to judge with: nothing withheld, and times spread evenly over [0, 1) by item and repeat."""
    draws = draw(batch, "heldout")
    items = len(batch.lens)
    draws.time = (repeat * items + torch.arange(items) + 0.5) / (repeats * items)
    draws.drop_audio = draws.drop_text = torch.zeros(items, dtype=torch.bool)
    return draws


def build_backbone(config: ModelConfig) -> nn.Module:
    """The backbone a config names, with fresh weights. All have one signature, dit.py's.

    What `embed_text` returns is the backbone's own affair: it goes back into its `forward` untouched.
    """
    if config.backbone == "unett":
        from f5kit.unett import UNetT

        return UNetT(config)
    if config.backbone == "mmdit":
        from f5kit.mmdit import MMDiT

        return MMDiT(config)
    return DiT(config)


class CFM(nn.Module):
    """A backbone with its flow. `config` and `tokenizer` say how its weights read text and mels."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer):
        super().__init__()
        if len(tokenizer.vocab) != config.vocab_size:
            raise UserError(
                f"{config.name} was made for {config.vocab_size} tokens and the vocabulary has {len(tokenizer.vocab)}: "
                "use the vocab.txt that belongs to the weights"
            )
        self.config, self.tokenizer = config, tokenizer
        self.origin = "fresh weights"  # where the weights came from, in words
        self.transformer = build_backbone(config)

    @property
    def device(self) -> torch.device:
        return self.transformer.proj_out.weight.device

    def scale(self, mel: Tensor) -> Tensor:
        """Raw log-mel to the model's own scale."""
        return (mel - self.config.mel_mean) / self.config.mel_std

    def unscale(self, mel: Tensor) -> Tensor:
        """The model's own scale to raw log-mel."""
        return mel * self.config.mel_std + self.config.mel_mean

    @torch.no_grad()
    def letter_lengths(self, tokens: Sequence[int], mel: Tensor | None = None, spoken: int = 0) -> Tensor | None:
        """Frames (nt,) that each token is expected to last; None where the model spreads no text by length.

        The first `spoken` tokens are said in the raw mel (m d): they last as they do there, and the others follow at
        that pace.
        """
        if not self.config.letter_lengths:
            return None
        text = torch.tensor([tokens], device=self.device)
        lengths = self.transformer.text_embed.lengths(text)[0]
        if mel is None or not spoken:
            return lengths
        heard, _ = self.transformer.text_embed.align(text[:, :spoken], self.scale(mel[None].to(self.device)), None)
        pace = len(mel) / lengths[:spoken].sum()
        return torch.cat((heard[0, :spoken], pace * lengths[spoken:]))

    def forward(self, batch: Batch, draws: Draws) -> Tensor:
        """The flow-matching loss (F5-TTS, equation 4), SUMMED over the bins of the missing frames.

        Divide by `draws.span.sum() * d` for the mean that upstream reports. The trainer divides once, by the count of
        the whole update, so that the result does not depend on how the update was cut into batches. A model that
        spreads its text by the lengths of letters is told them, and in training asked for them too.
        """
        mask = batch.mask
        x1 = zero_outside(self.scale(batch.mel), mask)
        x0, t = draws.noise, draws.time[:, None, None]
        x_t = (1 - t) * x0 + t * x1
        flow = x1 - x0
        cond = x1.masked_fill((draws.span | draws.drop_audio[:, None])[..., None], 0.0)
        text, misread = self._text(batch, x1, mask, draws.drop_text)
        velocity = self.transformer(x_t, cond, text, draws.time, mask)
        return (velocity.to(flow.dtype) - flow)[draws.span].square().sum() + misread

    def _text(self, batch: Batch, x1: Tensor, mask: Tensor | None, drop: Tensor) -> tuple[Tensor, Tensor | float]:
        """The embedded text of clips whose mel is known, and what training asks for beside the velocity."""
        n = x1.shape[1]
        if not self.config.letter_lengths:
            return self.transformer.embed_text(batch.text, n, mask, drop), 0.0
        lengths, error = self.transformer.text_embed.align(batch.text, x1, mask, batch.letter_lengths)
        return self.transformer.embed_text(batch.text, n, mask, drop, lengths), error if self.training else 0.0

    @torch.no_grad()
    def sample(
        self,
        cond: Tensor | None,
        text: Sequence[Sequence[int]],
        durations: Sequence[int],
        *,
        cond_lens: Sequence[int] | None = None,
        edit_mask: Tensor | None = None,
        steps: int = 32,
        cfg_strength: float = 2.0,
        sway: float | None = -1.0,
        epss: bool = True,
        method: str = "euler",
        seeds: Sequence[int] | int = 0,
        noise: Tensor | None = None,
        letter_lengths: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Speak: yield x_t after every step, as raw mels (b n d); the last one is the result.

        cond (b m d) is the raw mel to continue, of which `cond_lens` frames count (all by default); it stands unchanged
        at the start of every result, but for the frames where `edit_mask` (b m) is false: those are made anew (speech
        editing). Without a reference, cond is None and every frame is made (upstream's no_ref_audio).
        `text` holds each item's tokens, for the reference and the new words together.
        `durations` are total frames, the reference included; each is at least one more than its text and reference.
        The noise of an item depends on its seed and its own length alone; `noise` (b n d) replaces it.
        `letter_lengths` are each item's (nt,), as the method of that name gives them; else they are as expected.
        Classifier-free guidance: v + cfg_strength (v - v without mel and text), both in one pass (upstream, cfm.py).

        Raises UserError for an edit_mask of another shape than the reference.
        """
        device, dtype = self.device, self.transformer.proj_out.weight.dtype
        cond, given, durations = self._reference(cond, text, durations, cond_lens, edit_mask)
        b, n, d = cond.shape
        mask = None if min(durations) == n else (torch.arange(n) < torch.tensor(durations)[:, None]).to(device)
        prompt = torch.where(given, self.scale(cond), 0.0)
        if noise is None:
            seeds = [seeds] * b if isinstance(seeds, int) else seeds
            streams = [torch.Generator().manual_seed(s) for s in seeds]
            noise = [torch.randn(k, d, generator=g) for k, g in zip(durations, streams, strict=True)]
            noise = nn.utils.rnn.pad_sequence(noise, batch_first=True)
        velocity = self._velocity(prompt, text, mask, cfg_strength, dtype, letter_lengths)
        times = time_grid(steps, sway, epss, torch.promote_types(dtype, torch.float32)).to(device)
        for x in integrate(velocity, noise.to(device), times, method):
            yield torch.where(given, cond, self.unscale(x))

    def _reference(self, cond: Tensor | None, text, durations, cond_lens, edit_mask: Tensor | None):
        """The raw reference padded to the longest result (b n d), which of it is kept (b n 1), and final durations."""
        if cond is None:
            cond = torch.zeros(len(text), 0, self.config.mel.n_mels)
        b, m, _ = cond.shape
        own = torch.tensor(list(cond_lens) if cond_lens is not None else [m] * b)
        kept = torch.arange(m) < own[:, None]  # b m
        if edit_mask is not None:
            if edit_mask.shape != kept.shape:
                raise UserError(
                    f"edit_mask has the shape {tuple(edit_mask.shape)} and the reference {tuple(kept.shape)} items and "
                    "frames: give one truth value for each frame of the reference"
                )
            kept = kept & edit_mask.to(kept)
        durations = [max(int(n), len(t) + 1, int(c) + 1) for n, t, c in zip(durations, text, own, strict=True)]
        behind = max(durations) - m  # negative where cond is padded beyond every item
        cond = nn.functional.pad(cond.to(self.device), (0, 0, 0, behind))
        kept = nn.functional.pad(kept.to(self.device), (0, behind))
        return cond, kept[..., None], durations

    def _velocity(self, prompt: Tensor, text, mask: Tensor | None, cfg_strength: float, dtype, letter_lengths):
        """The function (t, x) -> velocity that the solver follows, with the text embedded once."""
        b, n, _ = prompt.shape
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(t, dtype=torch.long) for t in text], True, -1)
        tokens = tokens.to(prompt.device)
        guided = cfg_strength > 1e-5
        drop, spread = None, ()
        if letter_lengths is not None:
            spread = (nn.utils.rnn.pad_sequence(list(letter_lengths), batch_first=True).to(prompt.device),)
        if guided:  # each item twice in one batch: as it is, and with mel and text withheld
            drop = torch.arange(2 * b, device=prompt.device) >= b
            tokens = torch.cat((tokens, tokens))
            prompt = torch.cat((prompt, torch.zeros_like(prompt)))
            mask = None if mask is None else torch.cat((mask, mask))
            spread = tuple(torch.cat((lengths, lengths)) for lengths in spread)
        embedded = self.transformer.embed_text(tokens, n, mask, drop, *spread)
        prompt = prompt.to(dtype)

        def velocity(t: Tensor, x: Tensor) -> Tensor:
            both = torch.cat((x, x)) if guided else x
            v = self.transformer(both.to(dtype), prompt, embedded, t.expand(len(both)), mask).to(x.dtype)
            if not guided:
                return v
            v, null = v.chunk(2)
            return v + cfg_strength * (v - null)

        return velocity


@torch.no_grad()
def held_out_loss(model: CFM, batches: Sequence[Batch], repeats: int = 4) -> float:
    """The mean loss on fixed clips with fixed noise and times: comparable between checkpoints, runs and devices.

    In the model's own mel scale, where 1 is the square of `mel_std`.
    """
    training = model.training
    model.eval()
    total = count = 0.0
    for batch in batches:
        for repeat in range(repeats):
            draws = held_out_draws(replace(batch, step=repeat), repeats, repeat)  # other noise in each repeat
            count += draws.span.sum().item() * batch.mel.shape[-1]
            total += model(to_device(batch, model.device), to_device(draws, model.device)).item()
    model.train(training)
    return total / count
