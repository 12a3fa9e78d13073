"""Speaking: the same seed says the same, faults are told before any work, and long texts come out whole."""

import pytest
import soundfile
import torch

from f5kit.audio import write_audio
from f5kit.checkpoint import load_model
from f5kit.errors import UserError
from f5kit.inference import Voice, cross_fade, find_reference

FAST = dict(steps=2, progress=False)


@pytest.fixture(scope="module")
def voice():
    return Voice.load("tiny", vocoder="griffin-lim", device="cpu")


def test_a_preset_speaks_from_the_bundled_voice(voice, tmp_path):
    speech = voice.speak("Hello there.", **FAST)
    file = speech.save(tmp_path / "deep" / "hello.wav")
    audio, rate = soundfile.read(file)
    assert rate == 24_000
    assert len(audio) == len(speech.audio) == pytest.approx(speech.seconds * 24_000)
    assert speech.audio.isfinite().all()
    assert speech._repr_html_().startswith("<audio controls")
    assert "tiny with fresh weights" in repr(voice)


def test_the_same_seed_says_the_same(voice):
    a, b, c = (voice.speak("Again and again.", seed=seed, **FAST) for seed in (4, 4, 5))
    assert torch.equal(a.audio, b.audio)
    assert not torch.equal(a.audio, c.audio)


def test_speed_changes_the_length(voice):
    text = "A sentence that is long enough to be measured by its length."
    slow, fast = (voice.speak(text, speed=speed, **FAST).seconds for speed in (0.8, 1.6))
    assert slow / fast == pytest.approx(2, rel=0.05)


def test_a_long_text_is_spoken_in_chunks_that_lose_nothing(voice):
    text = "This is one of many sentences that follow each other. " * 12
    speech = voice.speak(text, steps=1, progress=False)
    assert len(speech.chunks) > 1
    assert " ".join(speech.chunks) == text.strip()


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("", {}, "text is empty"),
        ("  \n ", {}, "text is empty"),
        ("Grüße", {}, "lacks 'ü' 'ß'"),
        ("Hi.", {"speed": 0}, "speed is 0"),
        ("Hi.", {"speed": float("nan")}, "speed is nan"),
        ("Hi.", {"steps": 0}, "steps is 0"),
    ],
)
def test_faults_are_told_before_any_work(voice, text, settings, told):
    with pytest.raises(UserError, match=told):
        voice.speak(text, **{**FAST, **settings})


def test_references_that_cannot_serve(tmp_path):
    write_audio(tmp_path / "silent.wav", torch.zeros(48_000))
    write_audio(tmp_path / "long.wav", torch.randn(24_000 * 17) * 0.1)
    write_audio(tmp_path / "fine.wav", torch.randn(48_000) * 0.1)
    for file, told in (("silent.wav", "silent"), ("long.wav", r"17.0 s of sound"), ("none.wav", "none.wav")):
        with pytest.raises(UserError, match=told):
            Voice.load("tiny", tmp_path / file, "Some words.", vocoder="griffin-lim", device="cpu")
    with pytest.raises(UserError, match="needs reference_text"):
        Voice.load("tiny", tmp_path / "fine.wav", vocoder="griffin-lim", device="cpu")


def test_the_typical_clip_is_a_training_clip_of_usual_length(dataset):
    clip = dataset.typical_clip()
    assert clip in dataset.train
    assert clip.seconds <= 15


def test_find_reference_prefers_what_travels_with_the_weights(tmp_path):
    (tmp_path / "reference.wav").write_bytes(b"x")
    (tmp_path / "reference.txt").write_text("What is said.\n")
    assert find_reference(tmp_path) == (tmp_path / "reference.wav", "What is said.")
    audio, text = find_reference("tiny")
    assert audio.is_file()
    assert text


def test_cross_fade_keeps_level_and_length():
    a, b = torch.ones(1000), torch.ones(800)
    joined = cross_fade([a, b], 100)
    assert len(joined) == 1700
    assert torch.allclose(joined, torch.ones(1700), atol=1e-5)


def test_speaking_leaves_the_model_and_the_random_state_alone(voice):
    state = torch.random.get_rng_state()
    voice.speak("Hello.", **FAST)
    assert torch.equal(state, torch.random.get_rng_state())
    fresh = load_model("tiny").state_dict()
    assert all(torch.equal(fresh[k], v) for k, v in voice.model.state_dict().items())
