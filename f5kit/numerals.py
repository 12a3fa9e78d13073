"""Numbers as words, for before a text is tokenized: a model learns to speak letters, and "2024" has none.

Vietnamese has a reader of its own; English, German, Spanish, French and Turkish are read by num2words.
"""

from __future__ import annotations

import re
from decimal import Decimal

from f5kit.errors import UserError

LANGUAGES = ("vi", "en", "de", "es", "fr", "tr")

_NUMBER = re.compile(r"((?<![^\s(])[-−])?(\d+(?:[.,]\d+)*)(\s?%)?", re.ASCII)
_PERCENT = {
    "vi": "{} phần trăm", "en": "{} percent", "de": "{} Prozent", "es": "{} por ciento", "fr": "{} pour cent",
    "tr": "yüzde {}",
}  # fmt: skip
_LONGEST = 18  # digits; a longer row of them is no quantity


def read_numbers(text: str, language: str) -> str:
    """The text with its numbers written out: "21 %" in Vietnamese is "hai mươi mốt phần trăm".

    Groups and decimal marks are the language's own: "1.000" is a thousand, but one in English. What starts with a
    zero, like a telephone number, or has more than 18 digits is read digit by digit.

    Raises UserError for a language that is not in LANGUAGES, and where num2words is needed and not installed.
    """
    if language not in LANGUAGES:
        raise UserError(f"numbers can't be read in {language!r}; choose one of {', '.join(LANGUAGES)}")
    reader = _Vietnamese() if language == "vi" else _Num2words(language)

    def spoken(found: re.Match) -> str:
        sign, written, percent = found.groups()
        words = reader.read(*parts) if (parts := _parts(written, language)) else _one_by_one(written, reader)
        words = f"{reader.minus} {words}" if sign else words
        words = _PERCENT[language].format(words) if percent else words
        before, after = text[: found.start()][-1:], text[found.end() :][:1]
        return " " * before.isalpha() + words + " " * after.isalpha()

    if language == "vi":  # the fourth of a series has a word of its own
        text = re.sub(r"\b(thứ|tháng) 4(?![\d.,]*\d)", r"\1 tư", text, flags=re.IGNORECASE)
    if language == "tr":  # where the sign stands in front
        text = re.sub(r"%(\d+(?:[.,]\d+)*)", r"\1%", text)
    return _NUMBER.sub(spoken, text)


def _parts(written: str, language: str) -> tuple[str, str] | None:
    """Digits before and behind the decimal mark, or None for what is no single number, such as 20.11.2024."""
    group, mark = (",", ".") if language == "en" else (".", ",")
    grouped = re.fullmatch(rf"\d{{1,3}}(?:\{group}\d{{3}})+(?:\{mark}\d+)?", written)
    if grouped:
        written = written.replace(group, "")
    elif re.fullmatch(rf"\d{{1,3}}(?:\{mark}\d{{3}}){{2,}}", written):  # grouped as elsewhere
        written = written.replace(mark, "")
    whole, *decimals = re.split("[.,]", written)
    return (whole, "".join(decimals)) if len(decimals) < 2 else None


def _one_by_one(written: str, reader) -> str:
    return " ".join(reader.read(digits, "") for digits in re.split("[.,]", written))


def _by_digits(whole: str) -> bool:
    return len(whole) > _LONGEST or (len(whole) > 1 and whole.startswith("0"))


class _Num2words:
    """Numbers in one of num2words' languages."""

    def __init__(self, language: str):
        try:
            from num2words import num2words
        except ImportError:
            raise UserError(f"reading numbers in {language!r} needs the extra numbers: pip install num2words") from None
        self._read, self._language = num2words, language
        self.minus = {"en": "minus", "de": "minus", "es": "menos", "fr": "moins", "tr": "eksi"}[language]

    def read(self, whole: str, decimals: str) -> str:
        if _by_digits(whole):
            return " ".join(self._read(int(digit), lang=self._language) for digit in whole + decimals)
        number = Decimal(f"{whole}.{decimals}") if decimals else int(whole)
        return self._read(number, lang=self._language)


class _Vietnamese:
    """Numbers in Vietnamese, as they are read in the north: lẻ for a skipped ten, nghìn for a thousand."""

    minus = "âm"
    _digits = "không một hai ba bốn năm sáu bảy tám chín".split()

    def read(self, whole: str, decimals: str) -> str:
        words = [self._digits[int(d)] for d in whole] if _by_digits(whole) else self._count(int(whole))
        if decimals:
            words += ["phẩy", *(self._digits[int(digit)] for digit in decimals)]
        return " ".join(words)

    def _count(self, number: int) -> list[str]:
        """Words of a whole number. Billions count what stands before them, so that 10^12 is a thousand billion."""
        if number >= 10**9:
            rest = number % 10**9
            return self._count(number // 10**9) + ["tỷ"] + (self._groups(rest, inner=True) if rest else [])
        return self._groups(number, inner=False)

    def _groups(self, number: int, inner: bool) -> list[str]:
        """A number below a billion, in groups of three digits; `inner` when more stands before it."""
        if number == 0:
            return [self._digits[0]]
        words: list[str] = []
        for size, name in ((10**6, "triệu"), (10**3, "nghìn"), (1, None)):
            group = number // size % 1000
            if group:
                words += self._hundreds(group, inner or bool(words)) + ([name] if name else [])
        return words

    def _hundreds(self, number: int, inner: bool) -> list[str]:
        """1 to 999. Behind another group even absent hundreds are said: 2024 is two thousand, no hundred, 24."""
        hundred, ten, one = number // 100, number // 10 % 10, number % 10
        words = [self._digits[hundred], "trăm"] if hundred or inner else []
        if ten == 0:
            return words + ([*(["lẻ"] if words else []), self._digits[one]] if one else [])
        words += ["mười"] if ten == 1 else [self._digits[ten], "mươi"]
        if one:
            changed = {5: "lăm"} | ({1: "mốt"} if ten > 1 else {})
            words.append(changed.get(one, self._digits[one]))
        return words
