"""Recognition on real speech: known answers for the counting, and controls in the right order for the listening."""

from __future__ import annotations

import pytest
import torch
from librivox import lay_out_librivox, librivox_available

from f5kit.asr import (
    Errors,
    PocketSphinx,
    comparable,
    count_errors,
    load_recogniser,
    make_decoys,
    wins_among_decoys,
)
from f5kit.audio import read_audio
from f5kit.errors import UserError

pytest.importorskip("pocketsphinx")
pytest.importorskip("jiwer")
RATE = 16_000
human = pytest.mark.skipif(not librivox_available(), reason="needs Debian's pocketsphinx-testdata")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """[(text, audio)] of one human reader, shortest first."""
    folder = tmp_path_factory.mktemp("librivox")
    texts = lay_out_librivox(folder)
    clips = [(text, read_audio(folder / f"{name}.wav", RATE)) for name, text in texts.items()]
    return sorted(clips, key=lambda clip: len(clip[1]))


@pytest.fixture(scope="module")
def sphinx():
    return PocketSphinx()


@pytest.fixture(scope="module")
def pool():
    """Sentences of a book that nobody reads here."""
    from f5kit.judge import demo_texts

    return demo_texts()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't -- STOP!", "don't stop"),
        ("“Well-known,” he’d say… 'twas", "well known he'd say twas"),
        ("snake_case\u00a0and  spaces", "snake case and spaces"),
        ("Größe: ¿Qué?", "größe qué"),
    ],
)
def test_texts_are_compared_by_their_words(text, expected):
    assert comparable(text) == expected


def test_numbers_are_compared_as_words():
    pytest.importorskip("num2words")
    assert comparable("21 at 5:15") == "twenty one at five fifteen"


def test_errors_are_counted():
    assert count_errors("The cat sat.", "the cat sat") == Errors(0, 3, 0, 11)
    assert count_errors("The cat sat.", "the bat sat down") == Errors(2, 3, 6, 11)  # one changed, one put in
    assert count_errors("The cat sat.", "") == Errors(3, 3, 11, 11)
    with pytest.raises(UserError, match="no words"):
        count_errors("...", "the cat")


def test_decoys_are_as_long_and_differ(pool):
    decoys = make_decoys("One does not simply sing to a wall.", pool, 20)
    assert len(set(decoys)) == 20 and {len(decoy.split()) for decoy in decoys} == {8}
    assert decoys == make_decoys("one does not simply sing to a wall", pool, 20)  # the seed and the words alone matter
    assert decoys != make_decoys("one does not simply sing to a wall", pool, 20, seed=1)
    short = make_decoys("go now", ["go home", "go on now", "stay here", "come in"], 2)
    assert "go home" not in short or "go on" not in short  # half of one is the other's
    with pytest.raises(UserError, match="give more"):
        make_decoys("go now", ["stay here"], 2)


@human
def test_a_reader_is_understood_better_than_the_wrong_text(sphinx, reader, pool):
    texts = [text for text, _ in reader]
    heard = [sphinx.transcribe(audio, RATE) for _, audio in reader]
    right = sum(count_errors(text, words).word_errors for text, words in zip(texts, heard, strict=True))
    wrong = sum(count_errors(text, words).word_errors for text, words in zip(texts, heard[1:] + heard[:1], strict=True))
    assert 2 * right < wrong
    won = [wins_among_decoys(sphinx, audio, RATE, text, pool) for text, audio in reader]
    lost = [wins_among_decoys(sphinx, audio, RATE, texts[i - 1], pool) for i, (_, audio) in enumerate(reader)]
    assert won.count(True) >= 3 and won.count(False) <= 1  # None where the pool has too few sentences so long
    assert lost.count(True) <= 1


@human
def test_the_same_sound_gives_the_same_words_whatever_came_before(sphinx, reader):
    short = [audio for _, audio in reader[:2]]
    alone = [PocketSphinx().transcribe(audio, RATE) for audio in short]
    assert [sphinx.transcribe(audio, RATE) for audio in reversed(short)] == alone[::-1]
    assert sphinx.transcribe(short[0] * 0.1, RATE) == alone[0]  # nor does the level matter


def test_noise_and_silence_win_no_decoys(sphinx, pool):
    g = torch.Generator().manual_seed(0)
    for sound in (torch.randn(2 * RATE, generator=g) * 0.1, torch.zeros(2 * RATE)):
        assert sphinx.transcribe(sound, RATE).count(" ") < 3
        assert not any(wins_among_decoys(sphinx, sound, RATE, text, pool) for text in pool[:3])


def test_a_word_it_does_not_know_is_not_counted(sphinx, pool):
    assert sphinx.knows("a wall") and not sphinx.knows("a qwzzk")
    assert wins_among_decoys(sphinx, torch.zeros(RATE), RATE, "sing to the qwzzk", pool) is None


def test_recognisers_that_cannot_be_had(tmp_path):
    with pytest.raises(UserError, match="'kaldi'.*pocketsphinx"):
        load_recogniser("kaldi")
    with pytest.raises(UserError, match="English alone.*'vi'"):
        load_recogniser("pocketsphinx", language="vi")


