"""Tables of transcripts as people write them: csv, tsv, LJSpeech's and upstream's metadata, JSON lines, Arrow, Parquet.

A table is read line by line and every line becomes a Line, also one that can't be used. What separates the fields,
which field is the recording and which the text is found by looking: the recordings are there, and a name that is one
of theirs gives the column away.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from f5kit.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".psv", ".jsonl", ".arrow", ".parquet")
LONGEST_LINE = 1 << 20  # characters
_SAMPLE = 200  # lines to learn the form of a table from
_DELIMITERS = "|\t,;"
# Names of columns, in lower case. The first of a row's columns that is named here counts.
_COLUMNS = {
    "audio": "audio audio_file audio_path audio_filepath path file filename file_name wav wav_path clip name id",
    "text": "text transcript transcription sentence normalized_text raw_text",
    "speaker": "speaker speaker_id speaker_name client_id spk",
    "language": "language lang locale",
}
_NAMES = {name: kind for kind, names in _COLUMNS.items() for name in names.split()}


@dataclass(frozen=True)
class Line:
    """One row of a table."""

    number: int
    name: str
    """The recording, as the table calls it."""
    text: str | None
    speaker: str | None = None
    language: str | None = None
    problem: str | None = None
    """Why it can't be used."""
    mended: tuple[str, ...] = ()
    sound: bytes | None = None
    """The recording itself, where the table holds it."""


def read_table(path: Path, is_recording: Callable[[str], bool]) -> Iterator[Line]:
    """Every row of a table; `is_recording` says whether a name is that of a recording. Raises UserError for one that
    is damaged as a whole."""
    suffix = path.suffix.lower()
    if suffix in (".arrow", ".parquet"):
        yield from rows_of_records(_arrow_records(path))
    elif suffix == ".jsonl":
        lines, mended = read_lines(path)
        yield from _with_mended(_json_rows(lines), mended)
    else:
        lines, mended = read_lines(path)
        yield from _with_mended(_text_rows(lines, is_recording), mended)


def _with_mended(rows: Iterable[Line], mended: tuple[str, ...]) -> Iterator[Line]:
    for n, row in enumerate(rows):
        yield row if n or not mended else Line(**{**vars(row), "mended": (*mended, *row.mended)})


def readable(text: str) -> str:
    """Without the halves of characters that JSON and file systems let through, and nothing else takes."""
    return text.encode("utf-8", "replace").decode()


# ---- Lines


