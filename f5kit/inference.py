"""Speaking: a model and a reference make a `Voice`, and a text makes a `Speech`.

Audio is float32 samples (nw,) at the model's rate, mels are raw log-mels (n, d).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from f5kit.audio import log_mel, match_loudness, player, read_audio, trim_silence, write_audio
from f5kit.cfm import CFM
from f5kit.checkpoint import RunFolder, load_model, model_folder
from f5kit.data import load_dataset
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.text import normalise, split_sentences
from f5kit.vocoder import Vocoder, load_vocoder

LONGEST_REFERENCE = 15.0  # seconds
LONGEST_CHUNK = 25.0  # seconds of reference and new speech together; models have heard 30 at most
SHORTEST_CHUNK = 0.4  # seconds of new speech
CROSS_FADE = 0.15  # seconds
DEMO_REFERENCE = "demo_0001"  # the bundled clip a preset speaks from when no reference is given


@dataclass(frozen=True)
class Reference:
    """The recording a voice continues, and what is said in it."""

    audio: Tensor
    """(nw,), levelled and trimmed."""
    mel: Tensor
    """(n, d)."""
    text: str
    """Normalised."""
    name: str
    """The clip's id or the file's name."""


@dataclass(frozen=True)
class Speech:
    """What a voice said. Shows itself as a player in a notebook."""

    audio: Tensor
    """(nw,), float32."""
    sample_rate: int
    mel: Tensor
    """(n, d), all chunks in a row."""
    text: str
    seed: int
    chunks: tuple[str, ...]
    """The pieces of text that were spoken one by one."""

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate

    def save(self, path: str | Path) -> Path:
        """Write a sound file; the suffix says which kind (wav, flac, mp3, ogg)."""
        return write_audio(path, self.audio, self.sample_rate)

    def _repr_html_(self) -> str:
        return player(self.audio, self.sample_rate)

    def __repr__(self) -> str:
        return f"Speech({self.seconds:.2f} s, seed {self.seed}, {self.text[:60]!r})"


class Voice:
    """A model with a reference, ready to speak. Made by `Voice.load`."""

    def __init__(self, model: CFM, reference: Reference, vocoder: Vocoder, precision: str = "fp32"):
        self.model, self.reference, self.vocoder, self.precision = model, reference, vocoder, precision

    @classmethod
    def load(
        cls,
        source: str | Path,
        reference: str | Path = "auto",
        reference_text: str | None = None,
        *,
        weights: str | None = None,
        vocoder: str | Vocoder = "auto",
        device: str | None = None,
    ) -> Voice:
        """A voice from anything `load_model` takes: a run folder, a checkpoint, an export, a preset.

        `reference` is a recording, with what is said in it as `reference_text`; or "auto": the most typical clip of
        the run's dataset, the one that an export carries, or the bundled demo clip for a preset.

        Raises UserError for what can't be found and for a reference that is silent, longer than 15 s or without text.
        """
        host = detect_host(device)
        model = load_model(source, weights=weights, device=host.device)
        if reference == "auto":
            reference, reference_text = find_reference(source)
        if not reference_text:
            raise UserError(f"{reference} needs reference_text: the words that are said in it")
        vocoder = load_vocoder(vocoder, model.config.mel, host.device) if isinstance(vocoder, str) else vocoder
        return cls(model, read_reference(reference, reference_text, model), vocoder, host.precision.value)

    def __repr__(self) -> str:
        return f"Voice({self.model.origin}; reference {self.reference.name}; vocoder {self.vocoder.name})"

    def speak(
        self,
        text: str,
        *,
        speed: float = 1.0,
        steps: int = 32,
        cfg_strength: float = 2.0,
        sway: float | None = -1.0,
        seed: int = 0,
        progress: bool = True,
    ) -> Speech:
        """Say a text of any length.

        `speed` 2 takes half as long; `steps` are the solver's; `cfg_strength` is the strength of guidance by text and
        reference; the same seed says the same thing the same way. Raises UserError for an empty text, for characters
        the model's vocabulary lacks, and for settings out of range.
        """
        spoken = normalise(text, self.model.tokenizer.normaliser)
        self._check(spoken, speed, steps)
        chunks = split_sentences(spoken, self._longest_text(speed))
        mels = list(self._mels(chunks, speed, steps, cfg_strength, sway, seed, progress))
        rate = self.model.config.mel.sample_rate
        audio = cross_fade([self.vocoder.decode(mel).cpu() for mel in mels], int(CROSS_FADE * rate))
        return Speech(audio, rate, torch.cat(mels).cpu(), text, seed, tuple(chunks))

    def _check(self, text: str, speed: float, steps: int) -> None:
        if not text:
            raise UserError("the text is empty: write what the voice should say")
        if not 0.25 <= speed <= 4:
            raise UserError(f"speed is {speed}; choose between 0.25 and 4")
        if steps < 1:
            raise UserError(f"steps is {steps}; the solver needs at least 1")
        self.model.tokenizer.encode(text)

    def _timing(self, text: str, speed: float) -> tuple[list[int], float, Tensor | None]:
        """The tokens of reference and text, the frames the text takes, and those of each token where the model knows.

        The reference's pace is kept: by characters, or as the model expects its letters to last.
        """
        given, mel, tokenizer = self.reference.text, self.reference.mel, self.model.tokenizer
        tokens, spoken = tokenizer.encode(f"{given} {text}"), len(tokenizer.encode(given)) + 1  # and the space
        shortest = SHORTEST_CHUNK * self.model.config.mel.frames_per_second
        lengths = self.model.letter_lengths(tokens, mel, spoken)
        if lengths is None:
            return tokens, max(len(mel) * len(text) / len(given) / speed, shortest), None
        expected = lengths[spoken:].sum()
        new = max(float(expected) / speed, shortest)
        return tokens, new, torch.cat((lengths[:spoken], lengths[spoken:] * (new / expected)))

    def _longest_text(self, speed: float) -> int:
        """Characters that fit a chunk beside the reference."""
        room = LONGEST_CHUNK * self.model.config.mel.frames_per_second - len(self.reference.mel)
        return max(int(room / len(self.reference.mel) * len(self.reference.text) * speed), 20)

    def _mels(self, chunks, speed, steps, cfg_strength, sway, seed, progress) -> Iterator[Tensor]:
        """The mel of each chunk, (n, d), without the reference."""
        from tqdm.auto import tqdm

        reference = self.reference.mel.to(self.model.device)
        bar = tqdm(total=len(chunks) * steps, desc="speaking", unit="step", disable=not progress, leave=False)
        for i, chunk in enumerate(chunks):
            tokens, new, lengths = self._timing(chunk, speed)
            with self.autocast():
                for mel in self.model.sample(  # noqa: B007
                    reference[None], [tokens], [round(len(reference) + new)], steps=steps, cfg_strength=cfg_strength,
                    sway=sway, seeds=seed + i, letter_lengths=None if lengths is None else [lengths],
                ):  # fmt: skip
                    bar.update()
            if not mel.isfinite().all():
                raise UserError(f"{chunk[:40]!r} came out non-finite in {self.precision}: set voice.precision = 'fp32'")
            yield mel[0, len(reference) :]
        bar.close()

    def autocast(self):
        """The context in which this voice's model runs: its precision."""
        if self.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.model.device.type, dtype)


