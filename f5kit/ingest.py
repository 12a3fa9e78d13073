"""What a source says of its recordings before any is heard.

A source is a folder (nested), a zip or tar of one, a table of transcripts, one recording, or a data set of the Hub that
is read as a stream. Every line of a table, every recording and every text file becomes one Recording; one that can't be
used says why. What is known of a million files is kept on the disk, not in memory.
"""

from __future__ import annotations

import os
import re
import sqlite3
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from f5kit.archives import ARCHIVE_SUFFIXES, unpack
from f5kit.errors import UserError
from f5kit.media import AUDIO_SUFFIXES
from f5kit.tables import TABLE_SUFFIXES, read_lines, read_table, readable, rows_of_records

_AUDIO_FOLDERS = ("wavs", "clips", "audio")
_TEXT_SUFFIXES = (".txt", ".lab")


@dataclass(frozen=True)
class Recording:
    """One recording as the source describes it."""

    id: str
    source: str | None
    """Path of the audio below the source's folder, or its name in a table that holds it; None where there is none."""
    text: str | None
    """None where nobody has written it down."""
    place: str
    """Where the text stands: a file, or a file and line."""
    problem: str | None = None
    """Why it is rejected unheard."""
    mended: tuple[str, ...] = ()
    """Faults of the text's file that were mended."""
    speaker: str | None = None
    language: str | None = None
    sound: bytes | None = None
    """The recording itself, where it comes with the row."""


def open_source(
    source: str | Path, scratch: Path, audio_root: str | Path | None = None, untold: bool = False
) -> tuple[Path, Iterator[Recording]]:
    """The folder that recordings are read from, and the Recordings of a source, each with an id of its own.

    Archives are unpacked below `scratch`. Names in a table are looked up below `audio_root` (the source's own folder)
    and nowhere else. Recordings without any transcript are an error unless `untold`.
    """
    if str(source).startswith("hf://"):
        return scratch, _with_unique_ids(_hub_recordings(str(source)))
    path = Path(source)
    if not path.exists():
        raise UserError(f"there is no folder {path}; give the folder that holds your recordings")
    suffix = path.suffix.lower()
    if path.is_dir():
        root, found = path, _folder_recordings(path, untold)
    elif path.name.lower().endswith(ARCHIVE_SUFFIXES):
        root = scratch / "unpacked"
        found = _archive_recordings(path, root, untold)
    elif suffix in (*TABLE_SUFFIXES, ".txt"):
        root = Path(audio_root or path.parent)
        found = _table_source(path, root)
    elif suffix in AUDIO_SUFFIXES:
        root, found = path.parent, iter([Recording(_stem(path.name), path.name, None, path.name)])
    else:
        raise UserError(f"{path} is no folder, archive, table or recording; unpack it and give the folder")
    return root, _with_unique_ids(found)


def _archive_recordings(path: Path, root: Path, untold: bool) -> Iterator[Recording]:
    refused = unpack(path, root)
    for name, why in refused:
        yield Recording(_stem(name), None, "", f"{path.name}: {name}", f"{path.name}: {name} is left out, {why}")
    try:
        yield from _folder_recordings(root, untold)
    except UserError as error:
        raise UserError(str(error).replace(str(root), str(path))) from None


# ---- Folders


