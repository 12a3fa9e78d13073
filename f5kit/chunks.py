"""Cutting a text where a speaker would breathe: at sentences, then clauses, then words, and at last anywhere.

The pieces of every text join to the text itself, to the last blank.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from f5kit.errors import UserError

# Marks that need a blank behind them, for they also stand inside numbers and names, and marks that need none.
SPACED_STOPS, STOPS = ".!?…", "。．！？｡।॥؟۔։።፧།။៕។"
SPACED_CLAUSES, CLAUSES = ",;:", "，、；：､،؛፣፤၊"
_CLOSING = r"[\"'”’»）)\]』」】〉》]*"

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(rf"(?:[{re.escape(SPACED_STOPS)}]+{_CLOSING}\s+|[{STOPS}]+{_CLOSING}\s*|\n\s*)")
_CLAUSE = re.compile(rf"(?:[{re.escape(SPACED_CLAUSES)}]+{_CLOSING}\s+|[{CLAUSES}]+{_CLOSING}\s*|\s[-–—]+\s+|[—–]+\s*)")
_WORD = re.compile(r"\s+")
# A full stop that ends no sentence: behind an initial or a title, or before a small letter.
_INITIAL = re.compile(r"(?:^|[\s.(])(?:[A-Z]|Dr|Mr|Mrs|Ms|St|Prof|No|vs)\.\s+$")


def split_text(
    text: str, limit: float, cost: Callable[[str], float] = len, first: float | None = None
) -> list[str]:
    """Pieces of a text, none of which costs more than `limit`; "".join(pieces) == text.

    Paragraphs (blank lines) are kept apart. Within one, neighbouring sentences share a piece while they fit, and pieces
    come out about equally long. `cost` says what a piece costs, by default a character each; it must not fall when a
    text grows, and a single character may cost more than the limit. `first` is a lower limit for the first piece, so
    that sound starts early. No piece begins with a combining mark. Raises UserError for limits that are not positive.
    """
    for name, value in (("limit", limit), ("first", limit if first is None else first)):
        if not value > 0:
            raise UserError(f"{name} is {value}; a piece of text needs room for at least one character")
    pieces: list[str] = []
    for paragraph in _cut_behind(_PARAGRAPH, text):
        if first is not None and first < limit and not pieces and cost(paragraph) > first:
            pieces.append(_pack(_atoms(paragraph, first, cost), first, cost, even=False)[0])
            paragraph = paragraph[len(pieces[0]) :]
        pieces += _pack(_atoms(paragraph, limit, cost), limit, cost)
    return pieces


def has_words(text: str) -> bool:
    """Whether there is anything to say in a text: a letter or a digit of any script."""
    return any(unicodedata.category(c)[0] in "LN" for c in text)


def ends_paragraph(piece: str) -> bool:
    """Whether a piece of a text ends with a blank line."""
    return piece[len(piece.rstrip()) :].count("\n") > 1


def ends_sentence(piece: str) -> bool:
    """Whether a piece of a text, which is not its last, ends where a sentence does."""
    return any(m.end() == len(piece) for m in _SENTENCE.finditer(piece)) and not _INITIAL.search(piece)


def _atoms(text: str, limit: float, cost: Callable, levels=(_SENTENCE, _CLAUSE, _WORD)) -> list[str]:
    """The text cut at the first kind of place, and what is still too long at the next kind."""
    if not text:
        return []
    if not levels:
        return _cut_hard(text, limit, cost)
    pieces = _join_initials(_cut_behind(levels[0], text)) if levels[0] is _SENTENCE else _cut_behind(levels[0], text)
    atoms: list[str] = []
    for piece in pieces:
        if cost(piece) <= limit:
            atoms.append(piece)
        else:
            atoms += _pack(_atoms(piece, limit, cost, levels[1:]), limit, cost)
    return atoms


def _cut_behind(marks: re.Pattern, text: str) -> list[str]:
    """The text cut behind every match."""
    ends = [m.end() for m in marks.finditer(text) if m.end() < len(text)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True) if a < b]


def _join_initials(sentences: list[str]) -> list[str]:
    joined: list[str] = []
    for sentence in sentences:
        if joined and (_INITIAL.search(joined[-1]) or (joined[-1].rstrip().endswith(".") and sentence[0].islower())):
            joined[-1] += sentence
        else:
            joined.append(sentence)
    return joined


def _pack(pieces: list[str], limit: float, cost: Callable, even: bool = True) -> list[str]:
    """Neighbours joined while they fit; with `even`, no fuller than it takes to share the whole out evenly."""
    whole = sum(map(cost, pieces))
    enough = whole / max(1, -(-whole // limit)) if even else limit
    packed: list[str] = []
    spent = 0.0
    for piece in pieces:
        # Blanks and marks alone belong to what stands before them, while there is room.
        if packed and (spent < enough or not has_words(piece)) and cost(packed[-1] + piece) <= limit:
            packed[-1] += piece
        else:
            packed.append(piece)
        spent = cost(packed[-1])
    return packed


def _cut_hard(text: str, limit: float, cost: Callable) -> list[str]:
    """A piece without any place to breathe, cut after as many characters as fit."""
    pieces, start = [], 0
    while start < len(text):
        end = _fitting(text, start, limit, cost)
        while end < len(text) and end > start + 1 and _continues(text[end]):
            end -= 1
        if end == start + 1:  # one letter with all its marks, however many
            while end < len(text) and _continues(text[end]):
                end += 1
        pieces.append(text[start:end])
        start = end
    return pieces


def _fitting(text: str, start: int, limit: float, cost: Callable) -> int:
    """The end of the longest text[start:end] that costs no more than the limit, of one character at least."""
    step = 1
    while start + step < len(text) and cost(text[start : start + 2 * step]) <= limit:
        step *= 2
    low, high = start + step, min(start + 2 * step, len(text))  # low fits, or is a single character
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(text[start:middle]) <= limit else (low, middle - 1)
    return low


def _continues(character: str) -> bool:
    """Whether a character belongs to the one before it: combining marks and joiners."""
    return unicodedata.category(character)[0] == "M" or character in "\u200c\u200d"
