"""Makes the demo voice again: flite's voice `awb` reads texts.txt.

    apt-get install flite        # Debian's 2.2 made the clips that are shipped
    python make_demo_voice.py    # writes wavs/ and metadata.csv beside this file

Each line of texts.txt is `book|sentence`. The synthesiser has no randomness: the same
flite gives the same samples.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import soundfile

FOLDER = Path(__file__).parent
VOICE = "awb"


def speak(text: str, path: Path) -> float:
    """Write `text`, read aloud, as a 16-bit FLAC at the voice's own 16 kHz. Returns the seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        wav = Path(scratch, "clip.wav")
        # "--" reads as a word to flite; the dash it stands for is a pause.
        spoken = text.replace("--", ", ")
        subprocess.run(["flite", "-voice", VOICE, "-t", spoken, "-o", str(wav)], check=True)
        samples, sample_rate = soundfile.read(wav, dtype="int16")
    soundfile.write(path, samples, sample_rate, format="FLAC", subtype="PCM_16")
    return len(samples) / sample_rate


def main() -> None:
    if shutil.which("flite") is None:
        sys.exit("flite is not installed: apt-get install flite")
    lines = (FOLDER / "texts.txt").read_text(encoding="ascii").splitlines()
    texts = [line.split("|", 1)[1] for line in lines]
    wavs = FOLDER / "wavs"
    wavs.mkdir(exist_ok=True)
    rows, seconds = [], 0.0
    for number, text in enumerate(texts, start=1):
        name = f"demo_{number:04d}"
        seconds += speak(text, wavs / f"{name}.flac")
        rows.append(f"{name}|{text}\n")
    (FOLDER / "metadata.csv").write_text("".join(rows), encoding="ascii")
    print(f"{len(rows)} clips, {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