class _Catalogue:
    """The files of a folder and the names a table may use for them, in a database that lives on the disk."""

    def __init__(self):
        self.base = sqlite3.connect("", isolation_level=None)  # a file without a name, gone with the connection
        self.base.executescript(
            "PRAGMA synchronous=OFF; BEGIN; CREATE TABLE audio(source TEXT PRIMARY KEY, stem TEXT, taken TEXT, bad);"
            "CREATE TABLE keys(key TEXT PRIMARY KEY, source TEXT); CREATE TABLE texts(stem TEXT, path TEXT, bad)"
        )
        self.tables: list[str] = []
        self.links: list[str] = []
        """Folders that are links."""

    @classmethod
    def of(cls, root: Path) -> _Catalogue:
        """What lies below a folder. Hidden files do not count, and folders that are links are not entered."""
        made, top = cls(), os.path.realpath(root)
        for folder, folders, names in os.walk(root, onerror=_refuse_folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            linked = [Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))]
            made.links += [readable(path.relative_to(root).as_posix()) for path in linked]
            for name in sorted(names):
                path = Path(folder, name)
                inside, bad = path.relative_to(root).as_posix(), None
                # A link may lead to another file of the folder, and not out of it.
                if path.is_symlink() and not os.path.realpath(path).startswith(top + os.sep):
                    bad = _OUTSIDE
                if (shown := readable(inside)) != inside:
                    bad = _ODD_NAME
                if not name.startswith("."):
                    made.add(shown, bad)
        return made

    def add(self, source: str, bad: str | None) -> None:
        """Take in a file; `bad` says why it must not be read."""
        lower, stem = source.lower(), os.path.splitext(_nfc(source))[0]
        if lower.endswith(AUDIO_SUFFIXES):
            self.base.execute("INSERT INTO audio VALUES (?, ?, NULL, ?)", (source, stem, bad))
            folder, _, name = _nfc(source).rpartition("/")
            above, _, last = folder.rpartition("/")
            keys = [_nfc(source), stem]
            if last in _AUDIO_FOLDERS:
                keys += [key for full in (name, os.path.splitext(name)[0]) for key in [f"{above}/{full}".lstrip("/")]]
            for key in keys:
                # Of recordings with one name the one in the more exact format counts.
                old = self.base.execute("SELECT source FROM keys WHERE key = ?", (key,)).fetchone()
                if not old or _rank(source) < _rank(old[0]):
                    self.base.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (key, source))
        elif lower.endswith(_TEXT_SUFFIXES):
            self.base.execute("INSERT INTO texts VALUES (?, ?, ?)", (stem, source, bad))
        elif lower.endswith(TABLE_SUFFIXES) and not bad:
            self.tables.append(source)

    def locate(self, name: str, folder: str = "") -> str | None:
        """The recording that a name of a table in `folder` means."""
        key = _nfc(name).replace("\\", "/").removeprefix("./")
        for start in dict.fromkeys((f"{folder}/" if folder else "", "")):
            stem, suffix = os.path.splitext(start + key)
            for candidate in (start + key, *([stem] if suffix.lower() in AUDIO_SUFFIXES else [])):
                if found := self.base.execute("SELECT source FROM keys WHERE key = ?", (candidate,)).fetchone():
                    return found[0]
        return None

    def bad(self, source: str) -> str | None:
        return self.base.execute("SELECT bad FROM audio WHERE source = ?", (source,)).fetchone()[0]

    def take(self, source: str, place: str) -> str | None:
        """Note that a line names a recording; returns the line that has named it already."""
        taken = self.base.execute("SELECT taken FROM audio WHERE source = ?", (source,)).fetchone()[0]
        if taken is None:
            self.base.execute("UPDATE audio SET taken = ? WHERE source = ?", (place, source))
        return taken

    def count(self, table: str) -> int:
        return self.base.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    def left(self) -> Iterator[str]:
        """Recordings that no line has named."""
        yield from (row[0] for row in self.base.execute("SELECT source FROM audio WHERE taken IS NULL ORDER BY source"))

    def pairs(self) -> Iterator[tuple]:
        """(recording, is it a bad link, text file, is it one); either may be None."""
        yield from self.base.execute(
            "SELECT source, audio.bad, path, texts.bad FROM audio LEFT JOIN texts USING (stem) GROUP BY source"
        )
        yield from self.base.execute(
            "SELECT NULL, NULL, path, bad FROM texts WHERE stem NOT IN (SELECT stem FROM audio) ORDER BY path"
        )


