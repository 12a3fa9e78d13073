"""Text to the tokens that upstream's published models were trained on: Chinese as pinyin, all else letter by letter.

Upstream (F5-TTS, model/utils.py, convert_char_to_pinyin) segments every text with jieba, puts a space before each
Chinese syllable, and a space before each segment of several ASCII characters that follows something else. So English
"well (done)" becomes "well ( done)", and the models expect that. For the same reason "français" becomes "franç ais",
which is a fault: here no space is ever put inside a word. That is the one difference.

A text without Chinese characters needs neither jieba nor pypinyin: what jieba does to it is one pattern.
"""

from __future__ import annotations

import re
import unicodedata

from f5kit.errors import UserError

# Upstream reads these as the plain character (its custom_trans).
_PLAIN = str.maketrans({";": ",", "“": '"', "”": '"', "‘": "'", "’": "'"})
# Where jieba or pypinyin have a say: ideographs, the zero that is written like one, and the blocks between them.
_CHINESE = re.compile("[\u2e80-\u2fdf\u3005\u3007\u3021-\u303b\u3100-\u9fff\ue000-\ufaff\U00020000-\U0003ffff]")
# jieba-rs 0.11 without ideographs: the five ASCII words of its dictionary; words of letters and digits with single
# marks inside; runs of marks; any other character by itself.
_JIEBA_WORD = re.compile(r"(AT&T|[cC]\+\+|[cC]#)")
_JIEBA_SEGMENT = re.compile(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*%?|[+#&._%-]+|.", re.DOTALL)


def to_pinyin(text: str) -> list[str]:
    """The tokens of a text, as upstream makes them but for spaces inside words.

    Raises UserError for Chinese text when rjieba and pypinyin are not installed.
    """
    text = text.translate(_PLAIN)
    chinese = _CHINESE.search(text)
    segments = _segments_of_chinese(text) if chinese else _segments(text)
    tokens: list[str] = []
    word_goes_on = False  # the last token is a letter of a word that the next segment may continue
    for segment in segments:
        if segment.isascii():
            joined = word_goes_on and segment[0].isalnum()
            if len(segment) > 1 and tokens and tokens[-1] not in " :'\"" and not joined:
                tokens.append(" ")
            tokens += segment
        else:
            tokens += _syllables(segment) if chinese else segment
        word_goes_on = _ends_in_letter(segment)
    return tokens


def _segments(text: str) -> list[str]:
    """What jieba makes of a text without ideographs."""
    parts = _JIEBA_WORD.split(text)
    return [s for i, part in enumerate(parts) for s in ([part] if i % 2 else _JIEBA_SEGMENT.findall(part))]


def _segments_of_chinese(text: str) -> list[str]:
    try:
        import pypinyin  # noqa: F401
        import rjieba
    except ImportError:
        raise UserError(
            f"reading the Chinese characters of {text[:20]!r} needs the extra pinyin: pip install rjieba pypinyin"
        ) from None
    return rjieba.cut(text)


def _syllables(segment: str) -> list[str]:
    """A segment with other than ASCII characters: a space and the pinyin for each ideograph, others as they are.

    A segment of ideographs alone is read as a word, so that each gets the sound it has there.
    """
    from pypinyin import Style, lazy_pinyin

    how = dict(style=Style.TONE3, tone_sandhi=True)
    tokens: list[str] = []
    if len(segment.encode()) == 3 * len(segment):
        for character, sound in zip(segment, lazy_pinyin(segment, **how), strict=True):
            tokens += [" ", sound] if _is_ideograph(character) else [sound]
        return tokens
    for character in segment:
        tokens += [" ", *lazy_pinyin(character, **how)] if _is_ideograph(character) else [character]
    return tokens


def _is_ideograph(character: str) -> bool:
    return "\u3100" <= character <= "\u9fff"


def _ends_in_letter(segment: str) -> bool:
    """Whether a plain letter right behind would continue a word: after an accented letter, but not after ideographs
    and other letters that are written without spaces between words.
    """
    last = segment[-1]
    letter = last.isalnum() or unicodedata.category(last).startswith("M")
    return letter and not last.isascii() and unicodedata.east_asian_width(last) not in "WF"
