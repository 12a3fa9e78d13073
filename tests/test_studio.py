"""Callers who share passes of a model, and sound as the bytes of a file."""

from __future__ import annotations

import io
import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import soundfile
import torch
from serving import TEXT, alone, assert_same, figure, heard, running, say, small_limits

from f5kit.audio import import_torchaudio
from f5kit.inference import Voice
from f5kit.provenance import Provenance
from f5kit.service import usual_company
from f5kit.sounds import Encoder, encode
from f5kit.speech import Cancelled
from f5kit.studio import Busy, Job, Studio
from f5kit.vocoder import VocosVocoder


@pytest.fixture(scope="module")
def small_vocos():
    """Vocos' structure in small, with random weights."""
    import_torchaudio()
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    about = {
        "feature_extractor": {"class_path": "vocos.feature_extractors.MelSpectrogramFeatures", "init_args": {
            "sample_rate": 24_000, "n_fft": 1024, "hop_length": 256, "n_mels": 100, "padding": "center"}},
        "backbone": {"class_path": "vocos.models.VocosBackbone", "init_args": {
            "input_channels": 100, "dim": 32, "intermediate_dim": 64, "num_layers": 2}},
        "head": {"class_path": "vocos.heads.ISTFTHead", "init_args": {
            "dim": 32, "n_fft": 1024, "hop_length": 256, "padding": "center"}},
    }  # fmt: skip
    torch.manual_seed(0)
    parts = {"backbone": VocosBackbone, "head": ISTFTHead}
    made = {name: kind(**about[name]["init_args"]).state_dict() for name, kind in parts.items()}
    return VocosVocoder(about, {f"{name}.{k}": t for name, state in made.items() for k, t in state.items()})


def test_callers_share_passes_and_hear_what_they_hear_alone(voice, other, small_vocos):
    voices = {n: Voice(v.model, v.reference, small_vocos) for n, v in {"anna": voice, "tom": other}.items()}
    wanted = [(name, text, seed) for seed in (0, 1) for name in voices for text in (TEXT, "Is anybody there?")]
    with running(voices, limits=small_limits(), batch=4) as (_, client), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: say(client, one[1], voice=one[0], seed=one[2]), wanted))
        made = {name: figure(client, f"f5kit_pieces_per_pass_{name}") for name in ("sum", "count")}
    for (name, text, seed), answer in zip(wanted, answers, strict=True):
        assert answer.status_code == 200
        assert_same(heard(answer.content), alone(voices[name], text, seed=seed))
    assert made["sum"] >= 8 and made["count"] <= 0.8 * made["sum"], made  # passes were shared


def test_by_default_no_pass_is_shared_where_that_would_be_heard(voice, small_vocos):
    assert usual_company([voice]) == usual_company([Voice(voice.model, voice.reference, small_vocos)]) == (1, 2)


def test_who_leaves_a_shared_pass_harms_nobody(voice, small_vocos):
    fast = Voice(voice.model, voice.reference, small_vocos)
    passes, heard_by = [], {name: queue.Queue() for name in "abc"}
    studio = Studio(batch=3, waiting=3, observe=passes.append)
    try:
        jobs = {
            name: Job(lambda: fast, TEXT, {"steps": 12, "cfg_strength": 0.0, "seed": seed}, heard_by[name].put)
            for seed, name in enumerate("abc")
        }
        for number, job in enumerate(jobs.values()):
            studio.submit(job)
            while number == 0 and not passes:  # it goes alone, and the others wait for its end
                time.sleep(0.001)
        while len(passes) < 2:
            time.sleep(0.001)
        jobs["b"].cancel.set()
        told = {name: heard_by[name].get(timeout=60) for name in "abc"}
    finally:
        studio.stop()
    assert passes == [1, 2] and isinstance(told["b"], Cancelled)
    for seed, name in ((0, "a"), (2, "c")):
        assert_same(told[name].audio, alone(fast, steps=12, seed=seed))
    with pytest.raises(Busy, match="stopping"):
        studio.submit(jobs["a"])


def test_two_lanes_speak_side_by_side_what_each_says_alone(voice):
    passes, heard_by = [], [queue.Queue(), queue.Queue()]
    studio = Studio(batch=1, waiting=2, observe=passes.append, lanes=2)
    try:
        for seed, ear in enumerate(heard_by):
            studio.submit(Job(lambda: voice, TEXT, {"steps": 12, "cfg_strength": 0.0, "seed": seed}, ear.put))
        while len(passes) < 2:
            time.sleep(0.001)
        assert all(ear.empty() for ear in heard_by)  # both passes have begun, and neither has ended
        told = [ear.get(timeout=60) for ear in heard_by]
    finally:
        studio.stop()
    for seed, speech in enumerate(told):
        assert_same(speech.audio, alone(voice, steps=12, seed=seed))


def test_whole_files_equal_streamed_ones():
    audio = torch.sin(torch.arange(60_000) / 20) * 0.4
    for form in ("wav", "flac", "pcm"):
        live = Encoder(form, 24_000, Provenance(True, "data/x"), live=True)
        parts = [live.write(part) for part in audio.split(7_000)] + [live.end()]
        whole = encode(audio, 24_000, form, Provenance(True, "data/x"))
        assert len(b"".join(parts)) == len(whole)
        assert form == "flac" or sum(bool(part) for part in parts) > 5
    with soundfile.SoundFile(io.BytesIO(encode(audio, 24_000, "wav", Provenance(True, "data/x")))) as file:
        assert file.frames == 60_000
