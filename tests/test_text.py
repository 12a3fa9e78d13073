"""Text: nothing is mapped in silence, and vocabularies survive the editors that touch them."""

import pytest

from f5kit.errors import UserError
from f5kit.text import Tokenizer, coverage, english_vocab, normalise, split_sentences


def test_normalise_makes_typographic_text_plain():
    assert normalise("  “Well… it’s\u00a0fine,”\n she said —  ") == '"Well... it\'s fine," she said -'
    assert normalise("cafe\u0301") == "café"


def test_unknown_characters_are_refused_and_named():
    tokenizer = Tokenizer(english_vocab())
    with pytest.raises(UserError, match="'ñ' '¿'|'¿' 'ñ'"):
        tokenizer.encode("¿Mañana?")
    assert tokenizer.encode(" a b ") == [65, 0, 66]


def test_coverage_counts_what_is_missing():
    assert coverage(["mañana", "año ß"], english_vocab()) == {"ñ": 2, "ß": 1}


@pytest.mark.parametrize(
    "written",
    [b" \na\nb\n", b" \r\na\r\nb\r\n", b"\xef\xbb\xbf \na\nb\n", b" \na\nb"],
    ids=["plain", "crlf", "bom", "no last newline"],
)
def test_vocabulary_files_keep_their_indices(tmp_path, written):
    (tmp_path / "vocab.txt").write_bytes(written)
    assert Tokenizer.load(tmp_path / "vocab.txt").vocab == [" ", "a", "b"]


@pytest.mark.parametrize(
    ("written", "problem"), [(b" \na\na\n", "more than once"), (b"a\n \n", "must be the space"), (b"", "space")]
)
def test_vocabulary_faults_are_told_with_the_file(tmp_path, written, problem):
    (tmp_path / "vocab.txt").write_bytes(written)
    with pytest.raises(UserError, match=problem) as error:
        Tokenizer.load(tmp_path / "vocab.txt")
    assert "vocab.txt" in str(error.value)


def test_saved_vocabulary_is_the_same(tmp_path):
    tokenizer = Tokenizer(english_vocab() + ["é", "\u2028"])  # U+2028 ends a line for Python, not for us
    tokenizer.save(tmp_path / "vocab.txt")
    assert Tokenizer.load(tmp_path / "vocab.txt").hash == tokenizer.hash


@pytest.mark.parametrize("text", ["One. Two! Three? " * 30, "word " * 500, "x" * 5000, "नमस्ते। " * 80, "a, b; c: " * 99])
def test_long_texts_are_cut_below_the_limit_and_nothing_is_lost(text):
    pieces = split_sentences(text, 100)
    assert max(map(len, pieces)) <= 100
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_sentences_stay_whole_when_they_fit():
    assert split_sentences("It rained. We stayed in, and read.", 25) == ["It rained.", "We stayed in, and read."]
    assert split_sentences("It rained. We stayed.", 25) == ["It rained. We stayed."]
