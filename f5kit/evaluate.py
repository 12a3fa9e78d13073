"""Judging: sounds while training, and the checkpoints of a run side by side."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from f5kit.cfm import CFM, held_out_loss
from f5kit.checkpoint import RunFolder, load_model
from f5kit.config import ModelConfig
from f5kit.data import Dataset
from f5kit.errors import UserError
from f5kit.inference import Speech, Voice, read_reference
from f5kit.scores import interval
from f5kit.vocoder import Vocoder, load_vocoder


class SampleCallback:
    """A trainer's callback that says fixed sentences on the way, with the raw and with the averaged weights.

    It speaks every `sample_every` updates of the run's config, or, where that is 0, as often as the run saves, and at
    the end. The sounds lie in the run's samples/ folder, as update_000400_ema.wav (with more than one sentence,
    update_000400_ema_2.wav and so on), each beside its spectrogram, a .png; each is a "sample" event of the run.
    Without `texts`, the sentence is that of a held-out clip, so that the recording can be heard beside it.
    """

    def __init__(
        self, dataset: Dataset, texts: str | Sequence[str] | None = None, *, steps: int = 16, seed: int = 0,
        vocoder: str | Vocoder = "auto",
    ):  # fmt: skip
        self.dataset, self.steps, self.seed = dataset, steps, seed
        self.texts = [texts] if isinstance(texts, str) else list(texts or [dataset.sample_clip().text])
        self.vocoder = vocoder
        self.latest: dict[str, Speech] = {}
        self._spoken_at = -1

    def __call__(self, event: dict, trainer) -> None:
        every = trainer.config.sample_every or trainer.config.save_every
        due = event["event"] == "update" and event["update"] % every == 0
        last = event["event"] == "save" and event["update"] >= trainer.config.updates
        if not (due or last) or event["update"] == self._spoken_at:
            return
        self._spoken_at = event["update"]
        voice = self._voice(trainer)
        self._speak(voice, "raw", event["update"], trainer)
        with trainer.ema_weights():
            self._speak(voice, "ema", event["update"], trainer)

    def _speak(self, voice: Voice, weights: str, update: int, trainer) -> None:
        for number, text in enumerate(self.texts, 1):
            speech = voice.speak(text, steps=self.steps, seed=self.seed, progress=False)
            key = weights if number == 1 else f"{weights}_{number}"
            self.latest[key] = speech
            path = trainer.run.path / "samples" / f"update_{update:06d}_{key}.wav"
            try:
                speech.save(path)
                save_spectrogram(speech.mel, path.with_suffix(".png"))
            except OSError as error:
                warnings.warn(f"{path} could not be written, training goes on ({error})", stacklevel=2)
                return
            trainer.emit("sample", weights=weights, text=text, audio=f"samples/{path.name}",
                         spectrogram=f"samples/{path.stem}.png", audio_seconds=speech.seconds)  # fmt: skip

    def _voice(self, trainer) -> Voice:
        model = trainer.model
        if isinstance(self.vocoder, str):
            self.vocoder = load_vocoder(self.vocoder, model.config.mel, str(model.device))
        clip = self.dataset.typical_clip()
        reference = read_reference(self.dataset.path(clip), clip.text, model)
        return Voice(model, reference, self.vocoder, trainer.config.precision)


def save_spectrogram(mel: torch.Tensor, path: Path) -> None:
    """A log-mel (n d) as a picture, low bins below, one pixel a value."""
    from matplotlib.image import imsave

    imsave(path, mel.detach().cpu().float().numpy().T, origin="lower", cmap="magma")


@dataclass
class Candidate:
    """One set of weights that could be the voice."""

    checkpoint: str
    """"base" or the checkpoint's name."""
    weights: str
    """"raw", "ema", or "ema_075": three quarters of the way from the base to the EMA; "" for the base."""
    loss: float
    """Held-out loss on fixed clips, noise and times."""
    said: list[Speech]
    """The same sentences and seed for all."""

    @property
    def name(self) -> str:
        return f"{self.checkpoint} {self.weights}".strip()

    @property
    def speech(self) -> Speech:
        """The first of the sentences."""
        return self.said[0]

    @property
    def share(self) -> float:
        """How far from the base its weights are, on the way to the checkpoint's: 1 for those as trained."""
        return int(self.weights.rpartition("_")[2]) / 100 if "_" in self.weights else 1.0


