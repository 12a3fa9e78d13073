"""Real human speech for tests: the LibriVox recordings of Debian's pocketsphinx-testdata."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

INSTALLED = Path("/usr/share/pocketsphinx/test/data/librivox")


def librivox_available() -> bool:
    """Whether the package's files are here (apt-get install pocketsphinx-testdata)."""
    return (INSTALLED / "transcription").is_file()


def lay_out_librivox(folder: Path) -> dict[str, str]:
    """Copy the five recordings (16 kHz, one reader of Sense and Sensibility) to `folder` as a.wav and a.txt.

    Returns the texts by name. They are lower case and without punctuation, as the package has them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = (INSTALLED / "transcription").read_text(encoding="utf-8").splitlines()
    texts = dict(re.fullmatch(r"<s> (.+) </s> \((.+)\)", line).group(2, 1) for line in lines if line.strip())
    for name, text in texts.items():
        shutil.copyfile(INSTALLED / f"{name}.wav", folder / f"{name}.wav")
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    return texts
