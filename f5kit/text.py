"""Text: cleaning it, turning it into tokens, and cutting it where a speaker would breathe."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from f5kit.errors import UserError

# Typographic forms that say the same as a plain character; models were trained on the plain one.
_PLAIN = str.maketrans(
    {"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\u00ad": None, "\u200b": None}
)


def normalise(text: str, name: str = "basic") -> str:
    """Text as the tokenizer wants it.

    "basic": Unicode NFC, typographic quotes and dashes made plain, runs of white space made one space, ends trimmed.
    Digits and letters of every script stay as they are. "none": the text itself.

    Raises UserError for a name this version does not know.
    """
    if name == "none":
        return text
    if name != "basic":
        raise UserError(f"there is no text normaliser {name!r}; the normalisers are basic, none")
    return " ".join(unicodedata.normalize("NFC", text).translate(_PLAIN).split())


def english_vocab() -> list[str]:
    """The vocabulary of the kit's own small models: printable ASCII, space first (95 tokens)."""
    return [chr(code) for code in range(0x20, 0x7F)]


def coverage(texts: Iterable[str], vocab: Iterable[str], normaliser: str = "basic") -> dict[str, int]:
    """Characters of `texts` that `vocab` lacks, with their counts, the most frequent first; empty if all are there."""
    known = set(vocab)
    missing = Counter(c for text in texts for c in normalise(text, normaliser) if c not in known)
    return dict(missing.most_common())


class Tokenizer:
    """Normalised text to token ids, one token a character.

    The vocabulary is a list of tokens whose index is the id; token 0 is the space (upstream's vocab.txt has the same
    form). A character that is not in the vocabulary is refused: upstream maps it to the space without a word.
    """

    def __init__(self, vocab: list[str], name: str = "char", normaliser: str = "basic"):
        if name != "char":
            raise UserError(f"there is no tokenizer {name!r}; the tokenizers are char")
        if not vocab or vocab[0] != " ":
            raise UserError(f"token 0 of the vocabulary is {vocab[:1]!r}; it must be the space")
        repeated = [token for token, count in Counter(vocab).items() if count > 1]
        if repeated:
            raise UserError(f"the vocabulary lists {repeated[:5]!r} more than once; each token needs one line")
        self.vocab, self.name, self.normaliser = list(vocab), name, normaliser
        self._ids = {token: i for i, token in enumerate(vocab)}

    def encode(self, text: str) -> list[int]:
        """Ids of the text's tokens. Raises UserError that lists the characters the vocabulary lacks."""
        characters = normalise(text, self.normaliser)
        unknown = list(dict.fromkeys(c for c in characters if c not in self._ids))
        if unknown:
            listed = " ".join(f"{c!r}" for c in unknown)
            raise UserError(
                f"the model's vocabulary of {len(self.vocab)} tokens lacks {listed} of {text[:60]!r}: "
                "write the text without them, or choose a model whose vocabulary has them"
            )
        return [self._ids[c] for c in characters]

    @cached_property
    def hash(self) -> str:
        """sha256 of the tokenizer's names and vocabulary: equal hashes give equal ids for every text."""
        return hashlib.sha256("\n".join([self.name, self.normaliser, *self.vocab]).encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path, name: str = "char", normaliser: str = "basic") -> Tokenizer:
        """Read a vocab.txt: one token a line. A byte order mark, CRLF and a missing last newline change nothing.

        Raises UserError for a missing file, a repeated token, or a first line that is not the space.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"there is no vocabulary at {path}; a model folder needs its vocab.txt")
        # Not splitlines(): a vocabulary may hold characters that Python takes for line ends.
        lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]
        if lines[-1] == "":
            lines.pop()
        try:
            return cls(lines, name, normaliser)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the vocab.txt that `load` and upstream read."""
        Path(path).write_bytes("".join(f"{token}\n" for token in self.vocab).encode())


_SENTENCE_END = re.compile(r"(?<=[.!?。！？।؟])\s+|(?<=[。！？।])")
_CLAUSE_END = re.compile(r"(?<=[,;:،、，；：])\s*")


def split_sentences(text: str, max_chars: int) -> list[str]:
    """Cut a long text into pieces of at most `max_chars` characters.

    It is cut at sentences, where these are too long at clauses, then at words, and at last anywhere. Neighbouring
    pieces are joined again while they fit, so that short sentences share one breath.
    """
    if max_chars < 1:
        raise UserError(f"max_chars is {max_chars}; a piece of text needs at least one character")
    pieces: list[str] = []
    for sentence in _SENTENCE_END.split(text):
        pieces += _cut(sentence.strip(), max_chars, (_CLAUSE_END, re.compile(r"\s+")))
    chunks: list[str] = []
    for piece in filter(None, pieces):
        if chunks and len(chunks[-1]) + 1 + len(piece) <= max_chars:
            chunks[-1] += " " + piece
        else:
            chunks.append(piece)
    return chunks


def _cut(piece: str, max_chars: int, separators: tuple) -> list[str]:
    """A piece that is too long, cut at the first kind of separator, and what is still too long at the next kind."""
    if len(piece) <= max_chars:
        return [piece]
    if not separators:
        return [piece[i : i + max_chars] for i in range(0, len(piece), max_chars)]
    return [p for part in separators[0].split(piece) for p in _cut(part.strip(), max_chars, separators[1:])]
