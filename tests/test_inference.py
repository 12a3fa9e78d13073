"""Speaking: the same seed says the same, faults are told before any work, and long texts come out whole."""

import threading
from dataclasses import replace

import pytest
import soundfile
import torch
from conftest import DEMO_VOICE

from f5kit.audio import read_audio, resample, write_audio
from f5kit.checkpoint import load_model
from f5kit.errors import UserError
from f5kit.inference import Voice, cross_fade, find_reference, read_reference
from f5kit.joining import LEAK, leak
from f5kit.prepare import prepare_dataset
from f5kit.speech import Cancelled
from f5kit.vocoder import load_vocoder

pytestmark = pytest.mark.usefixtures("one_thread")
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


def test_chunks_are_as_long_as_the_config_says_and_training_raises_that():
    model = load_model("tiny")
    model.config = model.config.replace(longest_chunk=10.0)
    text, reference = "This is one of many sentences that follow each other. " * 12, find_reference("tiny")
    tiny = Voice(model, read_reference(*reference, model), load_vocoder("griffin-lim", model.config.mel, "cpu"))
    given = len(tiny.reference.mel) / 93.75
    short = [seconds for _, seconds in tiny.plan(text)]
    model.config = model.config.having_heard([*range(1, 20), 40.0])
    assert model.config.longest_chunk == 19  # one long clip is not enough
    long = [seconds for _, seconds in tiny.plan(text)]
    assert 9 < given + max(short) < 10.5 < 17 < given + max(long) < 19.5
    assert model.config.having_heard([3.0]).longest_chunk == 19  # nothing is unlearned
    assert model.config.having_heard([30.0]).longest_chunk == 25


def test_speed_changes_the_length(voice):
    text = "A sentence that is long enough to be measured by its length."
    slow, fast = (voice.speak(text, speed=speed, **FAST).seconds for speed in (0.8, 1.6))
    assert slow / fast == pytest.approx(2, rel=0.05)


def test_a_long_text_is_spoken_in_chunks_that_lose_nothing(voice):
    text = "This is one of many sentences that follow each other. " * 12
    speech = voice.speak(text, steps=1, progress=False)
    assert len(speech.chunks) > 1
    assert "".join(chunk.text for chunk in speech.chunks) == text
    assert len(speech.mel) == sum(chunk.frames for chunk in speech.chunks)
    assert [chunk.seed for chunk in speech.chunks] == list(range(len(speech.chunks)))
    starts, ends, _ = zip(*speech.timings, strict=True)
    assert starts[0] == 0 and ends[-1] == pytest.approx(speech.seconds)
    assert all(a < b for a, b in zip(starts, ends, strict=True))
    assert list(starts[1:]) == pytest.approx([end + 0.15 for end in ends[:-1]])  # a rest between sentences


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("", {}, "text is empty"),
        ("  \n ", {}, "text is empty"),
        ("Grüße", {}, "lacks 'ü' 'ß'"),
        ("Hi.", {"speed": 0}, "speed is 0"),
        ("Hi.", {"speed": float("nan")}, "speed is nan"),
        ("Hi.", {"steps": 0}, "steps is 0"),
        ("Hi.", {"seed": 0.5}, "seed is 0.5"),
        ("Hi.", {"method": "magic"}, "method is 'magic'; the solvers are euler"),
        ("Hi.", {"duration": -1}, "duration is -1"),
        ("Hi.", {"loudness": 3}, "there is no setting loudness; the settings are speed"),
        ("?!... --", {}, "has no letter or digit"),
    ],
)
def test_faults_are_told_before_any_work(voice, text, settings, told):
    with pytest.raises(UserError, match=told):
        voice.speak(text, **{**FAST, **settings})