def read_reference(path: str | Path, text: str, model: CFM) -> Reference:
    """A recording made ready: mono, the model's rate, trimmed, levelled. Raises UserError when it can't serve."""
    mel_config = model.config.mel
    audio = trim_silence(read_audio(path, mel_config.sample_rate), mel_config.sample_rate)
    seconds = len(audio) / mel_config.sample_rate
    if not 0.5 <= seconds <= LONGEST_REFERENCE or not audio.any():
        raise UserError(
            f"the reference {path} has {seconds:.1f} s of sound; "
            f"give one of 0.5 to {LONGEST_REFERENCE:.0f} s, best 4 to 10"
        )
    audio = match_loudness(audio)
    text = normalise(text, model.tokenizer.normaliser)
    model.tokenizer.encode(text)  # an unknown letter is told here, with the reference's name at hand
    return Reference(audio, log_mel(audio, mel_config), text, Path(path).stem)


def find_reference(source: str | Path) -> tuple[Path, str]:
    """(audio, text) that belongs to a run folder, a checkpoint in one, an export or the embedded voice; for another
    preset, the demo voice."""
    path = Path(source)
    carrier = path if path.exists() else model_folder(source) or path
    if (carrier / "reference.wav").is_file():
        return carrier / "reference.wav", (carrier / "reference.txt").read_text(encoding="utf-8").strip()
    for folder in (path, path.parent.parent):
        if (folder / "run.json").is_file():
            dataset = load_dataset(RunFolder(folder).dataset_folder)
            clip = dataset.typical_clip(LONGEST_REFERENCE)
            return dataset.path(clip), clip.text
    if path.exists():
        raise UserError(f"{path} carries no reference: give one, Voice.load(..., 'clip.wav', 'what is said in it')")
    return demo_reference()


def demo_reference() -> tuple[Path, str]:
    """(audio, text) of a clip of the bundled demo voice."""
    demo = Path(__file__).parent / "demo_voice"
    texts = dict(line.split("|", 1) for line in (demo / "metadata.csv").read_text(encoding="utf-8").splitlines())
    return demo / "wavs" / f"{DEMO_REFERENCE}.flac", texts[DEMO_REFERENCE]


def cross_fade(pieces: list[Tensor], overlap: int) -> Tensor:
    """Join sounds (nw,), each fading into the next over `overlap` samples."""
    audio = pieces[0]
    for piece in pieces[1:]:
        k = min(overlap, len(audio), len(piece))
        ramp = torch.linspace(0, 1, k)
        audio = torch.cat((audio[: len(audio) - k], audio[len(audio) - k :] * (1 - ramp) + piece[:k] * ramp, piece[k:]))
    return audio
