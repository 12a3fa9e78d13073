"""Many languages: ids equal upstream's where its models were trained, no space ever stands inside a word, input in
composed and decomposed Unicode gives the same ids, and numbers are read out."""

import json
import sys
import unicodedata
from pathlib import Path

import pytest

from f5kit.errors import UserError
from f5kit.numerals import read_numbers
from f5kit.pinyin import to_pinyin
from f5kit.text import Tokenizer, coverage, english_vocab, normalise

GOLDEN = json.loads((Path(__file__).parent / "golden_text.json").read_text(encoding="utf-8"))
VIETNAMESE = "aàáảãạăằắẳẵặâầấẩẫậbcdđeèéẻẽẹêềếểễệghiìíỉĩịklmnoòóỏõọôồốổỗộơờớởỡợpqrstuùúủũụưừứửữựvxyỳýỷỹỵ"
TEXTS = {
    "vi": "Thường thì người Việt nói: “Nước chảy đá mòn”, chỗ nào cũng vậy.",
    "es": "¿Mañana vendrá la niñera? ¡Qué alegría, el pingüino también!",
    "de": "Größere Bäume überragen süße Früchte; Äpfel heißen Öl?",
    "fr": "Le garçon français a déjà dîné à Noël, où ça ? L'œuvre naïve.",
    "tr": "Şimdi çok güzel bir gün; ığdır'da yağmur İstanbul'a gidiyor.",
    "ar": "السلام عليكم، كيف حالك؟ أُحِبُّ القِراءَة.",
    "hi": "नमस्ते दुनिया, आप कैसे हैं? मैं हिंदी बोलता हूँ। क़लम ज़रा",
}


# --- upstream's ids ---------------------------------------------------------------------------------


def published_tokenizer() -> Tokenizer:
    """The published vocabulary, of which the golden file holds the tokens that its texts need."""
    vocab = [GOLDEN["tokens"].get(str(i), f"#{i}") for i in range(GOLDEN["size"])]
    return Tokenizer(vocab, "pinyin", "published")


@pytest.mark.parametrize("chinese", [False, True])
def test_ids_equal_upstreams(chinese):
    if chinese:
        pytest.importorskip("rjieba", reason="needs the extra pinyin")
        pytest.importorskip("pypinyin", reason="needs the extra pinyin")
    rows = [row for row in GOLDEN["texts"] if any("\u3100" <= c <= "\u9fff" for c in row["text"]) == chinese]
    assert len(rows) > 15
    tokenizer = published_tokenizer()
    for row in rows:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]


def test_words_that_upstream_breaks_stay_whole():
    assert len(GOLDEN["words"]) > 10
    for word, broken in GOLDEN["words"].items():
        assert "".join(to_pinyin(word)) == word == broken.replace(" ", "")


def test_text_without_chinese_needs_neither_package(monkeypatch):
    for name in ("rjieba", "pypinyin"):
        monkeypatch.setitem(sys.modules, name, None)
    for text in TEXTS.values():
        assert to_pinyin(text)
    with pytest.raises(UserError, match="'你好 hello' needs the extra pinyin: pip install rjieba pypinyin"):
        to_pinyin("你好 hello")


# --- a new language's own vocabulary ----------------------------------------------------------------


@pytest.mark.parametrize("language", TEXTS)
def test_a_language_with_an_extended_vocabulary(language):
    text = TEXTS[language]
    missing = coverage([text], english_vocab())
    assert missing
    for name in ("char", "pinyin"):
        tokenizer = Tokenizer([*english_vocab(), *missing], name)
        plain = normalise(text) if name == "char" else normalise(text).replace(";", ",")
        for form in ("NFC", "NFD"):
            ids = tokenizer.encode(unicodedata.normalize(form, text))
            said = "".join(tokenizer.vocab[i] for i in ids)
            if name == "char":
                assert said == plain  # there and back
            assert ids == tokenizer.encode(text)
        # upstream's separators stand between words and marks, never between two letters
        assert [w for w in _words(said) if w] == [w for w in _words(plain) if w]


