"""Text: cleaning it, and turning it into tokens."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from f5kit.errors import UserError
from f5kit.numerals import read_numbers
from f5kit.pinyin import to_pinyin

# Typographic forms that say the same as a plain character; the kit's own models were trained on the plain one.
_PLAIN = str.maketrans(
    {"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\u00ad": None, "\u200b": None}
)
# Nobody sees or speaks these, and no vocabulary has them: soft hyphen, zero-width space, byte order mark.
_INVISIBLE = str.maketrans({"\u00ad": None, "\u200b": None, "\ufeff": None})

NORMALISERS = ("basic", "published", "none")
TOKENIZERS = ("char", "pinyin", "custom", "byte")


def normalise(text: str, name: str = "basic") -> str:
    """Text as the tokenizer wants it.

    "basic": Unicode NFC, typographic quotes and dashes made plain, runs of white space made one space, ends trimmed.
    Digits and letters of every script stay as they are. "published": the same, with the typography left alone, which
    upstream's published models know. "none": the text itself. Steps may follow: "+numbers:vi" reads numbers out in that
    language, as in "basic+numbers:vi" (`f5kit.numerals` has the languages), and "+lower" makes all letters small.

    Raises UserError for a name this version does not know.
    """
    name, *steps = name.split("+")
    if name not in NORMALISERS or any(step != "lower" and not step.startswith("numbers:") for step in steps):
        known = ", ".join(NORMALISERS)
        raise UserError(
            f"there is no text normaliser {'+'.join([name, *steps])!r}; the normalisers are {known}, "
            "and any of them with numbers read out or in small letters, as in basic+numbers:vi+lower"
        )
    if name != "none":
        text = unicodedata.normalize("NFC", text)
        text = " ".join((text.translate(_PLAIN) if name == "basic" else text.translate(_INVISIBLE)).split())
    for step in steps:
        text = text.lower() if step == "lower" else read_numbers(text, step.removeprefix("numbers:"))
    return text


def english_vocab() -> list[str]:
    """The vocabulary of the kit's own small models: printable ASCII, space first (95 tokens)."""
    return [chr(code) for code in range(0x20, 0x7F)]


def byte_vocab() -> list[str]:
    """The tokens of the byte tokenizer, written so that each fits a line of a vocab.txt: "<0x00>" to "<0xFF>"."""
    return [f"<0x{value:02X}>" for value in range(256)]


class Tokenizer:
    """Normalised text to token ids.

    The vocabulary is a list of tokens whose index is the id; token 0 is the space (upstream's vocab.txt has the same
    form). `name` says what the tokens of a text are:

    "char"    its characters
    "pinyin"  what upstream's published models were trained on: Chinese as pinyin, all else characters (`f5kit.pinyin`)
    "custom"  the same, of a vocabulary of one's own: upstream's name for it
    "byte"    its UTF-8 bytes; the vocabulary is `byte_vocab()`

    A token that is not in the vocabulary is refused: upstream maps it to the space without a word.
    """

    def __init__(self, vocab: list[str], name: str = "char", normaliser: str = "basic"):
        if name not in TOKENIZERS:
            raise UserError(f"there is no tokenizer {name!r}; the tokenizers are {', '.join(TOKENIZERS)}")
        normalise("", normaliser)  # refuses a name that is not known
        if name == "byte" and vocab != byte_vocab():
            raise UserError(f"the byte tokenizer has 256 tokens of its own, not a vocabulary of {len(vocab)}")
        if name != "byte" and (not vocab or vocab[0] != " "):
            raise UserError(f"token 0 of the vocabulary is {vocab[:1]!r}; it must be the space")
        places: dict[str, int] = {}
        for i, token in enumerate(vocab):
            if token in places:
                raise UserError(
                    f"the vocabulary lists {token!r} more than once, in lines {places[token] + 1} and {i + 1}, so one "
                    "of its ids has no token: restore the file that came with the weights"
                )
            places[token] = i
        self.vocab, self.name, self.normaliser, self._ids = list(vocab), name, normaliser, places

    def tokens(self, text: str) -> list[str]:
        """The tokens of the normalised text, whether the vocabulary has them or not."""
        text = normalise(text, self.normaliser)
        if self.name == "byte":
            return [self.vocab[value] for value in text.encode()]
        return list(text) if self.name == "char" else to_pinyin(text)

    def encode(self, text: str) -> list[int]:
        """Ids of the text's tokens. Raises UserError that lists the tokens the vocabulary lacks."""
        tokens = self.tokens(text)
        unknown = list(dict.fromkeys(token for token in tokens if token not in self._ids))
        if unknown:
            listed = " ".join(f"{token!r}" for token in unknown[:20])
            listed += f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
            raise UserError(
                f"the model's vocabulary of {len(self.vocab)} tokens lacks {listed} of {text[:60]!r}: "
                "write the text without them, or choose a model whose vocabulary has them"
            )
        return [self._ids[token] for token in tokens]

    @cached_property
    def hash(self) -> str:
        """sha256 of the tokenizer's names and vocabulary: equal hashes give equal ids for every text."""
        return hashlib.sha256("\n".join([self.name, self.normaliser, *self.vocab]).encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path, name: str = "char", normaliser: str = "basic") -> Tokenizer:
        """Read a vocab.txt: one token a line, the line's number is the id.

        A byte order mark, CRLF, a missing last newline, and a first line whose space an editor has trimmed change
        nothing. The byte tokenizer needs no file. Raises UserError for a missing file, one that is not UTF-8, a
        repeated token, or a first line that is not the space.
        """
        path = Path(path)
        if name == "byte" and not path.is_file():
            return cls(byte_vocab(), name, normaliser)
        if not path.is_file():
            raise UserError(f"there is no vocabulary at {path}; a model folder needs its vocab.txt")
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
        # Not splitlines(): a vocabulary may hold characters that Python takes for line ends.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        if lines[-1] == "":
            lines.pop()
        if len(lines) > 1 and lines[0] == "":
            lines[0] = " "
        try:
            return cls(lines, name, normaliser)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the vocab.txt that `load` and upstream read."""
        Path(path).write_bytes("".join(f"{token}\n" for token in self.vocab).encode())


@dataclass(frozen=True)
class Missing:
    """How a token that a vocabulary lacks occurs in some texts."""

    count: int
    """How often."""
    examples: tuple[str, ...]
    """The token in its surroundings, from up to three texts."""


def coverage(texts: Iterable[str], vocab: Tokenizer | Iterable[str], normaliser: str = "basic") -> dict[str, Missing]:
    """What the texts need and the vocabulary lacks, the most frequent first; empty when all is there.

    `vocab` is a model's tokenizer, or characters, which are then compared with the texts as `normaliser` leaves them.
    """
    if not isinstance(vocab, Tokenizer):
        known = list(dict.fromkeys(vocab))
        vocab = Tokenizer([" ", *(token for token in known if token != " ")], "char", normaliser)
    known, counts, examples = set(vocab.vocab), Counter(), {}
    for text in texts:
        lacking = Counter(token for token in vocab.tokens(text) if token not in known)
        counts += lacking
        for token in lacking:
            shown = examples.setdefault(token, [])
            if len(shown) < 3:
                shown.append(_surroundings(normalise(text, vocab.normaliser), token))
    return {token: Missing(count, tuple(examples[token])) for token, count in counts.most_common()}


def _surroundings(text: str, token: str, width: int = 12) -> str:
    """A piece of the text around a token; its beginning for a token that is no part of it, such as pinyin."""
    place = max(text.find(token), 0)
    start, end = max(place - width, 0), place + len(token) + width
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
