"""What a source folder says of its clips before any is heard: metadata.csv, or a text file for each of them.

Every line of metadata, every recording and every text file becomes one Recording; one that can't be used says
why.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from f5kit.audio import AUDIO_SUFFIXES
from f5kit.errors import UserError

_AUDIO_FOLDERS = ("wavs", "clips", "audio")
_HEADER_NAMES = {"name", "id", "file", "filename", "file_name", "audio", "audio_file", "path", "wav", "clip"}
_HEADER_TEXTS = {"text", "transcript", "transcription", "sentence"}


@dataclass(frozen=True)
class Recording:
    """One clip as the source describes it."""

    id: str
    source: str | None
    """Path of the audio below the source folder; None where there is none."""
    text: str
    place: str
    """Where the text stands: a file, or a file and line."""
    problem: str | None = None
    """Why it is rejected unheard."""
    mended: tuple[str, ...] = ()
    """Faults of the text's file that were mended."""


def list_files(folder: Path) -> list[str]:
    """Audio, text and table files below `folder`, as sorted relative paths. Hidden ones do not count."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith((*AUDIO_SUFFIXES, ".txt", ".csv", ".tsv")):
                found.append(Path(root, name).relative_to(folder).as_posix())
    return sorted(found)


def find_recordings(folder: Path, files: list[str]) -> list[Recording]:
    """One Recording for each line of metadata.csv, or each pair of files, and for audio without a text.

    Raises UserError when there are no recordings or no transcripts.
    """
    audio = [name for name in files if name.lower().endswith(AUDIO_SUFFIXES)]
    texts = [name for name in files if name.lower().endswith(".txt")]
    if not audio:
        raise UserError(f"{folder} holds no recordings; put .wav, .flac, .mp3 or .ogg files there")
    if "metadata.csv" in files:
        found = list(_metadata_recordings(folder, audio))
        if not found:
            raise UserError(
                f"{folder / 'metadata.csv'} is empty; write one line name|text for each recording"
            )
        named = {recording.source for recording in found}
        untold = "no line of metadata.csv names it; add name|text"
    elif texts:
        found, named, untold = list(_pair_recordings(folder, audio, texts)), set(audio), ""
    else:
        tables = [name for name in files if name.lower().endswith((".csv", ".tsv"))]
        hint = f"; {tables[0]} must become metadata.csv at the top of the folder" if tables else ""
        raise UserError(
            f"{folder} has {len(audio)} recordings and no transcripts; add metadata.csv with a line "
            f"name|text for each, or a .txt file beside each{hint}"
        )
    found += [Recording(_stem(n), n, "", n, f"{n}: {untold}") for n in audio if n not in named]
    return _with_unique_ids(found)


def _metadata_recordings(folder: Path, audio: list[str]) -> Iterator[Recording]:
    lines, mended = _decode_lines((folder / "metadata.csv").read_bytes())
    rows = [(n, line, line.split("|")) for n, line in enumerate(lines, start=1) if line.strip()]
    index = _index(audio)
    if rows and _is_header(rows[0][2]) and _locate(rows[0][2][0].strip(), index) is None:
        rows = rows[1:]
    usual = max(2, min(3, Counter(len(fields) for _, _, fields in rows).most_common(1)[0][0])) if rows else 2
    first_line: dict[str, int] = {}
    for number, line, fields in rows:
        place, problem, name = f"metadata.csv line {number}", None, fields[0].strip()
        source = None if _points_outside(name) else _locate(name, index)
        text = fields[1] if len(fields) > 1 else ""
        if "\ufffd" in line:
            problem = f"{place} is not UTF-8; save the file as UTF-8"
        elif not 2 <= len(fields) <= usual:
            s = "" if len(fields) == 1 else "s"
            problem = (
                f"{place}: expected name|text, found {len(fields)} field{s}; put one | between name and text"
            )
        elif _points_outside(name):
            problem = f"{place}: {name} points outside the folder; give a path below it"
        elif source is None:
            problem = f"{place}: there is no recording {name!r}; add the file or remove the line"
        elif source in first_line:
            problem = (
                f"{place}: {source} is named already in line {first_line[source]}; remove one of the two"
            )
        else:
            first_line[source] = number
        identity = _stem(source) if source else f"metadata_line_{number}"
        yield Recording(identity, source, text, place, problem, mended if number == 1 else ())


def _pair_recordings(folder: Path, audio: list[str], texts: list[str]) -> Iterator[Recording]:
    by_stem = {os.path.splitext(_nfc(name))[0]: name for name in texts}
    for source in audio:
        stem = os.path.splitext(_nfc(source))[0]
        if stem not in by_stem:
            problem = f"{source} has no transcript; write it to {stem}.txt"
            yield Recording(_stem(source), source, "", source, problem)
            continue
        name = by_stem[stem]
        lines, mended = _decode_lines((folder / name).read_bytes())
        text = " ".join(lines)
        problem = f"{name} is not UTF-8; save it as UTF-8" if "\ufffd" in text else None
        yield Recording(_stem(source), source, text, name, problem, mended)
    heard = {os.path.splitext(_nfc(name))[0] for name in audio}
    for stem, name in by_stem.items():
        if stem not in heard:
            problem = f"{name} has no recording of the same name beside it; add one or remove the text"
            yield Recording(_stem(name), None, "", name, problem)


def _decode_lines(raw: bytes) -> tuple[list[str], tuple[str, ...]]:
    """Lines of a UTF-8 or UTF-16 file, and what was mended. U+FFFD stands where a line could not be read."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16", "replace").split("\n"), ()
    mended = ("byte order mark removed",) if raw.startswith(b"\xef\xbb\xbf") else ()
    # Not splitlines(): it also cuts at characters that belong to a text.
    return [line.removesuffix("\r") for line in raw.decode("utf-8-sig", "replace").split("\n")], mended


