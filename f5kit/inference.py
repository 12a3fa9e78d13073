"""Speaking: a model and a reference make a `Voice`, and a text makes a `Speech`.

    text ──chunks──▶ pieces ──durations──▶ frames ──cfm──▶ mels ──vocoder──▶ sounds ──joining──▶ speech

Audio is float32 samples (nw,) at the model's rate, mels are raw log-mels (n, d).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from f5kit.asr import count_errors, load_recogniser
from f5kit.cfm import CFM
from f5kit.checkpoint import RunFolder, load_model, model_folder
from f5kit.chunks import ends_paragraph, ends_sentence, has_words, split_text
from f5kit.data import load_dataset
from f5kit.durations import SHORTEST, Pace, dataset_pace, usual_seconds
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.joining import LEAK, Joiner, cross_fade, leak, match_level, shorten_silences, speech_level
from f5kit.passes import Wanted, make_mels
from f5kit.provenance import model_name
from f5kit.reference import LONGEST_REFERENCE, Reference, read_reference
from f5kit.speech import LONGEST_TEXT, Cancelled, Chunk, Progress, Settings, Speech, join_speech
from f5kit.text import normalise
from f5kit.tuning import DTYPES, apply_environment, autocast, compile_backbone, speaking_precision
from f5kit.vocoder import Vocoder, load_vocoder

__all__ = ["LONGEST_REFERENCE", "Cancelled", "Reference", "Settings", "Speech", "Voice", "cross_fade",
           "demo_reference", "find_reference", "read_reference"]  # fmt: skip

SHORTEST_ROOM = 4.0  # seconds of new speech that a chunk has room for, however long the reference
FIRST_CHUNK = 4.0  # seconds of the first piece of a stream
CROSS_FADE = 0.005  # seconds between two chunks: no click, and too short to take a sound from a word
ANOTHER = 1_000_003  # added to a seed for another try
DEMO_REFERENCE = "demo_0001"  # the bundled clip a preset speaks from when no reference is given


@dataclass(frozen=True)
class _Part:
    """A chunk before it is spoken."""

    text: str
    spoken: str
    """Normalised; "" where there is nothing to say."""
    frames: int
    seed: int
    pause: float
    """Seconds of silence behind it."""


@dataclass(frozen=True)
class _Take:
    """A chunk as it was spoken."""

    mel: Tensor
    """(n, d), on the model's device."""
    seed: int
    notes: tuple[str, ...] = ()


