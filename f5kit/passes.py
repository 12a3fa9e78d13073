"""One pass of a model over several pieces of speech, whoever asked for them: chunks of one text, or of many callers'.

    n  mel frames    d  mel bins    m  frames of a reference    nt  tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from f5kit.cfm import CFM
from f5kit.speech import Settings


@dataclass(frozen=True)
class Wanted:
    """A piece of speech before it is made."""

    reference: Tensor
    """(m, d), the raw mel that is continued."""
    tokens: list[int]
    """Of the reference's words and the new ones together."""
    frames: int
    """Of reference and new speech together."""
    seed: int
    lengths: Tensor | None = None
    """(nt,) frames that each token lasts, for a model that spreads its text by them."""


@torch.no_grad()
def make_mels(model: CFM, wanted: Sequence[Wanted], settings: Settings, step: Callable[[], None]) -> list[Tensor]:
    """The new mel of each piece, (n, d), without its reference. `step` is called after every step of the solver.

    Each is what it would be alone: items of a batch do not see each other (`CFM.sample`).
    """
    given = [len(piece.reference) for piece in wanted]
    spreads = None if wanted[0].lengths is None else [piece.lengths for piece in wanted]
    cond = pad_sequence([piece.reference for piece in wanted], batch_first=True).to(model.device)
    for mels in model.sample(  # noqa: B007
        cond, [piece.tokens for piece in wanted], [piece.frames for piece in wanted], cond_lens=given,
        steps=settings.steps, cfg_strength=settings.cfg_strength, sway=settings.sway, method=settings.method,
        seeds=[piece.seed for piece in wanted], letter_lengths=spreads,
    ):  # fmt: skip
        step()
    return [mel[start : piece.frames] for mel, start, piece in zip(mels, given, wanted, strict=True)]
