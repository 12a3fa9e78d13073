"""Makes the clips in this folder again: two by each of three speakers, 16 kHz FLAC.

    apt-get install flite pocketsphinx-testdata    # Debian's flite 2.2 made the clips that are shipped
    python make_other_speakers.py
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import soundfile

FOLDER = Path(__file__).parent
TEXTS = (
    "The boat lay still in the small harbour, waiting for wind.",
    "Nobody had told them when the doors would open.",
)
READER = "/usr/share/pocketsphinx/test/data/librivox/sense_and_sensibility_01_austen_64kb-{}.wav"


def keep(source: str | Path, name: str) -> None:
    samples, rate = soundfile.read(source, dtype="int16")
    soundfile.write(FOLDER / f"{name}.flac", samples, rate, format="FLAC", subtype="PCM_16")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wav = Path(scratch, "clip.wav")
        for voice in ("slt", "rms"):
            for number, text in enumerate(TEXTS, 1):
                subprocess.run(["flite", "-voice", voice, "-t", text, "-o", str(wav)], check=True)
                keep(wav, f"{voice}_{number}")
    for number, part in enumerate(("0880", "0930"), 1):
        keep(READER.format(part), f"reader_{number}")


if __name__ == "__main__":
    main()
