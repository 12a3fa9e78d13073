"""A teacher for training alone: what each frame says and how long each letter lasts, as the synthesiser timed it.

A linear layer on the spread text, and another on the output of a middle block, name the phoneme of every frame
(cross-entropy); their gradients teach spelling and timing long before the flow-matching loss alone would, and the
layers are thrown away after training. The letters are spread as the synthesiser said them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from align import Alignment
from torch import Tensor, nn
from tqdm.auto import tqdm

from f5kit.audio import decode, measure_levels, to_mono
from f5kit.data import Batch, Dataset

WEIGHT = 0.15  # of each of the two cross-entropies, beside a flow-matching loss that falls from 3 to 0.4
KEPT = 0.05  # seconds of silence that preparation leaves before the speech
MIDDLE = 3  # the block that is asked


@dataclass(frozen=True)
class PhonemeTimes:
    """What is said when, by clip; clips of synthesisers that tell no times are not in it."""

    names: list[str]
    frames: dict[str, Tensor]
    """Clip id to (n,) int16, places in `names`: the phoneme of each mel frame."""
    letters: dict[str, Tensor]
    """Clip id to (nt,) float32: the frames that each letter lasts."""

    @classmethod
    def read(cls, corpus: Path, dataset: Dataset, cache: Path) -> PhonemeTimes:
        """From the corpus's manifest, shifted by the silence that preparation cut off; kept in `cache`."""
        if cache.is_file():
            return cls(*torch.load(cache))
        clips = {clip.id: clip for clip in dataset.train}
        rows = [json.loads(line) for line in (corpus / "manifest.jsonl").read_text(encoding="ascii").splitlines()]
        rows = [row for row in rows if row["phones"] and row["id"] in clips]
        spoken = {row["id"]: [phone.split(":") for phone in row["phones"].split()] for row in rows}
        inner = {row["id"]: [name for name, _ in spoken[row["id"]][1:-1]] for row in rows}  # without the edges' pauses
        alignment = Alignment([(row["text"], inner[row["id"]]) for row in rows])
        names, frames, letters = {}, {}, {}
        for row in tqdm(rows, desc="phonemes", unit="clip"):
            clip, length = row["id"], clips[row["id"]].frames
            cut = _silence_cut(corpus / row["split"] / "wavs" / f"{clip}.wav")
            ends = (torch.tensor([float(end) for _, end in spoken[clip]]) - cut) * dataset.mel_config.frames_per_second
            ids = torch.tensor([names.setdefault(name, len(names)) for name, _ in spoken[clip]], dtype=torch.int16)
            place = torch.searchsorted(ends, torch.arange(length).float(), right=True)
            frames[clip] = ids[place.clamp(max=len(ids) - 1)]
            until = torch.tensor(alignment.align(row["text"], inner[clip])).cumsum(0)  # phonemes said after each letter
            stops = ends[until].clamp(0, length)
            stops[until == 0], stops[-1] = 0.0, float(length)
            letters[clip] = stops.diff(prepend=torch.zeros(1))
        torch.save((list(names), frames, letters), cache)
        return cls(list(names), frames, letters)


def _silence_cut(path: Path) -> float:
    """Seconds that preparation takes from the start of a recording."""
    audio, rate = decode(path)
    return max(0.0, measure_levels(to_mono(audio)[0], rate).leading - KEPT)


class PhonemeGuide(nn.Module):
    """The linear layers, fed by hooks on the model."""

    def __init__(self, model: nn.Module, times: PhonemeTimes):
        super().__init__()
        self._times, self._right = times, [0.0, 0.0]
        config, transformer = model.config, model.transformer
        self.layers = nn.ModuleList(nn.Linear(dim, len(times.names)) for dim in (config.text_dim, config.dim))
        self._seen: list[Tensor] = [torch.empty(0)] * 2  # what the hooks saw last
        for i, part in enumerate((transformer.text_embed, transformer.transformer_blocks[MIDDLE])):
            part.register_forward_hook(lambda _, __, out, i=i: self._seen.__setitem__(i, out))
        self.to(model.device)

    def letter_lengths(self, batch: Batch) -> Tensor:
        """b nt, the frames of each letter, -1 for clips whose times nobody knows."""
        known = torch.full(batch.text.shape, -1.0)
        for i, clip in enumerate(batch.clip_ids):
            if clip in self._times.letters:
                lasts = self._times.letters[clip]
                known[i] = F.pad(lasts, (0, known.shape[1] - len(lasts)))
        return known

    def loss(self, batch: Batch, draws) -> Tensor:
        """After the model: both cross-entropies, in the unit of the flow-matching loss: a frame weighs as much as its
        bins."""
        wanted = torch.full(batch.mel.shape[:2], -1)  # b n
        for i, (clip, dropped) in enumerate(zip(batch.clip_ids, draws.drop_text.tolist(), strict=True)):
            if clip in self._times.frames and not dropped:
                wanted[i, : len(self._times.frames[clip])] = self._times.frames[clip].long()
        wanted, total = wanted.to(batch.mel.device), torch.zeros((), device=batch.mel.device)
        for i, layer in enumerate(self.layers):
            guess = layer(self._seen[i].float())  # b n phonemes
            known = wanted >= 0
            if known.any():  # nobody timed the clips of some voices
                total = total + WEIGHT * F.cross_entropy(guess[known], wanted[known])
                right = (guess.argmax(-1) == wanted)[known].float().mean()
                self._right[i] += 0.05 * (float(right) - self._right[i])
        return batch.mel.shape[-1] * total * draws.span.sum()  # the trainer divides by the missing frames' bins

    def said(self) -> str:
        """How well the teacher is followed."""
        return "phonemes right {:.2f} by the text, {:.2f} in the middle".format(*self._right)