def _refuse_folder(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read ({error.strerror}); allow it, or move it elsewhere")


def _folder_recordings(root: Path, untold: bool) -> Iterator[Recording]:
    catalogue = _Catalogue.of(root)
    for name in catalogue.links:
        problem = f"{name} is a link to a folder, and such are not entered; put the folder itself there"
        yield Recording(_stem(name), None, "", name, problem)
    if not catalogue.count("audio") and not any(t.endswith((".arrow", ".parquet")) for t in catalogue.tables):
        raise UserError(f"{root} holds no recordings; put .wav, .flac, .mp3 or .ogg files there")
    tables = [t for t in catalogue.tables if Path(t).stem.lower() == "metadata"]
    tables = tables or [t for t in catalogue.tables if t.endswith((".arrow", ".parquet"))] or catalogue.tables[:1]
    if tables and len(catalogue.tables) > 1 and tables == catalogue.tables[:1] and Path(tables[0]).stem != "metadata":
        raise UserError(
            f"{root} has several tables, {', '.join(catalogue.tables[:5])}; give the one to be read as source"
        )
    if tables:
        rows = 0
        for name in tables:
            for recording in _table_recordings(root / name, name, catalogue):
                rows += 1
                yield recording
        if not rows:
            raise UserError(f"{root / tables[0]} is empty; write one line name|text for each recording")
        for name in catalogue.left():
            yield Recording(_stem(name), name, "", name, f"{name}: no line of {tables[0]} names it; add name|text")
    elif catalogue.count("texts"):
        yield from _pair_recordings(root, catalogue, untold)
    elif untold:
        for source, bad, *_ in catalogue.pairs():
            yield Recording(_stem(source), source, None, source, bad.format(source) if bad else None)
    else:
        raise UserError(
            f"{root} has {catalogue.count('audio')} recordings and no transcripts; add metadata.csv with a line "
            "name|text for each, or a .txt file beside each, or have them transcribed"
        )


_ODD_NAME = "{} has a name that is not UTF-8; rename it"
_OUTSIDE = "{} is a link that leads out of the folder; put the file itself there"


def _table_source(path: Path, root: Path) -> Iterator[Recording]:
    if not root.is_dir():
        raise UserError(f"audio_root is {root}, which is no folder; give the folder that holds the recordings")
    empty = True
    for recording in _table_recordings(path, path.name, _Catalogue.of(root), ""):
        empty = False
        yield recording
    if empty:
        raise UserError(f"{path} is empty; write one line name|text for each recording")


def _table_recordings(path: Path, shown: str, catalogue: _Catalogue, folder: str | None = None) -> Iterator[Recording]:
    folder = os.path.dirname(shown) if folder is None else folder
    for line in read_table(path, lambda name: bool(name) and catalogue.locate(name, folder) is not None):
        place, name, mended, source = f"{shown} line {line.number}", line.name, line.mended, None
        problem = f"{place}: {line.problem}" if line.problem else None
        if line.sound is not None:
            source = name or f"line {line.number}"
        elif _points_outside(name):
            source = _moved(name, catalogue, folder)
            mended += ("its absolute path was looked up in the folder",) if source else ()
            problem = problem or (
                None
                if source
                else f"{place}: {name[:200]} points outside the folder; give a path below it, or audio_root"
            )
        else:
            source = catalogue.locate(name, folder)
        if not problem and source is None:
            problem = f"{place}: there is no recording {name[:200]!r}; add the file or remove the line"
        if source and line.sound is None:
            if bad := catalogue.bad(source):
                problem = problem or f"{place}: {bad.format(source)}"
            earlier = catalogue.take(source, f"line {line.number}")
            if earlier:
                problem = problem or f"{place}: {source} is named already in {earlier}; remove one of the two"
        identity = _stem(source) if source else f"{_stem(path.name)}_line_{line.number}"
        text = line.text if line.text is not None or line.sound is not None else ""
        yield Recording(identity, source, text, place, problem, mended, line.speaker, line.language, line.sound)


def _points_outside(name: str) -> bool:
    name = name.replace("\\", "/")
    return name.startswith("/") or re.match(r"[A-Za-z]:/", name) is not None or ".." in name.split("/")


def _moved(name: str, catalogue: _Catalogue, folder: str) -> str | None:
    """The recording at the end of an absolute path that was true on another machine."""
    parts = name.replace("\\", "/").split("/")
    if ".." in parts:
        return None
    tails = ("/".join(parts[i:]) for i in range(1, len(parts)))
    return next((found for tail in tails if tail and (found := catalogue.locate(tail, folder))), None)


def _pair_recordings(root: Path, catalogue: _Catalogue, untold: bool) -> Iterator[Recording]:
    for source, bad, name, bad_text in catalogue.pairs():
        if source is None:
            problem = f"{name} has no recording of the same name beside it; add one or remove the text"
            yield Recording(_stem(name), None, "", name, problem)
        elif bad or bad_text:
            yield Recording(_stem(source), source, "", source, bad.format(source) if bad else bad_text.format(name))
        elif name is None:
            stem = os.path.splitext(_nfc(source))[0]
            problem = None if untold else f"{source} has no transcript; write it to {stem}.txt, or have it transcribed"
            yield Recording(_stem(source), source, None, source, problem)
        else:
            try:
                lines, mended = read_lines(root / name)
            except UserError as error:
                problem = str(error).replace(str(root / name), name)
                yield Recording(_stem(source), source, "", name, problem)
                continue
            text = " ".join(line for _, line in zip(range(1000), (line for _, line in lines), strict=False))
            problem = f"{name} is not UTF-8; save it as UTF-8" if "\ufffd" in text else None
            yield Recording(_stem(source), source, text, name, problem, mended)


# ---- The Hub


def _hub_recordings(address: str) -> Iterator[Recording]:
    """Rows of hf://owner/name@revision?config=vi&split=train, read as a stream by the datasets library."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{address} needs the datasets library, of the extra data: pip install datasets") from None
    parts = urlsplit(address)
    name, _, revision = f"{parts.netloc}{parts.path}".partition("@")
    if "@" in parts.netloc or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{address} is no data set's address; write hf://owner/name?split=train")
    asked = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    try:
        rows = datasets.load_dataset(
            name, asked.get("config"), split=asked.get("split", "train"), streaming=True, revision=revision or None
        )
        rows = rows if rows.features else rows._resolve_features()
        sounds = [key for key, kind in rows.features.items() if isinstance(kind, datasets.Audio)]
        for key in sounds:  # the bytes as they are: decoding would ask for torchcodec
            rows = rows.cast_column(key, datasets.Audio(decode=False))
    except Exception as error:  # its errors come from many libraries, and all say what the Hub said
        raise UserError(f"{address} cannot be opened: {str(error).splitlines()[0][:300]}") from None
    records = ({**row, "audio": row[sounds[0]]} for row in rows) if sounds else iter(rows)
    for line in rows_of_records(records):
        sound, place, problem = line.sound, f"{name} row {line.number}", None
        if sound is None and not line.problem:
            sound = _remote_bytes(line.name)
        if sound is None:
            problem = f"{place}: {line.problem or f'{line.name[:100]!r} is no file of the data set'}"
        stem = _stem(os.path.basename(line.name) or f"row_{line.number:07d}")
        source = line.name if sound is not None and line.name else f"row {line.number}"
        yield Recording(stem, source, line.text, place, problem, (), line.speaker, line.language, sound)


def _remote_bytes(name: str) -> bytes | None:
    """A file of the Hub that a row names. A name of this machine's own files is not followed."""
    if not re.match(r"(zip://[^:]*::)?(hf|https)://", name):
        return None
    import fsspec

    try:
        with fsspec.open(name, "rb") as file:
            return file.read()
    except (OSError, ValueError):
        return None


# ---- Names


def _nfc(name: str) -> str:
    """macOS writes accents of file names as characters of their own; a table typed elsewhere does not."""
    return unicodedata.normalize("NFC", name)


def _rank(source: str) -> tuple[int, str]:
    return AUDIO_SUFFIXES.index(os.path.splitext(source)[1].lower()), source


def _stem(source: str) -> str:
    """A name for a clip that every file system takes: its path without suffix and audio folder."""
    head, _, tail = _nfc(source).partition("/")
    stem = os.path.splitext(tail if tail and head in _AUDIO_FOLDERS else _nfc(source))[0]
    short = re.sub(r"[^\w.-]+", "_", stem).strip("._").encode()[:120].decode(errors="ignore")  # bytes count
    return short or "clip"


def _with_unique_ids(recordings: Iterator[Recording]) -> Iterator[Recording]:
    taken = sqlite3.connect("", isolation_level=None)
    taken.executescript("PRAGMA synchronous=OFF; BEGIN; CREATE TABLE ids(id TEXT PRIMARY KEY, copies INTEGER)")
    for recording in recordings:
        folded, identity = recording.id.casefold(), recording.id
        row = taken.execute("SELECT copies FROM ids WHERE id = ?", (folded,)).fetchone()
        copy = row[0] if row else 1
        while row:
            copy += 1
            identity = f"{recording.id}-{copy}"
            if not taken.execute("SELECT 1 FROM ids WHERE id = ?", (identity.casefold(),)).fetchone():
                taken.execute("UPDATE ids SET copies = ? WHERE id = ?", (copy, folded))
                break
        taken.execute("INSERT INTO ids VALUES (?, 1)", (identity.casefold(),))
        yield replace(recording, id=identity)
