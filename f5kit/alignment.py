"""Which mel frames say which letter: monotonic alignment search.

    b  items    n  mel frames    nt  letters

For models that spread their text by how long each letter lasts (ModelConfig.letter_lengths). Where the mel is known, as
in training and for a reference, the lengths are read off it here; where it is still to be spoken, the model expects
them.

Source: Glow-TTS, arXiv 2005.11129, section 3.2 and algorithm 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def monotonic_lengths(score: Tensor, letters: Tensor, frames: Tensor) -> Tensor:
    """The frames that each letter lasts, (b nt): of all ways to say the letters in order, at least a frame each, the
    one with the highest sum of scores.

    score (b nt n) says how well a letter fits a frame; letters and frames (b) count what belongs to an item. An item of
    fewer frames than letters has them share its frames evenly.
    """
    device, (b, nt, n) = score.device, score.shape
    if score.is_meta:  # shapes alone are asked for
        return score.new_empty(b, nt, dtype=torch.float32)
    score = score.float().cpu().permute(2, 0, 1).contiguous()  # hundreds of tiny steps, a frame each: no work for a GPU
    letters, frames = letters.cpu(), frames.cpu()
    possible = torch.arange(nt) < letters[:, None]  # b nt
    best = torch.full((b, nt), -torch.inf)  # of all ways that end with this letter
    best[:, 0] = score[0, :, 0]
    came = torch.zeros(n, b, nt, dtype=torch.bool)  # true where the best way came from the letter before
    for t in range(1, n):
        before = F.pad(best[:, :-1], (1, 0), value=-torch.inf)
        came[t] = before > best
        best = torch.maximum(best, before) + score[t]
    lengths, item, letter = torch.zeros(b, nt), torch.arange(b), letters - 1
    for t in range(n - 1, -1, -1):
        own = t < frames
        lengths[item, letter] += own
        letter = letter - (came[t, item, letter] & own).long()
    crowded = (frames < letters)[:, None]
    return torch.where(crowded, possible * (frames / letters.clamp(min=1))[:, None], lengths).to(device)