def _nfc(name: str) -> str:
    """macOS writes accents of file names as characters of their own; a table typed elsewhere does not."""
    return unicodedata.normalize("NFC", name)


def _index(audio: list[str]) -> dict[str, str]:
    """Every name a table may use for a recording: its path, with or without suffix and audio folder."""
    index: dict[str, str] = {}
    for source in sorted(audio, key=lambda name: AUDIO_SUFFIXES.index(Path(name).suffix.lower())):
        path = _nfc(source)
        head, _, tail = path.partition("/")
        for key in (path, tail) if head in _AUDIO_FOLDERS else (path,):
            index.setdefault(key, source)
            index.setdefault(os.path.splitext(key)[0], source)
    return index


def _locate(name: str, index: dict[str, str]) -> str | None:
    key = _nfc(name).replace("\\", "/").removeprefix("./")
    stem, suffix = os.path.splitext(key)
    return index.get(key) or (index.get(stem) if suffix.lower() in AUDIO_SUFFIXES else None)


def _points_outside(name: str) -> bool:
    name = name.replace("\\", "/")
    return name.startswith("/") or re.match(r"[A-Za-z]:/", name) is not None or ".." in name.split("/")


def _is_header(fields: list[str]) -> bool:
    words = [word.strip().lower() for word in fields[:2]]
    return len(words) == 2 and words[0] in _HEADER_NAMES and words[1] in _HEADER_TEXTS


def _stem(source: str) -> str:
    """A name for a clip that every file system takes: its path without suffix and audio folder."""
    head, _, tail = _nfc(source).partition("/")
    stem = os.path.splitext(tail if tail and head in _AUDIO_FOLDERS else _nfc(source))[0]
    return re.sub(r"[^\w.-]+", "_", stem).strip("._")[:80] or "clip"


def _with_unique_ids(recordings: list[Recording]) -> list[Recording]:
    taken: set[str] = set()
    unique = []
    for recording in recordings:
        identity, copy = recording.id, 2
        while identity.casefold() in taken:
            identity, copy = f"{recording.id}-{copy}", copy + 1
        taken.add(identity.casefold())
        unique.append(replace(recording, id=identity))
    return unique