def read_lines(path: Path) -> tuple[Iterator[tuple[int, str]], tuple[str, ...]]:
    """(number, line) of each line that is not blank, and what was mended in the file.

    UTF-8, or UTF-16 and UTF-32 that a byte order mark or the zero bytes give away; line ends of every system. U+FFFD
    stands for what could not be read. A line is cut after LONGEST_LINE characters, and then is that long + 1.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy it again, or allow it") from None
    encoding, mended = "utf-8", ()
    if head.startswith(b"\xef\xbb\xbf"):
        encoding, mended = "utf-8-sig", ("byte order mark removed",)
    elif head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        encoding = "utf-32"
    elif head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif len(head) > 3 and head.count(b"\0") > len(head) // 4:
        encoding = "utf-16-le" if head[1::2].count(b"\0") > head[::2].count(b"\0") else "utf-16-be"
    return _numbered(path, encoding), mended


def _numbered(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    number = 0
    # Universal line ends, not splitlines(): that also cuts at characters that belong to a text.
    with open(path, encoding=encoding, errors="replace", newline=None) as file:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            rest = line
            while len(rest) > LONGEST_LINE and not rest.endswith("\n"):
                rest = file.readline(LONGEST_LINE + 1)
            if line.strip():
                yield number, line.removesuffix("\n")


# ---- Delimited text


@dataclass
class _Form:
    """How a table is written."""

    delimiter: str
    columns: dict[str, int]
    """Which column is the audio, the text, the speaker, the language."""
    width: int
    """Usual number of fields."""
    header: bool


def _text_rows(lines: Iterator[tuple[int, str]], is_recording: Callable[[str], bool]) -> Iterator[Line]:
    sample = list(islice(lines, _SAMPLE))
    form = _find_form([line for _, line in sample], is_recording)
    if form.header:
        sample = sample[1:]
    lines = chain(sample, lines)
    waiting: list[tuple[int, str]] = []
    while item := (waiting.pop(0) if waiting else next(lines, None)):
        number, line = item
        fields = _split(line, form.delimiter)
        if fields is None:  # a quoted field that goes on in the next lines, or a quote that nobody closed
            more = [*waiting, *islice(lines, 10 - len(waiting))]
            fields, used = _join_lines(line, more, form, is_recording)
            waiting = more[used:]
        yield _row(number, line, fields, form)


def _split(line: str, delimiter: str) -> list[str] | None:
    """The fields of a line; None when a quoted one does not end in it.

    Quotes are CSV's where a field begins with one. Between bars they are the text's own, unless the whole line is
    quoted field by field. What is no proper quoting is taken as it stands.
    """
    if '"' not in line or (delimiter == "|" and not re.match(r'".*"\|".*"$', line)):
        return line.split(delimiter)
    try:
        return next(csv.reader(io.StringIO(line, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        return None if "end of data" in str(error) else line.split(delimiter)


def _join_lines(line: str, more: list[tuple[int, str]], form: _Form, is_recording) -> tuple[list[str], int]:
    """The fields of a line whose quote is closed within `more`, and how many of these it took.

    A line that begins with the name of a recording is a row of its own: a lone quote swallows no other row.
    """
    whole = line
    for used, (_, following) in enumerate(more, 1):
        if is_recording(following.split(form.delimiter)[0].strip(' "')):
            break
        whole += "\n" + following
        if (fields := _split(whole, form.delimiter)) is not None:
            return fields, used
    return line.split(form.delimiter), 0


def _row(number: int, line: str, fields: list[str], form: _Form) -> Line:
    mended, found = (), len(fields)
    last = form.columns["text"] == form.width - 1
    if found > form.width and form.delimiter in ",;" and last:  # written without quotes
        fields = [*fields[: form.width - 1], form.delimiter.join(fields[form.width - 1 :])]
        mended = (f"a {form.delimiter!r} in the text was not quoted",)
    values = {kind: fields[place].strip() for kind, place in form.columns.items() if place < len(fields)}
    problem = None
    if len(line) > LONGEST_LINE:
        problem, values["text"] = f"the line is longer than {LONGEST_LINE:,} characters; cut it", ""
    elif "\ufffd" in line:
        problem = "it is not UTF-8; save the file as UTF-8"
    elif "text" not in values or len(fields) > form.width:
        d = form.delimiter.replace("\t", "(tab)")
        form_of_it = d.join(sorted(form.columns, key=form.columns.get)).replace("audio", "name")
        problem = f"expected {form_of_it}, found {found} field{'s' * (found != 1)}; put one {d} between name and text"
    name = values.get("audio", "")
    if problem and found == 1:  # separated in another way, most likely
        name = re.split(r"[,;|\t]", name)[0].strip()
    speaker, language = (values.get(kind) or None for kind in ("speaker", "language"))
    return Line(number, name[:1000], values.get("text", ""), speaker, language, problem, mended)


def _find_form(lines: list[str], is_recording: Callable[[str], bool]) -> _Form:
    """The delimiter under which most lines name a recording, and the columns it gives."""
    best: tuple = ()
    for delimiter in _DELIMITERS:
        rows = [_split(line, delimiter) or line.split(delimiter) for line in lines]
        several = [row for row in rows if len(row) > 1]
        header = _header(rows[0]) if rows else {}
        named = {"audio", "text"} <= set(header)
        places = range(max((len(row) for row in rows), default=1))
        hits = [sum(len(row) > p and is_recording(row[p].strip()) for row in several[:50]) for p in places]
        score = (max(hits), named, len(several))
        if not best or score > best[0]:
            best = score, delimiter, rows, header if named else {}, hits.index(max(hits))
    _, delimiter, rows, header, audio = best
    several = [row for row in rows[bool(header) :] if len(row) > 1]
    widths = [len(row) for row in several]
    if header:
        return _Form(delimiter, header, len(rows[0]), True)
    width = max(set(widths), key=lambda w: (widths.count(w), -w)) if widths else 2
    if delimiter in ",;" and width > 2:  # most likely marks of the text itself
        width = min(widths)
    return _Form(delimiter, _guess_columns([r for r in several if len(r) == width], width, audio), max(2, width), False)


def _header(fields: list[str]) -> dict[str, int]:
    columns: dict[str, int] = {}
    for place, field in enumerate(fields):
        kind = _NAMES.get(field.strip().lower())
        if kind:
            columns.setdefault(kind, place)
    return columns


def _guess_columns(rows: list[list[str]], width: int, audio: int) -> dict[str, int]:
    """Columns of a table without header: the recording is known, the text is the long one, a short one that repeats
    is the speaker. LJSpeech's third column, its text once more, is not used."""
    others = [place for place in range(width) if place != audio]
    if len(others) < 2 or not rows:
        return {"audio": audio, "text": others[0] if others else 1}
    length = {place: sum(len(row[place]) for row in rows) / len(rows) for place in others}
    text = next(place for place in others if length[place] >= 0.7 * max(length.values()))
    columns = {"audio": audio, "text": text}
    for place in others:
        distinct = {row[place].strip() for row in rows}
        if place != text and length[place] < 0.5 * length[text] and len(distinct) <= len(rows) / 2:
            columns.setdefault("speaker", place)
    return columns


