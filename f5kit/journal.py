"""What preparation has done so far, in one SQLite file: so it continues where it stopped, and needs no memory for it.

`inputs` has a row for each recording of the source, `clips` one for each clip that was made of it, with its verdict.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from f5kit.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS inputs(id TEXT PRIMARY KEY, run INTEGER, source TEXT, place TEXT, text TEXT, speaker TEXT,
    language TEXT, problem TEXT, mended TEXT, size INTEGER, mtime INTEGER, hash TEXT, seconds REAL, done INTEGER);
CREATE TABLE IF NOT EXISTS clips(input TEXT, part INTEGER, id TEXT, start REAL, stop REAL, problem TEXT, mended TEXT,
    measures TEXT, seconds REAL, sha256 TEXT, shard INTEGER, first INTEGER, frames INTEGER, asr TEXT,
    text TEXT, language TEXT, status TEXT, reasons TEXT, flags TEXT, pace REAL, same TEXT, cer REAL, split TEXT,
    PRIMARY KEY(input, part));
CREATE INDEX IF NOT EXISTS clips_by_id ON clips(id);
CREATE INDEX IF NOT EXISTS clips_by_sound ON clips(sha256);
CREATE INDEX IF NOT EXISTS clips_by_text ON clips(same);
"""
_PAGE = 500  # rows in memory at a time


class Journal:
    """An open journal. Nothing is lost but what was not committed."""

    def __init__(self, path: Path):
        # nolock: the folder has a lock of its own, and drives on a network often have none.
        self.base = sqlite3.connect(f"{path.resolve().as_uri()}?nolock=1", uri=True, isolation_level=None)
        self.base.row_factory = sqlite3.Row
        try:
            self.base.executescript(_SCHEMA + "PRAGMA synchronous=OFF; BEGIN;")
        except sqlite3.DatabaseError:
            raise UserError(f"{path} is damaged; remove the folder it is in and prepare again") from None
        self.run = 1 + (self.value("SELECT max(run) FROM inputs") or 0)

    def close(self) -> None:
        self.base.commit()
        self.base.close()

    def commit(self) -> None:
        self.base.execute("COMMIT")
        self.base.execute("BEGIN")

    def value(self, query: str, *values):
        """The first column of the first row, or None."""
        row = self.base.execute(query, values).fetchone()
        return row[0] if row else None

    def all(self, query: str, *values) -> Iterator[sqlite3.Row]:
        """Rows of a query, while nothing is written."""
        yield from self.base.execute(query, values)

    def note(self, recording, size: int, mtime: int) -> str:
        """Write down an input as it is now. Returns the hash under which it was heard last, "" if it never was."""
        old = self.base.execute(
            "SELECT hash, size, mtime FROM inputs WHERE id = ? AND done", (recording.id,)
        ).fetchone()
        r, text = recording, _clean(recording.text)
        changing = "run source place text speaker language problem mended size mtime".split()
        values = (self.run, r.source, r.place, text, _clean(r.speaker), _clean(r.language), r.problem)
        self.base.execute(
            f"INSERT INTO inputs(id, {', '.join(changing)}, done) VALUES (?,?,?,?,?,?,?,?,?,?,?,0) ON CONFLICT(id) "
            f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in changing)}",
            (r.id, *values, json.dumps(r.mended), size, mtime),
        )
        if recording.problem:
            self.forget(recording.id)
            self.add(recording.id, {"part": 0, "id": recording.id, "problem": recording.problem})
            self.base.execute("UPDATE inputs SET done = 1, hash = '' WHERE id = ?", (recording.id,))
            return ""
        return old["hash"] if old else ""

    def forget(self, identity: str) -> None:
        """Drop what was heard of an input."""
        self.base.execute("DELETE FROM clips WHERE input = ?", (identity,))

    def add(self, identity: str, values: dict) -> None:
        """Write down a clip of an input."""
        columns = ", ".join(["input", *values])
        marks = ", ".join("?" * (len(values) + 1))
        row = [identity, *(json.dumps(v) if isinstance(v, list | dict) else v for v in values.values())]
        self.base.execute(f"INSERT OR REPLACE INTO clips({columns}) VALUES ({marks})", row)

    def set(self, row, **values) -> None:
        """Change columns of a clip."""
        changes = ", ".join(f"{name} = ?" for name in values)
        packed = [json.dumps(v, ensure_ascii=False) if isinstance(v, list | dict) else v for v in values.values()]
        self.base.execute(f"UPDATE clips SET {changes} WHERE rowid = ?", (*packed, row["clip"]))

    def pages(self, where: str = "1", *values) -> Iterator[dict]:
        """Clips with their inputs (under `input_*`), a page at a time in the order they were made, so that they can be
        changed on the way. JSON columns are unpacked."""
        last = -1
        columns = "clips.rowid AS clip, clips.*, i.source, i.place, i.text AS input_text, i.speaker, i.mended AS "
        columns += "input_mended, i.language AS input_language"
        while True:
            rows = self.base.execute(
                f"SELECT {columns} FROM clips JOIN inputs i ON i.id = input WHERE clips.rowid > ? AND ({where}) "
                f"ORDER BY clips.rowid LIMIT {_PAGE}", (last, *values)
            ).fetchall()  # fmt: skip
            if not rows:
                return
            last = rows[-1]["clip"]
            yield from map(unpacked, rows)

    def median(self, expression: str, where: str = "status != 'rejected'") -> float:
        """The median of an expression over clips; 0 where there are none."""
        n = self.value(f"SELECT count(*) FROM clips WHERE {where}")
        query = f"SELECT avg(v) FROM (SELECT {expression} AS v FROM clips WHERE {where} ORDER BY v LIMIT ? OFFSET ?)"
        return self.value(query, 2 - n % 2, (n - 1) // 2) or 0.0 if n else 0.0


def unpacked(row: sqlite3.Row) -> dict:
    """A row with its JSON columns as values."""
    found = dict(row)
    for name in ("mended", "input_mended", "measures", "reasons", "flags", "asr"):
        if name in found:
            found[name] = json.loads(found[name]) if found[name] else ({} if name in ("measures", "flags") else [])
    return found


def measure(name: str) -> str:
    """SQL for a measure of a clip."""
    return f"json_extract(measures, '$.{name}')"


def _clean(text: str | None) -> str | None:
    """Without halves of characters, which SQLite refuses."""
    return text if text is None else text.encode("utf-8", "replace").decode()