def _words(text: str) -> list[str]:
    kept = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    return kept.split(" ")


def test_all_lower_case_vietnamese_letters():
    assert len(set(VIETNAMESE)) == len(VIETNAMESE) == 89
    tokenizer = Tokenizer([*english_vocab(), *coverage([VIETNAMESE], english_vocab())])
    decomposed = unicodedata.normalize("NFD", VIETNAMESE)
    assert len(decomposed) > len(VIETNAMESE)
    assert tokenizer.encode(decomposed) == tokenizer.encode(VIETNAMESE)
    assert len(set(tokenizer.encode(VIETNAMESE))) == 89


# --- numbers ----------------------------------------------------------------------------------------

SPOKEN = {
    "0": "không", "4": "bốn", "10": "mười", "11": "mười một", "15": "mười lăm", "20": "hai mươi",
    "21": "hai mươi mốt", "24": "hai mươi bốn", "55": "năm mươi lăm", "100": "một trăm",
    "105": "một trăm lẻ năm", "110": "một trăm mười", "121": "một trăm hai mươi mốt",
    "1000": "một nghìn", "1005": "một nghìn không trăm lẻ năm", "1015": "một nghìn không trăm mười lăm",
    "2024": "hai nghìn không trăm hai mươi bốn", "1945": "một nghìn chín trăm bốn mươi lăm",
    "1.000.000": "một triệu", "1,000,000": "một triệu", "1.000.005": "một triệu không trăm lẻ năm",
    "12.500.000": "mười hai triệu năm trăm nghìn", "1000000000": "một tỷ", "10000000000000": "mười nghìn tỷ",
    "3.5": "ba phẩy năm", "3,5": "ba phẩy năm", "1.234,05": "một nghìn hai trăm ba mươi bốn phẩy không năm",
    "-5": "âm năm", "50%": "năm mươi phần trăm", "2,5 %": "hai phẩy năm phần trăm",
    "0912": "không chín một hai", "5kg": "năm kg", "3-5": "ba-năm", "tháng 4": "tháng tư",
    "20.11.2024": "hai mươi mười một hai nghìn không trăm hai mươi bốn", "năm 2025.": "năm hai nghìn không trăm "
    "hai mươi lăm.",
}  # fmt: skip


@pytest.mark.parametrize("written", SPOKEN)
def test_vietnamese_numbers(written):
    assert read_numbers(written, "vi") == SPOKEN[written]


def test_vietnamese_numbers_are_read_in_both_forms_of_unicode():
    text = "Năm 2024 có 21 người"
    said = "Năm hai nghìn không trăm hai mươi bốn có hai mươi mốt người"
    for form in ("NFC", "NFD"):
        assert normalise(unicodedata.normalize(form, text), "basic+numbers:vi") == said
    assert normalise(said, "basic+numbers:vi") == said


@pytest.mark.parametrize(
    ("language", "written", "spoken"),
    [
        ("es", "Son 21, o 1.500.", "Son veintiuno, o mil quinientos."),
        ("en", "It costs 1,500 or 3.5.", "It costs one thousand, five hundred or three point five."),
        ("de", "Es sind 21 % von 1.000", "Es sind einundzwanzig Prozent von eintausend"),
        ("fr", "Il y a 80 lits", "Il y a quatre-vingts lits"),
        ("tr", "5 günde %50.", "beş günde yüzde elli."),
    ],
)
def test_numbers_of_other_languages(language, written, spoken):
    pytest.importorskip("num2words", reason="needs the extra numbers")
    said = read_numbers(written, language)
    assert not any(c.isdigit() for c in said)
    assert said == spoken


def test_numbers_without_num2words_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(UserError, match="'es' needs the extra numbers: pip install num2words"):
        read_numbers("21", "es")
    assert read_numbers("21", "vi") == "hai mươi mốt"
    with pytest.raises(UserError, match="'xx'; choose one of vi, en, de"):
        read_numbers("21", "xx")
