"""Scores against answers worked out by hand, and similarity on voices that are known."""

from __future__ import annotations

import importlib.util
import math

import numpy
import pytest
import torch

from f5kit import scores
from f5kit.audio import log_mel, read_audio
from f5kit.errors import UserError
from f5kit.scores import SpeakerScale, bundled_speakers, interval, mel_cepstral_distance, speech_seconds

# Resemblyzer 0.1.4 with librosa 0.11 on the chirp of the test below, the first twelve of 256 numbers
EMBEDDING = [0.0, 0.0, 0.0, 0.0, 0.0, 0.02777, 0.0, 0.00845, 0.01515, 0.15728, 0.07077, 0.07937]
encodes = pytest.mark.skipif(importlib.util.find_spec("resemblyzer") is None, reason="needs Resemblyzer's weights")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def encoder():
    return scores.load_speaker_encoder()


@pytest.fixture(scope="module")
def voice(recordings):
    """[(audio, rate)] of six clips of the demo voice."""
    return [(read_audio(path, 24_000), 24_000) for path in sorted((recordings / "wavs").iterdir())[:6]]


def test_distance_of_a_ripple_is_its_height():
    """a cos(pi k (j + 1/2) / d) is the cepstrum c_k = a alone: 10 / ln 10 sqrt(2) a dB."""
    flat = torch.zeros(20, 100)
    for k in (1, 13):
        ripple = 0.3 * torch.cos(math.pi * k * (torch.arange(100) + 0.5) / 100).expand(20, 100)
        assert mel_cepstral_distance(ripple, flat) == pytest.approx(10 / math.log(10) * math.sqrt(2) * 0.3, rel=1e-5)
    finer = torch.cos(math.pi * 14 * (torch.arange(100) + 0.5) / 100).expand(20, 100)
    assert mel_cepstral_distance(finer, flat) < 1e-5 and mel_cepstral_distance(flat - 3, flat) < 1e-5


def test_distance_does_not_mind_the_pace():
    mel = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    assert mel_cepstral_distance(mel.repeat_interleave(2, 0), mel) < 1e-5
    assert mel_cepstral_distance(mel.flip(0), mel) > 1


def test_alignment_takes_the_cheapest_path():
    """Against every path of a small table, one by one."""
    cost = numpy.random.default_rng(3).random((4, 5))

    def paths(i, j):
        if (i, j) == (0, 0):
            yield [(0, 0)]
        for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1)):
            if a >= 0 and b >= 0:
                yield from ([*path, (i, j)] for path in paths(a, b))

    best = min(paths(3, 4), key=lambda path: sum(cost[step] for step in path))
    assert scores._aligned_mean(cost) == pytest.approx(sum(cost[step] for step in best) / len(best))


def test_speech_is_timed_without_its_silence(voice):
    audio, rate = voice[0]
    padded = torch.nn.functional.pad(audio, (rate, rate // 2))
    assert speech_seconds(padded, rate) == pytest.approx(speech_seconds(audio, rate), abs=0.03)


def test_interval_of_a_mean_is_that_of_the_normal_law():
    values = numpy.random.default_rng(0).normal(5, 2, 400)
    low, high = interval(lambda v: v.mean(-1), values, draws=4000)
    expected = values.mean() + 1.96 * values.std() / 20 * numpy.array([-1, 1])
    assert (low, high) == pytest.approx(tuple(expected), abs=0.02)
    assert (low, high) == interval(lambda v: v.mean(-1), values, draws=4000)


def test_a_ratio_is_drawn_in_pairs():
    """Twice the errors in every sentence are twice the errors in every draw."""
    errors = numpy.arange(1, 30)
    assert interval(lambda a, b: a.sum(-1) / b.sum(-1), 2 * errors, errors) == (2, 2)
    low, high = interval(lambda a, b: a.sum(-1) / b.sum(-1), [1, 1], [1, 0])
    assert low == 1 and high == math.inf


@encodes
def test_embedding_is_the_packages_own(encoder):
    """Against VoiceEncoder.embed_utterance on the same samples."""
    audio = torch.sin(torch.cumsum(torch.linspace(0.02, 0.4, 40_000), 0)) * torch.linspace(0.01, 0.2, 40_000)
    with torch.no_grad():
        found = torch.nn.functional.normalize(encoder._embed(audio), dim=0)
    assert torch.allclose(found[:12], torch.tensor(EMBEDDING), atol=1e-4)


@encodes
def test_a_voice_is_nearer_to_itself_than_to_others(encoder, voice):
    others = bundled_speakers()
    scale = SpeakerScale(encoder, voice, others)
    assert scale.left_out == [] and scale.other < min(scale.own)
    assert scale.scaled(scale.own) == pytest.approx(1)
    same = scale.scaled([scale.cosine(*voice[0], 0)])
    assert same == pytest.approx(scale.scaled(scale.own[:1]), abs=0.02)  # it hears them in the same way
    assert scale.scaled([scale.cosine(*others["slt"][0], 0)]) < 0.3 < 0.7 < same


@encodes
def test_level_and_silence_do_not_change_the_speaker(encoder, voice):
    audio, rate = voice[0]
    changed = torch.nn.functional.pad(audio * 0.2, (rate // 2, rate))
    assert encoder.embed(audio, rate) @ encoder.embed(changed, rate) > 0.995


@encodes
def test_the_same_speaker_is_no_other(encoder, voice):
    scale = SpeakerScale(encoder, voice[:4], bundled_speakers() | {"again": voice[4:]})
    assert scale.left_out == ["again"]
    with pytest.raises(UserError, match="another speaker"):
        SpeakerScale(encoder, voice[:4], {"again": voice[4:]})
    with pytest.raises(UserError, match="two recordings"):
        SpeakerScale(encoder, voice[:1], bundled_speakers())


def test_encoders_that_cannot_be_had(tmp_path):
    with pytest.raises(UserError, match="'ecapa'.*resemblyzer"):
        scores.load_speaker_encoder("ecapa")
    if importlib.util.find_spec("transformers"):
        with pytest.raises(UserError, match="can't be had"):
            scores.load_speaker_encoder(f"wavlm:{tmp_path}")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_wavlm_from_a_folder(tmp_path, voice):
    from transformers import Wav2Vec2FeatureExtractor, WavLMConfig, WavLMForXVector

    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    WavLMForXVector(WavLMConfig(**small, tdnn_dim=(32,) * 5, xvector_output_dim=16)).save_pretrained(tmp_path)
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    vector = scores.load_speaker_encoder(f"wavlm:{tmp_path}").embed(*voice[0])
    assert vector.shape == (16,) and vector.norm() == pytest.approx(1, abs=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("speechmos") is None, reason="needs speechmos and librosa")
def test_dnsmos_prefers_speech_to_noise(voice):
    pytest.importorskip("librosa")
    audio, rate = voice[0]
    noisy = audio + 0.1 * torch.randn(len(audio), generator=torch.Generator().manual_seed(0))
    assert 1 <= scores.dnsmos(noisy, rate) < scores.dnsmos(audio, rate) <= 5


def test_bundled_speakers_are_three():
    found = bundled_speakers()
    assert sorted(found) == ["reader", "rms", "slt"]
    for clips in found.values():
        for audio, rate in clips:
            assert 2 < len(audio) / rate < 5 and log_mel(audio).isfinite().all()
