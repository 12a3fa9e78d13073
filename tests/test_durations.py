"""Durations: by what is said, not by bytes, and nearer to the truth than upstream's rule."""

import math

import pytest
from conftest import DEMO_VOICE

from f5kit.durations import SHORTEST, Pace, dataset_pace, duration_errors, fit_pace, kind, seconds_by_bytes


@pytest.fixture(scope="module")
def demo_dataset(tmp_path_factory):
    from f5kit.prepare import prepare_dataset

    return prepare_dataset(DEMO_VOICE, tmp_path_factory.mktemp("demo") / "data", heldout=12, progress=False)


def test_kinds_of_characters():
    known = {
        "vowel": "aéữю", "consonant": "zбß", "ideograph": "好", "syllable": "あ한", "abjad": "شא", "abugida": "कก",
        "mark": "ि", "digit": "7٣", "clause": ",،", "stop": "!।؟", "space": " ", "other": '"',
    }  # fmt: skip
    for name, characters in known.items():
        assert {kind(c) for c in characters} == {name}


def test_a_known_speaker_is_learned_back():
    """Clips made by rates that are not the usual ones."""
    truth = Pace({**Pace().rates, "vowel": 0.11, "consonant": 0.04, "stop": 0.5}, edges=0.3)
    texts = [line.split("|")[1] for line in (DEMO_VOICE / "metadata.csv").read_text(encoding="utf-8").splitlines()]
    found = fit_pace(texts[5:], [truth.seconds(text) for text in texts[5:]])
    for text in texts[:5]:
        assert found.seconds(text) == pytest.approx(truth.seconds(text), rel=0.03)
        assert abs(Pace().seconds(text) / truth.seconds(text) - 1) > 0.03
    assert found.error < 0.03 and found.clips == len(texts) - 5


def test_the_reference_sets_the_pace():
    pace, text = Pace(), "The same words in all of them."
    slow, fast = (pace.continue_from(text, seconds, text) for seconds in (4.0, 2.0))
    assert (slow, fast) == (pytest.approx(4.0), pytest.approx(2.0))
    fitted = Pace(error=0.1)
    assert 1.6 < fitted.continue_from(text, 4.0, text) / fitted.continue_from(text, 2.0, text) < 2


def test_short_texts_have_a_floor():
    assert Pace().seconds("") == SHORTEST
    assert Pace().continue_from("A reference of some length.", 1.0, "a") == SHORTEST
    assert Pace().continue_from("A reference of some length.", 2.2, "Hi.") > seconds_by_bytes(
        "A reference of some length.", 2.2, "Hi."
    )


def test_too_few_clips_are_not_fitted():
    assert fit_pace(["one", "two"], [1.0, 1.0]) == Pace()


def test_held_out_lengths_are_guessed_better_than_by_bytes(demo_dataset):
    errors = duration_errors(demo_dataset.clips)
    assert errors["clips"] >= 5
    assert errors["fitted"] < 0.12
    assert errors["fitted"] < errors["by_bytes"]
    assert math.isfinite(dataset_pace(demo_dataset).error)
