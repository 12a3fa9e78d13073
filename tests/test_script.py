"""Scripts of several voices, and words replaced in a recording."""

import pytest
import torch
from conftest import DEMO_VOICE

from f5kit.audio import read_audio, write_audio
from f5kit.checkpoint import load_model
from f5kit.edit import _spread, replace_words
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.script import Line, Role, parse_script, speak_script

pytestmark = pytest.mark.usefixtures("one_thread")
FAST = dict(steps=2, progress=False)


@pytest.fixture(scope="module")
def voice():
    return Voice.load("tiny", vocoder="griffin-lim", device="cpu")


@pytest.fixture(scope="module")
def town(voice):
    return voice.refer_to(DEMO_VOICE / "wavs" / "demo_0002.flac", "Other words than it says.")


def test_a_script_names_its_voices():
    script = "Once,\n[town] who's [pause 1.5] there?\n[main] nobody [pause]"
    assert parse_script(script, ["main", "town"]) == [
        Line("main", "Once,\n"), Line("town", " who's "), Line("town", "", 1.5), Line("town", " there?\n"),
        Line("main", " nobody "), Line("main", "", 0.5),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"names \[city\]; the voices are main, town"):
        parse_script("[city] Hello.", ["main", "town"])
    with pytest.raises(UserError, match="longer than 60 s"):
        parse_script("[pause 61]", ["main"])


def test_voices_take_turns(voice, town):
    roles = {"main": voice, "town": Role(town, {"speed": 2.0, "seed": 7})}
    speech = speak_script(roles, "Good day. [town] Good day. [pause 1] Bye. [main] Bye.", gap=0.5, **FAST)
    assert [(c.voice, c.text.strip()) for c in speech.chunks] == [
        ("main", "Good day."), ("town", "Good day."), ("town", "Bye."), ("main", "Bye.")
    ]  # fmt: skip
    assert [c.seed for c in speech.chunks] == [0, 1007, 3007, 4000]
    gaps = [b.start - a.end for a, b in zip(speech.chunks, speech.chunks[1:], strict=False)]
    assert gaps == [pytest.approx(0.5, abs=0.01), pytest.approx(1.0, abs=0.01), pytest.approx(0.5, abs=0.01)]
    assert speech.chunks[-1].end == pytest.approx(speech.seconds, abs=0.03)
    assert len(speech.mel) == sum(c.frames for c in speech.chunks) and speech.audio.isfinite().all()
    for script, told in (("  ", "the script is empty"), ("[town] ...", "the script is empty")):
        with pytest.raises(UserError, match=told):
            speak_script(roles, script, **FAST)
    with pytest.raises(UserError, match="speed is 9"):
        speak_script({"main": voice, "town": Role(town, {"speed": 9})}, "Hello. [town] Hello.", **FAST)


def test_words_are_replaced_and_the_rest_is_kept(voice, tmp_path):
    clip = read_audio(DEMO_VOICE / "wavs" / "demo_0001.flac")
    file = write_audio(tmp_path / "said.wav", clip)
    text = "Alice said {quite other words} again."
    said = replace_words(voice, file, text, 0.5, 1.0, "something", duration=1.5, **FAST)
    assert said.seconds == pytest.approx(len(clip) / 24_000 + 1.0, abs=0.03)
    assert torch.allclose(said.audio[:10_000], clip[:10_000], atol=1e-4)  # 16-bit file
    assert torch.allclose(said.audio[-10_000:], clip[-10_000:], atol=1e-4)
    (chunk,) = said.chunks
    assert (chunk.text, chunk.start) == ("quite other words", pytest.approx(0.5, abs=0.01))
    assert chunk.end - chunk.start == pytest.approx(1.5, abs=0.02)
    longer = replace_words(voice, file, text, 0.5, 1.0, "something", **FAST)
    assert longer.chunks[0].frames > 47  # three words in the place of one


def test_the_gap_is_made_by_the_model_and_nothing_else(voice, awake, tmp_path):
    lively = Voice(awake(load_model("tiny")), voice.reference, voice.vocoder)
    file = DEMO_VOICE / "wavs" / "demo_0001.flac"
    a, b = (replace_words(lively, file, "He {sang} it.", 0.5, 1.0, "said", seed=seed, **FAST) for seed in (0, 1))
    frames = a.chunks[0].frames
    assert torch.equal(a.mel[:46], b.mel[:46]) and torch.equal(a.mel[47 + frames :], b.mel[47 + frames :])
    assert not torch.equal(a.mel[47 : 47 + frames], b.mel[47 : 47 + frames])


def test_around_the_gap_letters_last_as_they_were_said():
    starter = Voice.load("starter", vocoder="griffin-lim", device="cpu")
    said = starter.speak("We saw him in the garden.", seed=1, steps=4, progress=False)
    parts, frames = ("We saw him ", "near the old house", "."), (60, 90, 20)
    lengths = _spread(starter, said.mel, frames, parts, "in the garden")
    known = starter.model.letter_lengths(starter.model.tokenizer.encode("We saw him in the garden."), said.mel, 25)
    assert len(lengths) == len("".join(parts))
    assert float(lengths.sum()) == pytest.approx(sum(frames), abs=0.01)
    assert torch.allclose(lengths[:11], known[:11] * 60 / known[:11].sum())
    assert float(lengths[11:-1].sum()) == pytest.approx(90, abs=0.01) and bool((lengths[11:-1] > 0).all())


@pytest.mark.parametrize(
    ("said", "start", "end", "words", "told"),
    [
        ("No braces.", 0.2, 0.5, "a", "needs the new words in one pair of braces"),
        ("Two {a} {b}.", 0.2, 0.5, "a", "needs the new words in one pair of braces"),
        ("It {is}.", 0.5, 0.2, "was", "do not lie in order"),
        ("It {is}.", 0.5, 99.0, "was", "do not lie in order"),
        ("It {is}.", 0.2, 0.5, " ", "words is empty"),
        ("It {ß}.", 0.2, 0.5, "was", "lacks 'ß'"),
    ],
)
def test_edits_that_make_no_sense(voice, said, start, end, words, told):
    with pytest.raises(UserError, match=told):
        replace_words(voice, DEMO_VOICE / "wavs" / "demo_0001.flac", said, start, end, words, **FAST)