def compare_checkpoints(
    run: str | Path | RunFolder,
    dataset: Dataset,
    texts: str | Sequence[str] | None = None,
    *,
    newest: int | None = None,
    between: Sequence[float] = (),
    reference: str | None = None,
    steps: int = 32,
    seed: int = 0,
    vocoder: str | Vocoder = "auto",
    device: str | None = None,
) -> list[Candidate]:
    """The base model and each checkpoint's raw and EMA weights: held-out loss, and some sentences said by each.

    `newest` limits it to the newest checkpoints; `between` adds points between the base (0) and the newest EMA (1).
    All speak from one clip, `dataset.typical_clip()` or the one whose id is `reference`. Damaged checkpoints are left
    out. The base comes first, then the checkpoints by age, then the points between.
    """
    from tqdm.auto import tqdm

    run = run if isinstance(run, RunFolder) else RunFolder(run)
    whole = [c for c in run.checkpoints() if c.damage() is None]
    if not whole:
        raise UserError(f"{run.path} has no whole checkpoint to compare: train first")
    clip = dataset.clip(reference) if reference else dataset.typical_clip()
    texts = [texts] if isinstance(texts, str) else list(texts or [dataset.sample_clip().text])
    base = run.info["model"]
    sources = [("base", "", base, "ema")]
    sources += [(c.name, w, c.path, w) for c in whole[-newest if newest else None :] for w in ("raw", "ema")]
    sources += [(whole[-1].name, f"ema_{round(100 * share):03d}", whole[-1].path, "ema") for share in between]
    candidates = []
    for checkpoint, weights, source, loaded in tqdm(sources, desc="comparing", unit="model", leave=False):
        chosen = None if checkpoint == "base" else loaded
        voice = Voice.load(source, dataset.path(clip), clip.text, weights=chosen, vocoder=vocoder, device=device)
        vocoder = voice.vocoder  # loaded once
        candidate = Candidate(checkpoint, weights, 0.0, [])
        if candidate.share != 1:
            interpolate(load_model(base, device=str(voice.model.device)), voice.model, candidate.share)
        with voice.autocast():
            candidate.loss = dataset_loss(voice.model, dataset)
        candidate.said += [voice.speak(text, steps=steps, seed=seed, progress=False) for text in texts]
        candidates.append(candidate)
    return candidates


@torch.no_grad()
def interpolate(base: CFM, tuned: CFM, share: float) -> CFM:
    """Put `tuned` on the straight line between the two: (1 - share) base + share tuned. Returns it.

    Points between often keep more of what the base knows than the end does (Wortsman et al. 2021, arXiv 2109.01903).
    Raises UserError for models of different shapes.
    """
    start, end = base.state_dict(), tuned.state_dict()
    if {k: t.shape for k, t in start.items()} != {k: t.shape for k, t in end.items()}:
        raise UserError(f"{base.origin} and {tuned.origin} differ in shape: there is no way between them")
    for name, tensor in end.items():
        tensor.lerp_(start[name].to(tensor), 1 - share)
    tuned.origin = f"{share:.2f} of the way from {base.origin} to {tuned.origin}"
    return tuned


def choose_candidate(run: RunFolder, candidate: Candidate, why: str) -> None:
    """Make a candidate the run's best. A point between base and checkpoint is written beside the checkpoint first."""
    if candidate.checkpoint == "base":
        raise UserError("the base is no checkpoint of the run: choose another candidate, or speak from the base itself")
    if candidate.share != 1:
        tuned = load_model(run.checkpoint(candidate.checkpoint).path, weights="ema")
        model = interpolate(load_model(run.info["model"]), tuned, candidate.share)
        run.add_weights(candidate.checkpoint, candidate.weights, model)
    run.choose(candidate.checkpoint, candidate.weights, why, candidate.loss)


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
    mels = torch.cat([dataset.mel(clip) for clip in dataset.judged])
    return math.pi / 2 * (mels.std(dim=0) / config.mel_std).mean().item()


@dataclass(frozen=True)
class TextAdvantage:
    """How much lower the held-out loss is with a clip's own text than with another clip's."""

    mean: float
    """Loss with the other text less loss with the own one: above 0 where the model has learned text."""
    low: float
    high: float
    """The paired 95 % interval over clips."""
    own: float
    """Mean loss with the own text."""
    clips: int


def text_advantage(
    model: CFM, dataset: Dataset, *, clips: int | None = None, repeats: int = 4, seed: int = 0
) -> TextAdvantage:
    """Whether a model has learned text and not sound alone, on the first `clips` held-out clips (all by default).

    Each clip is judged with its own text and with that of the clip next to it in length of text, so that the pace does
    not betray the wrong one; noise, times and missing span are the same for both. It rises long before a listener
    understands a word. Raises UserError when fewer than two clips are held out.
    """
    heldout = sorted(dataset.with_mel(model.config.mel).heldout[:clips], key=lambda clip: len(clip.text))
    if len(heldout) < 2:
        raise UserError(f"{dataset.folder} holds {len(heldout)} clips out: two or more are needed to exchange texts")
    others = [heldout[i + 1] if i + 1 < len(heldout) else heldout[i - 1] for i in range(len(heldout))]
    data = dataset.with_mel(model.config.mel)
    own, other = [], []
    for number, (clip, stranger) in enumerate(zip(heldout, others, strict=True)):
        for losses, text in ((own, clip.text), (other, stranger.text)):
            batch = data.batch([replace(clip, text=text)], model.tokenizer, positions=[number])
            losses.append(held_out_loss(model, [batch], repeats))
    low, high = interval(lambda a, b: (b - a).mean(-1), own, other, seed=seed)
    mean = sum(b - a for a, b in zip(own, other, strict=True)) / len(own)
    return TextAdvantage(mean, low, high, sum(own) / len(own), len(own))
