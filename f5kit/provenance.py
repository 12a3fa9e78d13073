"""Where a sound file comes from, written into the file itself and read back.

Every sound that f5kit writes carries a comment, one line of JSON, where its format has a place for one: LIST/INFO in
WAV, Vorbis comments in FLAC and Ogg, ID3 in MP3. Players show it as the comment.

    {"generated": true, "model": "my_voice/update_000400/ema", "by": "f5kit 0.1.0"}

It is no watermark: whoever edits the file can take it out. It helps those who mean well, and the one who finds a file
years later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True)
class Provenance:
    """What a sound file says of itself."""

    generated: bool | None = None
    """True for synthetic speech, False for a recording of somebody, None where the file's maker did not know."""
    model: str = ""
    """What spoke, by name: "my_voice/update_000400/ema"."""
    by: str = ""
    """The program and its version; empty for the f5kit that runs."""

    def comment(self) -> str:
        """The line that is written."""
        told = {"generated": self.generated, "model": self.model, "by": self.by or kit()}
        return json.dumps({key: value for key, value in told.items() if value not in (None, "")}, ensure_ascii=False)


def kit() -> str:
    """"f5kit" and the version that runs."""
    return f"f5kit {import_module(__package__).__version__}"


def model_name(origin: str) -> str:
    """A model's `origin` as a name without the folders of this machine: the last three parts of a path."""
    path = Path(origin)
    if len(path.parts) < 2:
        return origin
    parts = [part for part in path.with_suffix("").parts if part != "checkpoints"]
    return "/".join(parts[-3:])


def tag(file, provenance: Provenance | None = None) -> None:
    """Put the comment into an open `soundfile.SoundFile`, before its samples."""
    file.comment = (provenance or Provenance()).comment()


def read_provenance(path: str | Path) -> Provenance | None:
    """What a sound file says of itself; None for one that f5kit has not written, and for what is no sound."""
    import soundfile

    try:
        with soundfile.SoundFile(str(path)) as file:
            told = json.loads(file.comment)
    except (OSError, ValueError, RuntimeError):
        return None
    if not isinstance(told, dict) or not str(told.get("by", "")).startswith("f5kit "):
        return None
    return Provenance(told.get("generated"), str(told.get("model", "")), told["by"])