class Voice:
    """A model with a reference, ready to speak. Made by `Voice.load`.

    `pace` says how long texts take, where the model itself does not; `precision` is what it computes in.
    """

    def __init__(
        self, model: CFM, reference: Reference, vocoder: Vocoder, precision: str = "fp32", pace: Pace | None = None
    ):
        self.model, self.reference, self.vocoder = model, reference, vocoder
        self.precision, self.pace = precision, pace or Pace()
        self.recogniser = None  # a Recogniser for `best_of`; loaded when it is first needed
        self.make_mels = make_mels  # a server puts its queue here, where callers share passes

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
        precision: str = "auto",
    ) -> Voice:
        """A voice from anything `load_model` takes: a run folder, a checkpoint, an export, a preset.

        `reference` is a recording, with what is said in it as `reference_text`; or "auto": the most typical clip of
        the run's dataset, the one that an export carries, or the bundled demo clip for a preset. Without its text, or
        when it is longer than 15 s and so is cut, it is transcribed. `precision` is "fp32", "bf16", "fp16", or "auto":
        what this device is quickest in (`tuning`).

        Raises UserError for what can't be found and for a reference that can't serve.
        """
        host = detect_host(device)
        if precision not in ("auto", *DTYPES):
            raise UserError(f"precision is {precision!r}; choose 'auto', {', '.join(DTYPES)}")
        asked = apply_environment(host.device)
        model = load_model(source, weights=weights, device=host.device)
        if reference == "auto":
            reference, reference_text = find_reference(source)
        vocoder = load_vocoder(vocoder, model.config.mel, host.device) if isinstance(vocoder, str) else vocoder
        if precision == "auto":
            precision = speaking_precision(sum(p.numel() for p in model.parameters()), host.device).value
        voice = cls(model, read_reference(reference, reference_text, model), vocoder, precision, find_pace(source))
        if asked["ENABLE_TORCH_COMPILE"]:
            compile_backbone(model)
        return voice

    def __repr__(self) -> str:
        return f"Voice({self.model.origin}; reference {self.reference.name}; vocoder {self.vocoder.name})"

    def refer_to(self, reference: str | Path, text: str | None = None) -> Voice:
        """The same model continuing another recording."""
        return self.with_reference(read_reference(reference, text, self.model))

    def with_reference(self, reference: Reference) -> Voice:
        """The same model continuing a reference that is ready."""
        return Voice(self.model, reference, self.vocoder, self.precision, self.pace)

    def cast(self) -> Voice:
        """Cast the model's weights to the voice's precision, for good: half the memory, and a little quicker.

        For a voice that only speaks; training and comparing want the fp32 weights. Returns the voice.
        """
        self.model.to(DTYPES[self.precision])
        return self

    def warm_up(self, seconds: float = 3.0, steps: int = 2) -> Voice:
        """Speak once to nobody, so that what is made at the first use (kernels, compiled code) is there."""
        self.speak(self.reference.text, steps=steps, duration=seconds, progress=False)
        return self

    def speak(
        self,
        text: str,
        *,
        progress: bool | Callable[[int, int], None] = True,
        cancel: threading.Event | None = None,
        **settings,
    ) -> Speech:
        """Say a text of at most 20,000 characters; `settings` are those of `Settings` (speed, steps, seed, ...).

        `progress` shows a bar, or is called with the solver's steps done and their number. When `cancel` is set, from
        another thread, Cancelled is raised within one step. Raises UserError for an empty text, for characters the
        model's vocabulary lacks, and for settings out of range.
        """
        chosen = Settings.of(**settings)
        if not isinstance(text, str):
            raise UserError(f"the text is {text!r}, of type {type(text).__name__}; give a string")
        if len(text) > LONGEST_TEXT:
            raise UserError(
                f"the text has {len(text):,} characters and one sound holds {LONGEST_TEXT:,}: "
                "say it in parts, or take it chunk by chunk from stream"
            )
        return join_speech(list(self._stream(text, None, progress, cancel, chosen)), text, chosen.seed)

    def stream(
        self,
        text: str,
        *,
        first: float | None = FIRST_CHUNK,
        progress: bool | Callable[[int, int], None] = False,
        cancel: threading.Event | None = None,
        **settings,
    ) -> Iterator[Speech]:
        """Say a text of any length chunk by chunk, as `speak` does: the pieces' sounds in a row are the whole.

        The first chunk is about `first` seconds long, so that sound starts early; with None, as long as the others.
        Faults of the text and the settings are raised at the first piece, before any work.
        """
        yield from self._stream(text, first, progress, cancel, Settings.of(**settings))

    def plan(self, text: str, first: float | None = None, **settings) -> list[tuple[str, float]]:
        """The chunks a text would be spoken in, and the seconds of each."""
        fps = self.model.config.mel.frames_per_second
        return [(part.text, part.frames / fps) for part in self._parts(text, first, Settings.of(**settings))]

    # ---- Text to parts

    def _parts(self, text: str, first: float | None, settings: Settings) -> list[_Part]:
        """The chunks of a text with their frames and seeds. Raises UserError for what can't be said."""
        tokenizer = self.model.tokenizer
        whole = normalise(text, tokenizer.normaliser)
        if not has_words(whole):
            raise UserError("the text is empty: write what the voice should say" if not whole else
                            f"the text {whole[:40]!r} has no letter or digit: write words")  # fmt: skip
        tokenizer.encode(whole)  # every unknown letter is told at once
        # the usual seconds of a text, in the reference's own pace
        stretch = self._seconds(self.reference.text) / max(usual_seconds(self.reference.text), 0.1) / settings.speed
        room = max(self.model.config.longest_chunk - self._reference_seconds, SHORTEST_ROOM) / stretch

        def cost(piece: str) -> float:
            return usual_seconds(normalise(piece, tokenizer.normaliser))

        pieces = split_text(text, room, cost, first and min(first, room * stretch) / stretch)
        spoken = [normalise(piece, tokenizer.normaliser) if has_words(piece) else "" for piece in pieces]
        frames = [self._frames(words) / settings.speed if words else 0.0 for words in spoken]
        pauses = [_pause(piece, settings) for piece in pieces[:-1]] + [0.0]
        if settings.duration is not None:
            scale = settings.duration / (sum(frames) / self.model.config.mel.frames_per_second + sum(pauses))
            frames, pauses = ([each * scale for each in both] for both in (frames, pauses))
        return [
            _Part(piece, words, max(round(count), 4) if words else 0, settings.seed + i, pause)
            for i, (piece, words, count, pause) in enumerate(zip(pieces, spoken, frames, pauses, strict=True))
        ]

    @property
    def _reference_seconds(self) -> float:
        return len(self.reference.mel) / self.model.config.mel.frames_per_second

    def _seconds(self, text: str) -> float:
        return self._frames(text) / self.model.config.mel.frames_per_second

    def _frames(self, text: str) -> float:
        """Frames a normalised text takes at the reference's pace: as the model expects its letters to last, where it
        does, else as its `pace` says."""
        fps = self.model.config.mel.frames_per_second
        known = self._letter_lengths(text)
        if known is None:
            return self.pace.continue_from(self.reference.text, self._reference_seconds, text) * fps
        lengths, spoken = known
        return max(float(lengths[spoken:].sum()), SHORTEST * fps)

    def _letter_lengths(self, text: str) -> tuple[Tensor, int] | None:
        """The frames that each token of reference and text lasts, and how many of them the reference says; None where
        the model does not know."""
        given, encode = self.reference.text, self.model.tokenizer.encode
        spoken = len(encode(given)) + 1  # and the space
        lengths = self.model.letter_lengths(encode(f"{given} {text}"), self.reference.mel, spoken)
        return None if lengths is None else (lengths, spoken)

    def _spread(self, text: str, frames: int) -> Tensor | None:
        """The lengths of all tokens, where those of the text fill so many frames."""
        known = self._letter_lengths(text)
        if known is None:
            return None
        lengths, spoken = known
        return torch.cat((lengths[:spoken], lengths[spoken:] * (frames / lengths[spoken:].sum())))

    # ---- Parts to speech

    def _stream(self, text: str, first: float | None, progress, cancel, settings: Settings) -> Iterator[Speech]:
        """Each part's sound as soon as it stands fast."""
        parts = self._parts(text, first, settings)
        rate = self.model.config.mel.sample_rate
        joiner, level = Joiner(int(CROSS_FADE * rate)), speech_level(self.reference.audio, rate)
        steps = settings.steps * settings.best_of * sum(part.frames > 0 for part in parts)
        counter = Progress(progress, steps, cancel)
        try:
            counter.check()
            for i, (part, take) in enumerate(self._takes(parts, first is not None, settings, counter)):
                audio = match_level(self.vocoder.decode(take.mel).cpu(), rate, level) if part.frames else torch.zeros(0)
                if settings.longest_silence is not None:
                    audio = shorten_silences(audio, rate, settings.longest_silence)
                start, ready, last = joiner.start, [joiner.push(audio)], i == len(parts) - 1
                end = joiner.start
                if part.pause:
                    ready.append(joiner.pause(round(part.pause * rate)))
                if last:
                    ready.append(joiner.end())
                    end = joiner.given
                chunk = Chunk(part.text, take.seed, start / rate, end / rate, len(take.mel), notes=take.notes)
                name = model_name(self.model.origin)
                yield Speech(torch.cat(ready), rate, take.mel.cpu(), part.text, settings.seed, (chunk,), name)
        finally:
            counter.close()

    def _takes(self, parts: list[_Part], first_alone: bool, settings: Settings, counter: Progress):
        """(part, take) in order; as many parts as `batch` says go through the model together."""
        size = settings.batch or (1 if self.model.device.type == "cpu" else 8)
        group: list[_Part] = []
        for i, part in enumerate(parts):
            group.append(part)
            spoken = [p for p in group if p.frames]
            if len(spoken) == size or i == len(parts) - 1 or (spoken and first_alone):
                takes = iter(self._make(spoken, settings, counter) if spoken else [])
                for p in group:
                    silent = _Take(torch.zeros(0, self.model.config.mel.n_mels), p.seed)
                    yield p, (next(takes) if p.frames else silent)
                group, first_alone = [], False

    def _make(self, parts: list[_Part], settings: Settings, counter: Progress) -> list[_Take]:
        """A take of each part: made again where it begins with the reference's end; the best of several."""
        best = self._try(parts, [part.seed for part in parts], settings, counter)
        if settings.retry_leaks:
            for i, take in enumerate(best):
                likeness = leak(take.mel, self.reference.mel)
                if likeness >= LEAK:
                    (again,) = self._try(parts[i : i + 1], [take.seed + ANOTHER], settings, counter)
                    if leak(again.mel, self.reference.mel) < likeness:
                        best[i] = replace(again, notes=("it began with the reference's last words",))
        if settings.best_of > 1:
            errors = [self._errors(part, take) for part, take in zip(parts, best, strict=True)]
            for k in range(2, settings.best_of + 1):
                others = self._try(parts, [part.seed + k * ANOTHER for part in parts], settings, counter)
                for i, take in enumerate(others):
                    if (error := self._errors(parts[i], take)) < errors[i]:
                        errors[i], best[i] = error, replace(take, notes=(f"best of {settings.best_of} takes",))
        return best

    def _try(self, parts: list[_Part], seeds: list[int], settings: Settings, counter: Progress) -> list[_Take]:
        """The mels of some parts in one pass of the model; those that are not finite once more, in fp32."""
        takes = [_Take(mel, s) for mel, s in zip(self._sample(parts, seeds, settings, counter), seeds, strict=True)]
        for i, take in enumerate(takes):
            if bool(take.mel.isfinite().all()):
                continue
            dtype = self.model.transformer.proj_out.weight.dtype
            if self.precision != "fp32":
                try:
                    exact = Voice(self.model.float(), self.reference, self.vocoder)
                    (mel,) = exact._sample(parts[i : i + 1], seeds[i : i + 1], settings, counter)
                finally:
                    self.model.to(dtype)
                takes[i] = _Take(mel, take.seed, (f"not finite in {self.precision}, made in fp32",))
            if not bool(takes[i].mel.isfinite().all()):
                raise UserError(
                    f"{parts[i].text[:40]!r} came out non-finite in fp32: these weights are damaged, load others"
                )
        return takes

    def _sample(self, parts: list[_Part], seeds: list[int], settings: Settings, counter: Progress) -> list[Tensor]:
        """The mel of each part, (n, d), without the reference."""
        reference, wanted = self.reference.mel.to(self.model.device), []
        for part, seed in zip(parts, seeds, strict=True):
            tokens = self.model.tokenizer.encode(f"{self.reference.text} {part.spoken}")
            total = max(len(reference) + part.frames, len(tokens) + 1)
            lengths = self._spread(part.spoken, total - len(reference))
            wanted.append(Wanted(reference, tokens, total, seed, lengths))
        with self.autocast():
            return self.make_mels(self.model, wanted, settings, lambda: counter.step(len(parts)))

    def _errors(self, part: _Part, take: _Take) -> float:
        """Character errors that a recogniser finds in a take, as a share."""
        self.recogniser = self.recogniser or load_recogniser(device=self.model.device.type)
        heard = self.recogniser.transcribe(self.vocoder.decode(take.mel).cpu(), self.model.config.mel.sample_rate)
        errors = count_errors(part.spoken, heard)
        return errors.character_errors / errors.characters

    def autocast(self):
        """The context in which this voice's model runs: its precision."""
        return autocast(self.model.device, self.precision)


def _pause(piece: str, settings: Settings) -> float:
    """Seconds of silence between a piece of a text and the next."""
    if ends_paragraph(piece):
        return settings.pause
    return settings.sentence_pause if ends_sentence(piece) and has_words(piece) else 0.0


def find_pace(source: str | Path) -> Pace:
    """The pace that an export carries, or of the dataset that a run, or the run of a checkpoint, was trained on; else
    the usual one."""
    export = Path(source) / "export.json"
    if export.is_file() and (known := json.loads(export.read_text(encoding="utf-8")).get("pace")):
        return Pace(**known)
    for folder in (Path(source), Path(source).parent.parent):
        if (folder / "run.json").is_file():
            try:
                return dataset_pace(load_dataset(RunFolder(folder).dataset_folder))
            except UserError:  # the run was moved without its dataset
                break
    return Pace()


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