def test_references_that_cannot_serve(tmp_path):
    write_audio(tmp_path / "silent.wav", torch.zeros(48_000))
    write_audio(tmp_path / "short.wav", torch.randn(6_000) * 0.1)
    write_audio(tmp_path / "fine.wav", torch.randn(48_000) * 0.1)
    for file, told in (("silent.wav", "silent"), ("short.wav", "has 0.2 s of sound"), ("none.wav", "file none.wav")):
        with pytest.raises(UserError, match=told) as error:
            Voice.load("tiny", tmp_path / file, "Some words.", vocoder="griffin-lim", device="cpu")
        assert str(tmp_path) not in str(error.value)
    with pytest.raises(UserError, match="fine.wav needs its words, and they can't be transcribed .* give"):
        read_reference(tmp_path / "fine.wav", None, load_model("tiny"), recogniser="whisper:no-such-model")
    with pytest.raises(UserError, match="the words of the reference fine.wav: .* lacks 'ü'"):
        read_reference(tmp_path / "fine.wav", "für", load_model("tiny"))


def test_a_reference_sounds_as_a_clip_of_the_same_recording(tmp_path):
    """Also above the band of a recording of 16 kHz, where a model has only ever heard the noise of 16 bits."""
    (tmp_path / "in").mkdir()
    audio = resample(read_audio(DEMO_VOICE / "wavs" / "demo_0001.flac"), 24_000, 16_000)
    soundfile.write(tmp_path / "in" / "a.wav", audio.numpy(), 16_000)
    (tmp_path / "in" / "metadata.csv").write_text("a|These are the words.")
    dataset = prepare_dataset(tmp_path / "in", tmp_path / "data", heldout=0, progress=False)
    clip = dataset.mel(dataset.clips[0]).mean(0)
    reference = read_reference(tmp_path / "in" / "a.wav", "These are the words.", load_model("tiny")).mel.mean(0)
    assert (reference - clip).abs().max() < 0.3 and clip[95:].max() < -5


def test_a_long_reference_is_cut_at_a_pause_and_its_words_written_anew(voice, tmp_path):
    clips = [read_audio(path) for path in sorted(DEMO_VOICE.glob("wavs/*.flac"))[:4]]
    write_audio(tmp_path / "long.wav", torch.cat([torch.nn.functional.pad(clip, (0, 12_000)) for clip in clips]))
    reference = read_reference(tmp_path / "long.wav", "What all four say.", voice.model, recogniser="pocketsphinx")
    assert 5 < len(reference.audio) / 24_000 <= 12.1
    assert "cut from" in reference.note and "transcribed by pocketsphinx" in reference.note
    assert len(reference.text.split()) > 5 and reference.text != "What all four say."


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


SENTENCES = "The first of three. This one is the second sentence, and it is longer. The third!\n\nAnd a new paragraph."


def test_a_batch_says_the_same_as_single_chunks(voice, awake):
    """Of a model whose output depends on everything."""
    lively = Voice(awake(load_model("tiny")), voice.reference, voice.vocoder)
    text = "Short. " + "A rather long sentence with many words in it, to be told apart. " * 20
    single, batched = (lively.speak(text, batch=size, duration=9, **FAST) for size in (1, 3))
    assert len(single.chunks) > 3
    assert torch.allclose(single.mel, batched.mel, atol=1e-4)
    assert [c.end for c in single.chunks] == [c.end for c in batched.chunks]


def test_a_stream_is_the_speech_piece_by_piece(voice):
    pieces = list(voice.stream(SENTENCES * 3, first=2.0, **FAST))
    assert len(pieces) > 2 and "".join(piece.text for piece in pieces) == SENTENCES * 3
    assert pieces[0].seconds < 2.5
    whole = sum(piece.seconds for piece in pieces)
    assert pieces[-1].chunks[0].end == pytest.approx(whole)
    assert voice.plan(SENTENCES * 3, first=2.0) == [(p.text, p.chunks[0].frames / 93.75) for p in pieces]


def test_paragraphs_and_sentences_are_parted_by_silence(voice):
    with_pause, without = (voice.speak(SENTENCES, pause=pause, **FAST) for pause in (1.0, 0.0))
    assert with_pause.seconds - without.seconds == pytest.approx(1.0)
    first, second = with_pause.chunks
    silence = with_pause.audio[int(first.end * 24_000) + 100 : int(second.start * 24_000) - 100]
    assert len(silence) > 23_500 and not silence.any()
    text = "This is one of many sentences that follow each other, " * 12  # a single sentence, whose chunks are clauses
    for mark, rests in ((", ", 0), (". ", 1)):
        said = text.replace(", ", mark)
        rest, none = (voice.speak(said, sentence_pause=pause, **FAST) for pause in (0.3, 0.0))
        assert rest.seconds - none.seconds == pytest.approx(0.3 * rests * (len(none.chunks) - 1))


