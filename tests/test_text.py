"""Text: nothing is mapped in silence, and vocabularies survive the editors that touch them."""

import pytest

from f5kit.errors import UserError
from f5kit.text import Tokenizer, byte_vocab, coverage, english_vocab, normalise


def test_normalise_makes_typographic_text_plain():
    assert normalise("  “Well… it’s\u00a0fine,”\n she said —  ") == '"Well... it\'s fine," she said -'
    assert normalise("cafe\u0301") == "café"


def test_unknown_characters_are_refused_and_named():
    tokenizer = Tokenizer(english_vocab())
    with pytest.raises(UserError, match="'ñ' '¿'|'¿' 'ñ'"):
        tokenizer.encode("¿Mañana?")
    assert tokenizer.encode(" a b ") == [65, 0, 66]


def test_coverage_counts_what_is_missing_and_shows_where():
    texts = ["Mañana por la mañana.", "un an\u0303o", "año ß"]
    missing = coverage(texts, english_vocab())
    assert list(missing) == ["ñ", "ß"]
    assert [found.count for found in missing.values()] == [4, 1]
    assert missing["ñ"].examples == ("Mañana por la m…", "un año", "año ß")
    assert not coverage(texts, [*english_vocab(), "ñ", "ß"])


def test_coverage_asks_the_models_own_tokenizer():
    numbers = Tokenizer(english_vocab(), normaliser="basic+numbers:vi")
    assert list(coverage(["21 years"], numbers)) == ["ư", "ơ", "ố"]  # hai mươi mốt years
    assert not coverage(["任何 كل"], Tokenizer(byte_vocab(), "byte"))


@pytest.mark.parametrize(
    "written",
    [
        b" \na\nb\n",
        b" \r\na\r\nb\r\n",
        b"\xef\xbb\xbf \na\nb\n",
        b" \na\nb",
        b"\xef\xbb\xbf \r\na\r\nb",
        b"\na\nb\n",
    ],
    ids=["plain", "crlf", "bom", "no last newline", "all three", "trimmed space"],
)
def test_vocabulary_files_keep_their_indices(tmp_path, written):
    (tmp_path / "vocab.txt").write_bytes(written)
    assert Tokenizer.load(tmp_path / "vocab.txt").vocab == [" ", "a", "b"]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b" \na\nb\na\n", "'a' more than once, in lines 2 and 4"),
        (b" \n\na\n\n", "'' more than once, in lines 2 and 4"),
        (b"a\n \n", "must be the space"),
        (b"", "must be the space"),
        (b" \n\xf1\n", "not UTF-8"),
        (" \na\n".encode("utf-16"), "not UTF-8"),
    ],
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


def test_normalisers_are_known_by_name():
    assert normalise("“Tʼa — a” …", "published") == "“Tʼa — a” …"
    assert normalise(" a\u00a0 b\u200b e\u0301", "published") == "a b é"
    assert normalise("có 21 con", "basic+numbers:vi") == "có hai mươi mốt con"
    assert normalise("Có 21 CON", "basic+numbers:vi+lower") == "có hai mươi mốt con"
    for name in ("fancy", "basic+upper", "basic+numbers:xx"):
        with pytest.raises(UserError, match="normaliser|numbers can't be read in 'xx'"):
            normalise("1", name)
        if name != "basic+numbers:xx":
            with pytest.raises(UserError, match="the normalisers are basic, published, none"):
                Tokenizer(english_vocab(), normaliser=name)


def test_bytes_are_their_own_ids(tmp_path):
    tokenizer = Tokenizer(byte_vocab(), "byte")
    assert tokenizer.encode("añ") == [0x61, 0xC3, 0xB1]
    tokenizer.save(tmp_path / "vocab.txt")
    for folder in (tmp_path, tmp_path / "none"):
        assert Tokenizer.load(folder / "vocab.txt", "byte").hash == tokenizer.hash
    with pytest.raises(UserError, match="256 tokens of its own"):
        Tokenizer(english_vocab(), "byte")


def test_unknown_tokenizers_are_refused():
    with pytest.raises(UserError, match="the tokenizers are char, pinyin, custom, byte"):
        Tokenizer(english_vocab(), "bpe")
