"""Finding out what weights mean when nobody wrote it down: the loss on known clips under each reading that fits.

Upstream's v0 and v1 models have equal names and shapes, and a wrong reading speaks gibberish without an error. The
right one has the lowest loss, because it is the one that was trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from f5kit.audio import log_mel, read_audio
from f5kit.cfm import CFM, held_out_loss
from f5kit.checkpoint import load_model, readings
from f5kit.config import ModelConfig
from f5kit.data import Batch, Dataset, collate
from f5kit.errors import UserError

CERTAIN = 3.0  # standard errors


@dataclass(frozen=True)
class Probe:
    """What `probe_configs` found."""

    name: str
    """The reading with the lowest loss."""
    config: ModelConfig
    """The same as a config: load_model(source, config=probe.config)."""
    losses: dict[str, float]
    """Mean loss of each reading, the lowest first."""
    margin: float
    """How much higher the next reading's loss is, as a share of the lowest; infinite when there is no other."""
    errors: float
    """The same difference, clip by clip, in standard errors of its mean; 0 for a single clip."""
    clips: int
    """How many clips were judged."""

    @property
    def certain(self) -> bool:
        """True when the difference is more than chance, or there is only one reading."""
        return len(self.losses) == 1 or self.errors >= CERTAIN

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in self.losses.items())
        if len(self.losses) == 1:
            return f"{self.name} is the only published reading that fits (loss on {self.clips} clips: {losses})"
        verdict = f"{self.name} it is" if self.certain else f"{self.name} is likelier, and more clips must decide"
        return (
            f"{verdict}: the next loss is {self.margin:.0%} higher, {self.errors:.1f} standard errors "
            f"(loss on {self.clips} clips: {losses})"
        )


def probe_configs(
    source: str | Path,
    data: Dataset | Sequence[tuple[str | Path | Tensor, str]],
    *,
    vocab: str | Path | None = None,
    clips: int = 8,
    repeats: int = 8,
    device: str = "cpu",
) -> Probe:
    """Judge weights without a config on clips whose words are known, under each published reading that fits.

    `source` is a folder or `.safetensors` as `load_model` takes; `data` a dataset, or pairs of a recording (a path, or
    samples (nw,) at 24 kHz) and its text, in a language that the model speaks. `clips` of them are heard `repeats`
    times each, with fixed noise and times that are the same for every reading.

    Raises UserError when no published reading fits the weights, or there is no clip.
    """
    from tqdm.auto import tqdm

    fits = readings(source)
    if not fits:
        raise UserError(f"{source} has the shapes of no published model: its config can't be found by trying")
    pairs = _pairs(data, clips)
    found: dict[str, list[float]] = {}
    bar = tqdm(total=len(fits) * len(pairs), desc="probing", unit="clip", leave=False)
    for name, config in fits.items():
        model = load_model(source, config=config, vocab=vocab, device=device)
        found[name] = []
        for position, pair in enumerate(pairs):
            found[name].append(held_out_loss(model, [_batch(model, *pair, position)], repeats))
            bar.update()
    bar.close()
    return _judge(fits, found)


def _judge(fits: dict[str, ModelConfig], found: dict[str, list[float]]) -> Probe:
    """The verdict on losses by reading and clip."""
    means = {name: sum(losses) / len(losses) for name, losses in found.items()}
    order = sorted(means, key=lambda name: means[name] if math.isfinite(means[name]) else math.inf)
    best, clips = order[0], len(found[order[0]])
    losses = {name: means[name] for name in order}
    if len(order) == 1:
        return Probe(best, fits[best], losses, math.inf, 0.0, clips)
    if not math.isfinite(losses[order[1]]):
        return Probe(best, fits[best], losses, math.inf, math.inf, clips)
    gaps = torch.tensor(found[order[1]]) - torch.tensor(found[best])
    margin = gaps.mean().item() / means[best]
    errors = (gaps.mean() / (gaps.std() / clips**0.5).clamp(min=1e-12)).item() if clips > 1 else 0.0
    return Probe(best, fits[best], losses, margin, errors, clips)


def _pairs(data, clips: int) -> list[tuple[Tensor | Path, str]]:
    """At most `clips` recordings with their texts; of a dataset, clips spread over the lengths."""
    if isinstance(data, Dataset):
        chosen = sorted(data.clips, key=lambda clip: clip.frames)
        chosen = chosen[:: max(1, len(chosen) // clips)]
        data = [(data.path(clip), clip.text) for clip in chosen]
    if not data:
        raise UserError("there is no clip to judge the weights on: give pairs of a recording and its text")
    return list(data)[:clips]


def _batch(model: CFM, recording: Tensor | str | Path, text: str, position: int) -> Batch:
    """One clip as the reading's own mel and tokens."""
    mel = model.config.mel
    audio = recording if isinstance(recording, Tensor) else read_audio(recording, mel.sample_rate)
    return collate([log_mel(audio, mel)], [model.tokenizer.encode(text)], [str(position)], 0, [position])
