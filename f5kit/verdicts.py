"""Accepted, repaired or rejected: each clip by itself, then all together, then who is held out.

All of it works on the journal a page at a time, and again from the beginning each run: it is cheap, and texts change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from f5kit.asr import count_errors
from f5kit.audit import (
    DISAGREES,
    LONG_PAUSE,
    NARROW,
    NOISY,
    check_text,
    clean_text,
    text_flags,
)
from f5kit.errors import UserError
from f5kit.journal import Journal, measure
from f5kit.text import Tokenizer, normalise


@dataclass(frozen=True)
class TextOptions:
    """What texts are judged by."""

    language: str | None = None
    normaliser: str = "basic"
    tokenizer: Tokenizer | None = field(default=None, hash=False)
    drop: frozenset[str] = frozenset()
    """Clips that the user has taken out."""


def judge(journal: Journal, options: TextOptions) -> None:
    """Give every clip its status, reasons and flags."""
    known = frozenset(options.tokenizer.vocab if options.tokenizer else ())
    for row in journal.pages():
        journal.set(row, **_verdict(row, options, known))
    journal.commit()
    _compare(journal)
    journal.commit()


def _verdict(row: dict, options: TextOptions, known: frozenset[str]) -> dict:
    heard = row["asr"] or {}
    language = row["input_language"] or options.language or heard.get("language")
    written = row["input_text"] if row["input_text"] is not None else heard.get("text")
    text, mended = clean_text(written or "")
    found = {"text": text, "language": language, "flags": {}, "split": None, "same": None, "pace": None, "cer": None}
    try:
        if row["problem"]:
            raise UserError(row["problem"])
        if row["id"] in options.drop:
            raise UserError(f"{row['id']} was taken out by you, in the report")
        if written is None:
            raise UserError(f"{row['place']} has no transcript; write one, or have it transcribed")
        check_text(text, row["place"], row["seconds"], row["frames"])
    except UserError as error:
        return found | {"status": "rejected", "reasons": [str(error)]}
    reasons = [*(row["input_mended"] if row["part"] == 0 else ()), *mended, *row["mended"]]
    found["flags"] = text_flags(text, language, options.normaliser, options.tokenizer, known) | _sound_flags(
        row["measures"]
    )
    if row["input_text"] is not None and heard:
        errors = count_errors(text, heard["text"], (language or "").split("-")[0])
        found["cer"] = round(errors.character_errors / errors.characters, 4)
        if found["cer"] > DISAGREES:
            found["flags"]["asr"] = f"{found['cer']:.0%} of its letters differ; heard was {heard['text'][:200]!r}"
    elif row["input_text"] is None and "repeats" in found["flags"]:  # a recogniser that was lost, not a speaker
        return found | {
            "status": "rejected",
            "reasons": [f"{row['place']}: the recogniser wrote {found['flags']['repeats']}"],
        }
    found["same"] = hashlib.sha256(normalise(text).casefold().encode()).hexdigest()[:32]
    found["pace"] = len(text) / row["seconds"]
    return found | {"status": "repaired" if reasons else "accepted", "reasons": reasons}


def _sound_flags(measures: dict) -> dict[str, str]:
    flags = {}
    if measures["snr"] < NOISY:
        flags["noise"] = f"speech is {measures['snr']:.0f} dB above the noise"
    if measures["bandwidth"] < NARROW:
        flags["bandwidth"] = f"nothing above {measures['bandwidth'] / 1000:.1f} kHz"
    if measures["pause"] > LONG_PAUSE:
        flags["silence"] = f"a pause of {measures['pause']:.1f} s"
    if measures["clipped"] > 0.001:
        flags["clipping"] = f"{measures['clipped']:.1%} of it is clipped"
    return flags


def usual_pace(journal: Journal) -> tuple[float, float]:
    """Median of characters a second, and how far from it is unusual."""
    middle = journal.median("pace")
    spread = 1.4826 * journal.median(f"abs(pace - {middle!r})")  # a deviation that outliers can't move
    return middle, max(4 * spread, 0.25 * middle)


def _compare(journal: Journal) -> None:
    """What only shows beside the others: the same sound, the same text, another pace, another level."""
    first = "SELECT min(id) FROM clips o WHERE o.sha256 = clips.sha256 AND o.status != 'rejected'"
    again = f"status != 'rejected' AND clips.id != ({first})"
    for row in journal.pages(again):
        original = journal.value("SELECT min(id) FROM clips WHERE sha256 = ? AND status != 'rejected'", row["sha256"])
        if original != row["id"]:
            said = f"{row['source']} holds the same sound as {original}; keep one of the two"
            journal.set(row, status="rejected", reasons=[said])
    middle, far = usual_pace(journal)
    level = journal.median(measure("rms_dbfs"))
    other = "EXISTS (SELECT 1 FROM clips o WHERE o.same = clips.same AND o.id != clips.id AND o.status != 'rejected')"
    odd = f"abs(pace - {middle!r}) > {far!r}", f"abs({measure('rms_dbfs')} - {level!r}) > 12", other
    for row in journal.pages(f"status != 'rejected' AND ({' OR '.join(odd)})"):
        flags = dict(row["flags"])
        if abs(row["pace"] - middle) > far:
            flags["pace"] = f"{row['pace']:.1f} characters a second, and {middle:.1f} is usual"
        if abs(row["measures"]["rms_dbfs"] - level) > 12:
            flags["level"] = f"recorded at {row['measures']['rms_dbfs']:.0f} dBFS, and {level:.0f} is usual"
        query = "SELECT min(id) FROM clips WHERE same = ? AND id != ? AND status != 'rejected'"
        if twin := journal.value(query, row["same"], row["id"]):
            flags["same text"] = f"{twin} says the same"
        journal.set(row, flags=flags)


def split(journal: Journal, seed: int, heldout: int | None = None) -> str:
    """Hold out `heldout` of the usable clips, but leave one to train on at least. None: about 5 %, at least 3 and at
    most 32; one where there are fewer than 20.

    No held-out text is trained on: a clip whose text another clip says is never held out. Of ten long recordings or
    more, whole ones are held out; of fewer, their last clips are, so that few neighbours are parted. Chosen by a hash
    of seed and name, so that neither the order nor the machine matters. Returns how it was done.
    """
    base, usable = journal.base, "status != 'rejected'"
    n = journal.value(f"SELECT count(*) FROM clips WHERE {usable}")
    few = 1 if n < 20 else min(32, max(3, round(0.05 * n)))
    held = min(few if heldout is None else heldout, n - 1)
    base.create_function(
        "lot", 1, lambda name: hashlib.sha256(f"{seed}/{name}".encode()).hexdigest(), deterministic=True
    )
    base.execute(f"UPDATE clips SET split = 'train' WHERE {usable}")
    single = f"{usable} AND (SELECT count(*) FROM clips o WHERE o.same = clips.same AND o.{usable}) = 1"
    recordings, largest = base.execute(
        f"SELECT count(*), max(n) FROM (SELECT count(*) AS n FROM clips WHERE {usable} GROUP BY input)"
    ).fetchone()
    if not held:
        return "nothing: there is one clip" if n == 1 else "nothing, as asked"
    if largest == 1 or recordings >= 10:
        taken = 0
        groups = (
            f"SELECT input, count(*) AS n, sum({single}) AS fit FROM clips WHERE {usable} GROUP BY input "
            "HAVING n = fit ORDER BY lot(input)"
        )
        chosen = []
        for group in journal.all(groups):
            if taken + group["n"] <= held or not taken:
                chosen.append(group["input"])
                taken += group["n"]
            if taken >= held:
                break
        if 0 < taken <= 3 * held:
            for name in chosen:
                base.execute(f"UPDATE clips SET split = 'heldout' WHERE {usable} AND input = ?", (name,))
            return "by recording and by text" if largest > 1 else "by text"
    last = f"SELECT rowid FROM clips WHERE {single} ORDER BY input DESC, part DESC LIMIT {held}"
    if base.execute(f"UPDATE clips SET split = 'heldout' WHERE rowid IN ({last})").rowcount:
        return "the last clips of a recording, by text"
    lot = f"SELECT rowid FROM clips WHERE {usable} ORDER BY lot(id) LIMIT {held}"
    base.execute(f"UPDATE clips SET split = 'heldout' WHERE rowid IN ({lot})")
    return "by clip: every text is said more than once"
