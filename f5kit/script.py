"""Scripts for several voices: `[town] Good day!` is said by the voice of that name, until another is named.

    [main] She asked the town:
    [town] Who is there? [pause 0.8] Nobody, it seems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from f5kit.chunks import has_words
from f5kit.errors import UserError
from f5kit.inference import CROSS_FADE, Voice
from f5kit.joining import Joiner
from f5kit.provenance import model_name
from f5kit.speech import Settings, Speech

_MARK = re.compile(r"\[([^\[\]\n]{1,60})\]")
_PAUSE = re.compile(r"pause(?:\s+(\d+(?:\.\d+)?)\s*s?)?")
PAUSE = 0.5  # seconds of a `[pause]` without a number
LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Line:
    """What one voice says in one go, or a pause."""

    voice: str
    text: str
    pause: float = 0.0
    """Seconds of silence, in place of a text."""


@dataclass(frozen=True)
class Role:
    """A voice in a script, with settings of its own (speed, seed, steps, ...)."""

    voice: Voice
    settings: dict


def parse_script(script: str, names: list[str] | tuple[str, ...]) -> list[Line]:
    """The lines of a script. What stands before the first name is said by the first of `names`.

    Raises UserError for a name that is not among them, and for a pause of more than a minute.
    """
    lines, name, start = [], names[0], 0
    for mark in [*_MARK.finditer(script), None]:
        text = script[start : mark.start() if mark else len(script)]
        if text.strip():
            lines.append(Line(name, text))
        if mark is None:
            return lines
        start, said = mark.end(), mark[1].strip()
        pause = _PAUSE.fullmatch(said)
        if pause:
            seconds = float(pause[1] or PAUSE)
            if seconds > LONGEST_PAUSE:
                raise UserError(f"{mark[0]} lasts longer than {LONGEST_PAUSE:.0f} s: shorten it")
            lines.append(Line(name, "", seconds))
        elif said in names:
            name = said
        else:
            raise UserError(f"the script names [{said}]; the voices are {', '.join(names)}, and [pause 0.5] is a pause")


def speak_script(
    voices: Mapping[str, Voice | Role], script: str, *, gap: float = 0.25, progress=True, cancel=None, **settings
) -> Speech:
    """Say a script of several voices, with `gap` seconds between two of them.

    voices: {name: a Voice, or a Role with settings of its own, which go before `settings`}. Each chunk of the result
    carries its voice's name. All voices have one sample rate. Raises UserError as `Voice.speak` and `parse_script` do.
    """
    if not voices:
        raise UserError("a script needs a voice: give {'main': voice}")
    roles = {name: v if isinstance(v, Role) else Role(v, {}) for name, v in voices.items()}
    rates = {role.voice.model.config.mel.sample_rate for role in roles.values()}
    if len(rates) > 1:
        raise UserError(f"the voices have the sample rates {sorted(rates)}: choose voices of one rate")
    lines = parse_script(script, list(roles))
    if not any(has_words(line.text) for line in lines):
        raise UserError("the script is empty: write what the voices should say")
    chosen = [Settings.of(**{**settings, **roles[line.voice].settings}) for line in lines]  # faults before any work
    rate, sounds, mels, chunks = rates.pop(), [], [], []
    joiner, last = Joiner(int(CROSS_FADE * rate)), None
    for number, (line, how) in enumerate(zip(lines, chosen, strict=True)):
        if line.pause or not has_words(line.text):
            sounds.append(joiner.pause(round(line.pause * rate)))
            continue
        if last not in (None, line.voice):
            sounds.append(joiner.pause(round(gap * rate)))
        own = {**vars(how), "seed": how.seed + 1000 * number}
        said = roles[line.voice].voice.speak(line.text, progress=progress, cancel=cancel, **own)
        start = joiner.start / rate
        sounds.append(joiner.push(said.audio))
        chunks += [replace(c, start=c.start + start, end=c.end + start, voice=line.voice) for c in said.chunks]
        mels.append(said.mel)
        last = line.voice
    names = sorted({model_name(role.voice.model.origin) for role in roles.values()})
    whole = torch.cat([*sounds, joiner.end()])
    return Speech(whole, rate, torch.cat(mels), script, chosen[0].seed, tuple(chunks), ", ".join(names))