# ---- Records: JSON lines, Arrow, Parquet, a data set of the Hub


def _json_rows(lines: Iterator[tuple[int, str]]) -> Iterator[Line]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and len(line) <= LONGEST_LINE:
            yield from rows_of_records([record], number)
        else:
            yield Line(number, "", "", problem="it is no JSON object; write one a line")


def rows_of_records(records: Iterable[dict], first: int = 1) -> Iterator[Line]:
    """Rows of dicts, by the names of their keys. Texts may be lists of tokens, as upstream writes them; audio may be a
    name, or a dict with `path` or `bytes`, as the datasets library writes it."""
    for number, record in enumerate(records, first):
        found = {}
        for key, value in record.items():
            kind = _NAMES.get(str(key).lower())
            better = kind == "audio" and isinstance(value, dict)  # an `id` may stand before the sound
            if kind and value is not None and (kind not in found or better):
                found[kind] = value
        audio, text, sound = found.get("audio", ""), found.get("text"), None
        if isinstance(audio, dict):
            audio, sound = audio.get("path") or "", audio.get("bytes")
        if isinstance(text, list):
            text = "".join(str(token) for token in text)
        speaker, language = (readable(str(found[k])) if k in found else None for k in ("speaker", "language"))
        usable = isinstance(audio, str) and isinstance(text, str | None)
        problem = None if usable and (audio or sound) else "it names no recording; give it a key audio and a key text"
        yield Line(
            number, readable(str(audio)[:1000]), readable(text) if isinstance(text, str) else None, speaker, language,
            problem, (),
            sound if isinstance(sound, bytes) else None,
        )  # fmt: skip


def _arrow_records(path: Path) -> Iterator[dict]:
    """Records of an Arrow file (of either kind) or a Parquet file, a batch at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs pyarrow, of the extra data: pip install pyarrow") from None
    try:
        if path.suffix.lower() == ".parquet":
            file = pyarrow.parquet.ParquetFile(path)
            for group in range(file.num_row_groups):  # one by one: read in one go, all of them stay in memory
                for batch in file.iter_batches(batch_size=64, row_groups=[group]):
                    yield from batch.to_pylist()
            return
        with pyarrow.memory_map(str(path)) as source:
            try:
                batches = iter(pyarrow.ipc.open_stream(source))
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            for batch in batches:
                for start in range(0, len(batch), 64):
                    yield from batch.slice(start, 64).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as a table ({type(error).__name__}); copy it again") from None
