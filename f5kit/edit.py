"""Speech editing: other words between two times of a recording, and the rest as it was.

The model sees the mel on both sides of a gap and the whole new text, and fills the gap in (Voicebox, section 3.3;
F5-TTS, infer/speech_edit.py). Outside the gap the recording's own samples are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from f5kit.audio import as_stored, log_mel, match_loudness, read_audio
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.joining import cross_fade
from f5kit.provenance import model_name
from f5kit.speech import Chunk, Progress, Settings, Speech
from f5kit.text import normalise

LONGEST_EDIT = 30.0  # seconds of the recording: what models have heard at once
FADE = 0.05  # seconds between the recording and what was made


def replace_words(
    voice: Voice,
    recording: str | Path,
    said: str,
    start: float,
    end: float,
    words: str,
    *,
    progress: bool | Callable[[int, int], None] = True,
    cancel: threading.Event | None = None,
    **settings,
) -> Speech:
    """Say other words between `start` and `end` (seconds) of a recording.

    said: the text of the whole result, with the new words in their place, marked by braces: "I like {green} tea.".
    words: what was said between the two times before; its length against the new words' sets the new length, unless
    `duration` gives the seconds of the new part. Set the times in the pauses around the words.

    Raises UserError for times outside the recording, a text without braces, and what `Voice.speak` refuses.
    """
    chosen, mel_config = Settings.of(**settings), voice.model.config.mel
    audio, (before, new, after) = read_audio(recording, mel_config.sample_rate), _marked(said)
    seconds = len(audio) / mel_config.sample_rate
    if not 0 <= start < end <= seconds + 0.01:
        raise UserError(f"the times {start:g} and {end:g} s do not lie in order within {seconds:.2f} s of recording")
    if seconds > LONGEST_EDIT:
        raise UserError(f"the recording lasts {seconds:.1f} s; edit pieces of {LONGEST_EDIT:.0f} s at most")
    loud = as_stored(match_loudness(audio))
    gain = float(audio.abs().max() / loud.abs().max().clamp(min=1e-9))
    first, last = (round(t * mel_config.frames_per_second) for t in (start, end))
    mel = log_mel(loud, mel_config)
    length = chosen.duration or (end - start) * _share(voice, new, words) / chosen.speed
    gap = max(round(length * mel_config.frames_per_second), 4)
    last = min(last, len(mel))
    text = normalise(f"{before}{new}{after}", voice.model.tokenizer.normaliser)
    spread = _spread(voice, mel, (first, gap, len(mel) - last), (before, new, after), words)
    made = _fill(voice, mel, first, last, gap, text, spread, chosen, progress, cancel)
    sound = voice.vocoder.decode(made.to(voice.model.device)).cpu() * gain
    hop, rate = mel_config.hop_length, mel_config.sample_rate
    fade = int(FADE * rate)  # the new sound reaches that far into the old one, of which it is a copy there
    middle = sound[max(first * hop - fade, 0) : (first + gap) * hop + fade]
    pieces = [audio[: first * hop], middle, audio[last * hop :]]
    joined = cross_fade([piece for piece in pieces if len(piece)], fade)
    chunk = Chunk(new, chosen.seed, first * hop / rate, (first + gap) * hop / rate, gap)
    return Speech(joined, rate, made, f"{before}{new}{after}", chosen.seed, (chunk,), model_name(voice.model.origin))


def _marked(said: str) -> tuple[str, str, str]:
    """(before, new, after) of a text with one pair of braces."""
    before, opened, rest = said.partition("{")
    new, closed, after = rest.partition("}")
    if not opened or not closed or not new.strip() or "{" in after or "}" in after:
        raise UserError(f"{said[:60]!r} needs the new words in one pair of braces, as in 'I like {{green}} tea.'")
    return before, new, after


def _share(voice: Voice, new: str, old: str) -> float:
    """How much longer the new words take than the old ones, without the silence at the ends of a clip."""
    if not old.strip():
        raise UserError("words is empty: give what was said between the two times, or duration")
    seconds = [voice.pace.seconds(text) - voice.pace.edges for text in (new, old)]
    return max(seconds[0], 0.05) / max(seconds[1], 0.05)


def _spread(
    voice: Voice, mel: Tensor, frames: tuple[int, int, int], said: tuple[str, str, str], words: str
) -> Tensor | None:
    """Frames (nt,) that each letter of the result lasts: around the gap as in the recording, in it as expected; None
    where the model does not know. `frames` are before, in and behind the gap; `words` were said there."""
    model = voice.model

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(normalise(text, model.tokenizer.normaliser))

    before, new, after = said
    now, then = encode(before + new + after), encode(before + words + after)
    expected = model.letter_lengths(now)
    if expected is None:
        return None
    heard = model.letter_lengths(then, mel, len(then))
    ahead = min(_common(now, then), len(encode(before)) + 1)  # and a space
    behind = min(_common(now[ahead:][::-1], then[ahead:][::-1]), len(encode(after)) + 1)
    parts = heard[:ahead], expected[ahead : len(now) - behind], heard[len(then) - behind :]
    return torch.cat([part * (n / part.sum().clamp(min=1e-9)) for part, n in zip(parts, frames, strict=True)])


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _fill(
    voice: Voice, mel: Tensor, first: int, last: int, gap: int, text: str, spread: Tensor | None, settings: Settings,
    progress, cancel,
) -> Tensor:  # fmt: skip
    """The mel (n, d) with `gap` new frames in the place of those from `first` to `last`."""
    cond = torch.cat((mel[:first], mel.new_zeros(gap, mel.shape[1]), mel[last:]))[None].to(voice.model.device)
    kept = torch.ones(cond.shape[:2], dtype=torch.bool)
    kept[:, first : first + gap] = False
    tokens = voice.model.tokenizer.encode(text)
    counter = Progress(progress, settings.steps, cancel)
    try:
        with voice.autocast():
            for x in voice.model.sample(  # noqa: B007
                cond, [tokens], [cond.shape[1]], edit_mask=kept, steps=settings.steps, seeds=settings.seed,
                cfg_strength=settings.cfg_strength, sway=settings.sway, method=settings.method,
                letter_lengths=None if spread is None else [spread],
            ):  # fmt: skip
                counter.step()
    finally:
        counter.close()
    made = x[0, : cond.shape[1]].float().cpu()
    if not bool(made.isfinite().all()):
        raise UserError(f"{text[:40]!r} came out non-finite in {voice.precision}: set voice.precision = 'fp32'")
    return made
