"""Cutting texts: nothing is lost, nothing is too long, and every script has its places to breathe."""

import random

import pytest

from f5kit.chunks import ends_sentence, has_words, split_text
from f5kit.durations import usual_seconds
from f5kit.errors import UserError

TEXTS = {
    "sentences": "One. Two! Three? " * 30,
    "words": "word " * 500,
    "nothing to cut at": "x" * 5000,
    "clauses": "a, b; c: " * 99,
    "hindi": "नमस्ते। आप कैसे हैं। " * 40,
    "arabic": "هل أنت بخير؟ نعم، أنا بخير. " * 40,
    "chinese": "今天天气很好，我们去公园。你呢？" * 40,
    "japanese": "こんにちは。元気ですか？はい、元気です。" * 40,
    "thai": "กำลังทดสอบระบบเสียงพูด" * 40,
    "amharic": "ሰላም። እንዴት ነህ፧ " * 40,
    "marks on marks": "e\u0301\u0323" * 500,
    "lines": "a line\nand another\n\n\nnew   paragraph \n \n last" * 20,
    "marks alone": "... !!! ??? " * 60,
    "blanks": " \n\t " * 100,
}


@pytest.mark.parametrize("limit", [1, 7, 40, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_pieces_join_to_the_text_and_fit(name, limit):
    text = TEXTS[name]
    pieces = split_text(text, limit)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= limit or limit < 3, "a letter with its marks is never cut"
    assert all(pieces)


def test_random_texts_too():
    dice = random.Random(0)
    for _ in range(300):
        text = "".join(dice.choices("ab .,!?\n।，。؟-— e\u0301", k=dice.randrange(1, 80)))
        limit, first = dice.randrange(3, 30), dice.choice([None, 3, 8])
        pieces = split_text(text, limit, first=first)
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= max(limit, 3)


@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        ("It rained. We stayed in, and read.", 25, ["It rained. ", "We stayed in, and read."]),
        ("It rained. We stayed.", 25, ["It rained. We stayed."]),
        ("It was late, so we went home.", 20, ["It was late, ", "so we went home."]),
        ("Dr. Who saw J. Smith. Both ran.", 24, ["Dr. Who saw J. Smith. ", "Both ran."]),
        ("It costs 3.50, or 1,000 in all.", 16, ["It costs 3.50, ", "or 1,000 in all."]),
        ('He said "no." She left.', 15, ['He said "no." ', "She left."]),
        ("मैं ठीक हूँ। तुम कैसे हो।", 16, ["मैं ठीक हूँ। ", "तुम कैसे हो।"]),
        ("نعم، أنا بخير. وأنت؟ جيد.", 16, ["نعم، أنا بخير. ", "وأنت؟ جيد."]),
        ("我们去公园。你呢？好，走吧！", 8, ["我们去公园。", "你呢？好，走吧！"]),
        ("A title\n\nThe text.", 50, ["A title\n\n", "The text."]),
    ],
)
def test_where_texts_are_cut(text, limit, pieces):
    assert split_text(text, limit) == pieces


def test_pieces_are_about_equally_long():
    pieces = split_text("Some five words of text. " * 11, 100)
    assert max(map(len, pieces)) <= 1.5 * min(map(len, pieces))


def test_the_first_piece_is_short():
    text = "A long first sentence, which has two clauses. " * 4
    pieces = split_text(text, 150, first=25)
    assert pieces[0] == "A long first sentence, " and "".join(pieces) == text
    assert len(split_text(text, 150)[0]) > 80


def test_other_costs_than_characters():
    text = "Twenty-one: 21 22 23 24 25 26 27 28. " * 5
    pieces = split_text(text, 6.0, usual_seconds)
    assert "".join(pieces) == text and max(map(usual_seconds, pieces)) <= 6.0


def test_limits_that_make_no_sense():
    for how in ({"limit": 0}, {"limit": float("nan")}, {"limit": 5, "first": -1}):
        with pytest.raises(UserError, match="needs room for at least one character"):
            split_text("text", **how)


def test_where_sentences_end():
    assert all(map(ends_sentence, ("It rained. ", 'He said "no." ', "我们去公园。", "A title\n\n", "मैं ठीक हूँ। ")))
    assert not any(map(ends_sentence, ("It was late, ", "when Dr. ", "costs 3.", "one. two ", "")))


def test_what_has_words():
    assert all(map(has_words, ("a", "7", "?é", "न", "好")))
    assert not any(map(has_words, ("", " .. ", "?!", "—", "😀")))
