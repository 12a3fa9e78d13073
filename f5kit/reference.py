"""The recording that a voice continues: read, cut at a pause, trimmed, levelled, and its words made sure of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from f5kit.asr import load_recogniser
from f5kit.audio import as_stored, log_mel, match_loudness, read_audio, trim_silence
from f5kit.cfm import CFM
from f5kit.chunks import has_words
from f5kit.errors import UserError
from f5kit.text import normalise

LONGEST_REFERENCE = 15.0  # seconds
SHORTEST_REFERENCE = 0.5
CUT_TO = (6.0, 12.0)  # seconds between which a longer recording is cut, at its longest pause


@dataclass(frozen=True)
class Reference:
    """A recording, and what is said in it."""

    audio: Tensor
    """(nw,), levelled and trimmed."""
    mel: Tensor
    """(n, d)."""
    text: str
    """Normalised."""
    name: str
    """The clip's id or the file's name."""
    note: str = ""
    """What was done to it: cut, transcribed by whom."""


def read_reference(
    path: str | Path, text: str | None, model: CFM, *, recogniser: str = "auto", language: str = "en"
) -> Reference:
    """A recording made ready: mono, the model's rate, trimmed, levelled.

    One longer than 15 s is cut at a pause, and then the text given for all of it is not that of the rest: the rest is
    transcribed (`load_recogniser`), as is a recording without a text. `note` says so: read the words over.
    Raises UserError, which names the file, when the recording can't serve.
    """
    path = Path(path)
    audio, note = read_sound(path, model.config.mel.sample_rate)
    text = None if note else text
    audio = as_stored(match_loudness(audio))
    if not (text and text.strip()):
        text, note = _transcribe(audio, path.name, model, recogniser, language, note)
    text = normalise(text, model.tokenizer.normaliser)
    try:
        model.tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"the words of the reference {path.name}: {error}") from None
    if not has_words(text):
        raise UserError(f"the reference {path.name} needs reference_text: {text[:40]!r} has no words")
    return Reference(audio, log_mel(audio, model.config.mel), text, path.stem, note)


def read_sound(path: Path, sample_rate: int) -> tuple[Tensor, str]:
    """A recording, mono, trimmed, and cut at a pause when it is longer than 15 s; the note says so.

    Raises UserError, with the file's name alone, for one that can't be read, is silent or too short.
    """
    try:
        audio = trim_silence(read_audio(path, sample_rate), sample_rate)
    except UserError as error:  # the name will do: whoever speaks for others shows no paths
        raise UserError(str(error).replace(str(path), path.name)) from None
    seconds = len(audio) / sample_rate
    if seconds < SHORTEST_REFERENCE or not float(audio.abs().max()) > 1e-4:
        raise UserError(
            f"the reference {path.name} has {seconds:.1f} s of sound or is silent; "
            f"give one of {SHORTEST_REFERENCE} to {LONGEST_REFERENCE:.0f} s, best 4 to 10"
        )
    if seconds <= LONGEST_REFERENCE:
        return audio, ""
    audio = cut_at_pause(audio, sample_rate)
    return audio, f"cut from {seconds:.1f} to {len(audio) / sample_rate:.1f} s; "


def cut_at_pause(audio: Tensor, sample_rate: int, between: tuple[float, float] = CUT_TO) -> Tensor:
    """The first part of audio (nw,): it ends in the middle of the quietest fifth of a second between those times."""
    first, last = (round(seconds * sample_rate) for seconds in between)
    window, hop = sample_rate // 5, sample_rate // 50
    power = audio[first : last + window].square().unfold(0, window, hop).mean(-1)
    quietest = int(power.argmin())
    end = first + quietest * hop + window // 2
    return trim_silence(audio[:end], sample_rate)


def _transcribe(audio: Tensor, name: str, model: CFM, recogniser: str, language: str, note: str) -> tuple[str, str]:
    """(words, note) of a recording. Raises UserError when nobody can tell them."""
    remedy = f"give reference_text with the words, and a recording of {LONGEST_REFERENCE:.0f} s at most"
    try:
        known = load_recogniser(recogniser, language=language, device=model.device.type)
    except UserError as error:
        reason = f"the reference {name} needs its words, and they can't be transcribed ({error})"
        raise UserError(f"{reason}: {remedy}") from None
    heard = known.transcribe(audio, model.config.mel.sample_rate)
    if not has_words(heard):
        raise UserError(f"no words were heard in the reference {name} by {known.name}: {remedy}")
    text = heard[0].upper() + heard[1:].rstrip()
    known_marks = "." in model.tokenizer.vocab
    text += "." if known_marks and text[-1].isalnum() else ""
    return text, f"{note}transcribed by {known.name}: read its words over"
