"""Judging: sounds while training, and the checkpoints of a run side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from f5kit.cfm import CFM, held_out_loss
from f5kit.checkpoint import RunFolder
from f5kit.config import ModelConfig
from f5kit.data import Dataset
from f5kit.errors import UserError
from f5kit.inference import Speech, Voice, read_reference
from f5kit.vocoder import Vocoder, load_vocoder


class SampleCallback:
    """A trainer's callback that says a sentence at each checkpoint, with the raw and with the averaged weights.

    The sounds lie in the run's samples/ folder, as update_000400_ema.wav. Without a text, the sentence is that of a
    held-out clip, so that the recording can be heard beside it.
    """

    def __init__(self, dataset: Dataset, text: str | None = None, *, steps: int = 16, seed: int = 0, vocoder="auto"):
        self.dataset, self.steps, self.seed = dataset, steps, seed
        self.text = text or dataset.sample_clip().text
        self.vocoder = vocoder
        self.latest: dict[str, Speech] = {}

    def __call__(self, event: dict, trainer) -> None:
        if event["event"] != "save":
            return
        voice = self._voice(trainer)
        self.latest["raw"] = voice.speak(self.text, steps=self.steps, seed=self.seed, progress=False)
        with trainer.ema_weights():
            self.latest["ema"] = voice.speak(self.text, steps=self.steps, seed=self.seed, progress=False)
        for weights, speech in self.latest.items():
            speech.save(trainer.run.path / "samples" / f"update_{event['update']:06d}_{weights}.wav")

    def _voice(self, trainer) -> Voice:
        model = trainer.model
        if isinstance(self.vocoder, str):
            self.vocoder = load_vocoder(self.vocoder, model.config.mel, str(model.device))
        clip = self.dataset.typical_clip()
        reference = read_reference(self.dataset.path(clip), clip.text, model)
        return Voice(model, reference, self.vocoder, trainer.config.precision)


@dataclass
class Candidate:
    """One set of weights that could be the voice."""

    checkpoint: str
    """"base" or the checkpoint's name."""
    weights: str
    """"raw" or "ema"; "" for the base."""
    loss: float
    """Held-out loss on fixed clips, noise and times."""
    speech: Speech
    """The same sentence and seed for all."""

    @property
    def name(self) -> str:
        return f"{self.checkpoint} {self.weights}".strip()


def compare_checkpoints(
    run: str | Path | RunFolder,
    dataset: Dataset,
    text: str | None = None,
    *,
    steps: int = 32,
    seed: int = 0,
    vocoder: str | Vocoder = "auto",
    device: str | None = None,
) -> list[Candidate]:
    """The base model and each checkpoint's raw and EMA weights: held-out loss, and one sentence said by each.

    Damaged checkpoints are left out. The base comes first, then the checkpoints by age.
    """
    from tqdm.auto import tqdm

    run = run if isinstance(run, RunFolder) else RunFolder(run)
    whole = [c for c in run.checkpoints() if c.damage() is None]
    if not whole:
        raise UserError(f"{run.path} has no whole checkpoint to compare: train first")
    clip = dataset.typical_clip()
    text = text or dataset.sample_clip().text
    sources = [("base", "", run.info["model"])]
    sources += [(c.name, weights, c.path) for c in whole for weights in ("raw", "ema")]
    candidates = []
    for checkpoint, weights, source in tqdm(sources, desc="comparing", unit="model", leave=False):
        reference = dataset.path(clip), clip.text
        voice = Voice.load(source, *reference, weights=weights or None, vocoder=vocoder, device=device)
        vocoder = voice.vocoder  # loaded once
        with voice.autocast():
            loss = dataset_loss(voice.model, dataset)
        speech = voice.speak(text, steps=steps, seed=seed, progress=False)
        candidates.append(Candidate(checkpoint, weights, loss, speech))
    return candidates


def dataset_loss(model: CFM, dataset: Dataset, repeats: int = 4) -> float:
    """The loss of a model on the clips that the dataset judges by, with fixed noise and times."""
    batches = dataset.with_mel(model.config.mel).judging_batches(model.tokenizer)
    return held_out_loss(model, batches, repeats)


def loss_of_averages(dataset: Dataset, config: ModelConfig) -> float:
    """The held-out loss of the best predictor that knows only each mel bin's mean and deviation.

    For one bin, x1 ~ N(m, s^2) and x0 ~ N(0, 1) independent, the best guess of x1 - x0 from x_t leaves the variance
    s^2 / ((1 - t)^2 + t^2 s^2), and its integral over t in [0, 1] is (pi / 2) s. So the loss is (pi / 2) times the
    mean deviation of the bins, in the model's scale. A model that has learned anything about speech is below it.
    """
    mels = torch.cat([dataset.mel(clip) for clip in (dataset.heldout or dataset.train)[:16]])  # as in judging_batches
    return math.pi / 2 * (mels.std(dim=0) / config.mel_std).mean().item()