def test_joining_chunks_takes_nothing_from_them(voice):
    """Away from a fade of 5 ms, each chunk has the samples that it has alone."""
    text = "This is one of many sentences that follow each other, and all are whole. " * 8
    speech = voice.speak(text, **FAST)
    assert len(speech.chunks) > 2
    for chunk in speech.chunks:
        alone = voice.speak(chunk.text, seed=chunk.seed, **FAST).audio
        start = round(chunk.start * 24_000) + (-60 if chunk.start else 0)
        assert torch.allclose(speech.audio[start + 120 : start + len(alone) - 120], alone[120:-120], atol=1e-5)


def test_a_duration_is_kept(voice):
    for text in (SENTENCES, SENTENCES * 4):
        speech = voice.speak(text, duration=15.0, **FAST)
        assert speech.seconds == pytest.approx(15.0, abs=0.02 * len(speech.chunks))  # a fade and a frame for each


def test_cancel_returns_within_one_step(voice):
    stop, seen = threading.Event(), []

    def watch(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 3:
            stop.set()

    with pytest.raises(Cancelled, match="after 3 of 1000 steps"):
        voice.speak("Hello.", steps=1000, progress=watch, cancel=stop)
    assert seen == [(1, 1000), (2, 1000), (3, 1000)]


def test_what_overflows_in_half_precision_is_made_in_fp32(voice):
    """Weights whose products pass fp16's largest number, and which fp32 holds."""
    model = load_model("tiny")
    with torch.no_grad():
        model.transformer.proj_out.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.transformer.norm_out.linear.bias.fill_(3e4)
        model.transformer.proj_out.weight.mul_(1e2)
    half = Voice(model, voice.reference, voice.vocoder, "fp16")
    speech = half.speak("Hello.", **FAST)
    assert speech.mel.isfinite().all()
    assert speech.chunks[0].notes == ("not finite in fp16, made in fp32",)
    with torch.no_grad():
        model.transformer.proj_out.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="non-finite in fp32: these weights are damaged"):
        half.speak("Hello.", **FAST)


def test_the_references_end_said_again_is_noticed(dataset):
    mels = [dataset.mel(clip) for clip in dataset.clips[:8]]
    for a, b in zip(mels, mels[1:], strict=False):
        assert leak(a, b) < LEAK
        assert leak(torch.cat((b[-55:], a)), b) > LEAK
    assert leak(torch.zeros(100, 100), mels[0]) == leak(mels[0][:10], mels[0]) == 0.0


def test_a_leaking_start_is_made_again(voice):
    """A fresh model gives its noise back: the reference ends here with the noise that the speech will begin with."""
    said = voice.speak("Hello there.", **FAST).mel
    leaking = replace(voice.reference, mel=torch.cat((voice.reference.mel[:-45], said[:45])))
    again = voice.with_reference(leaking).speak("Hello there.", **FAST)
    assert again.chunks[0].notes == ("it began with the reference's last words",)
    assert again.chunks[0].seed == 1_000_003 and not torch.equal(again.mel, said)
    kept = voice.with_reference(leaking).speak("Hello there.", retry_leaks=False, **FAST)
    assert torch.equal(kept.mel, said) and kept.chunks[0].notes == ()


def test_the_best_of_several_takes_is_the_one_understood_best(voice):
    speech = voice.speak("Hello there.", best_of=2, **FAST)
    assert speech.chunks[0].seed in (0, 2 * 1_000_003)
    assert voice.recogniser is not None


def test_two_thousand_words_in_bounded_memory(voice):
    """The sound grows with the text; the memory to make it does not grow beyond that."""
    import resource

    words = "Every word of this long text is spoken, and none is lost on the way. ".split(" ")[:-1]
    text = " ".join(words[i % len(words)] for i in range(2000))
    list(voice.stream(text[:2000], steps=1, speed=4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = 0.0
    said = []
    for piece in voice.stream(text, steps=1, speed=4):
        seconds += piece.seconds
        said.append(piece.text)
    assert "".join(said) == text
    assert 100 < seconds < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
