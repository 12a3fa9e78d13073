"""The server over real HTTP on loopback, with the embedded voice: every parameter, every format, callers together."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import av
import httpx
import numpy
import pytest
import torch
from openai import OpenAI
from serving import QUICK, TEXT, alone, assert_same, figure, heard, running, say, small_limits

from f5kit.inference import Voice, demo_reference
from f5kit.keys import new_key
from f5kit.provenance import read_provenance
from f5kit.sounds import MEDIA_TYPES
from f5kit.vocoder import GriffinLim


@pytest.fixture(scope="module")
def server(voice, other):
    with running({"anna": voice, "tom": other}, limits=small_limits()) as (server, _):
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


# ---- /tts


def test_a_sound_is_what_the_voice_says_alone(client, voice):
    answer = say(client)
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/wav"
    assert_same(heard(answer.content), alone(voice))


def test_every_parameter_reaches_the_voice(client, voice, other):
    assert_same(heard(say(client, voice="tom").content), alone(other))
    how = {"nfe_step": 2, "cfg_strength": 1.5, "speed": 1.25, "seed": 7}
    expected = alone(voice, steps=2, cfg_strength=1.5, speed=1.25, seed=7)
    answer = say(client, **how)
    assert_same(heard(answer.content), expected)
    assert answer.headers["x-seed"] == "7"
    usual = alone(voice)
    assert expected.shape != usual.shape and not torch.equal(alone(voice, seed=1), usual)


def test_an_uploaded_reference_is_continued(client, voice):
    path, words = demo_reference()
    files = {"reference": ("../../evil.flac", path.read_bytes(), "audio/flac")}
    answer = client.post("/tts", data={"gen_text": TEXT, **QUICK, "ref_text": words}, files=files)
    assert answer.status_code == 200, answer.text
    assert_same(heard(answer.content), alone(voice.refer_to(path, words)))


def test_half_precision_is_a_choice(voice):
    half = Voice(voice.model, voice.reference, voice.vocoder, "bf16", voice.pace)
    with running(half, limits=small_limits()) as (_, client):
        said = {flag: heard(say(client, use_fp16=flag).content) for flag in ("true", "false")}
        assert client.get("/voices").json()["voices"][0]["precision"] == "bf16"
    assert_same(said["false"], alone(voice))
    assert_same(said["true"], alone(half))
    assert not torch.allclose(said["true"], said["false"], atol=1e-3)


def decoded_by_av(data: bytes) -> int:
    """Samples that PyAV finds, at 24 kHz."""
    with av.open(io.BytesIO(data)) as container:
        track = container.streams.audio[0]
        count = sum(frame.samples for frame in container.decode(track))
    return round(count * 24_000 / track.rate)


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("form", MEDIA_TYPES)
def test_every_format_is_read_by_others(client, tmp_path, form, stream):
    answer = say(client, format=form, stream=stream)
    assert answer.status_code == 200 and answer.headers["content-type"] == MEDIA_TYPES[form]
    told = json.loads(answer.headers["x-provenance"])
    assert told["generated"] is True and told["by"].startswith("f5kit ")
    whole = heard(say(client).content)
    if form == "pcm":
        samples = torch.from_numpy(numpy.frombuffer(answer.content, "<i2").astype("float32") / 32768)
        assert_same(samples, whole)
        return
    (tmp_path / "sound").write_bytes(answer.content)
    assert read_provenance(tmp_path / "sound").model == told["model"]
    samples = heard(answer.content)
    most = 2 * 1152 if form == "mp3" else 0  # what an MP3 coder adds
    assert abs(len(samples) - len(whole)) <= most and abs(decoded_by_av(answer.content) - len(whole)) <= most + 24
    if form in ("wav", "flac"):
        assert_same(samples, whole)
    else:
        assert float(samples.square().mean()) == pytest.approx(float(whole.square().mean()), rel=0.3)


LONG = "It rained all night. In the morning the river was high. Nobody crossed it."


def test_a_stream_comes_in_pieces_and_is_the_whole(client, voice):
    arrived, data = [], b""
    fields = {"gen_text": LONG, **QUICK, "format": "pcm", "stream": "true"}
    with client.stream("POST", "/tts", data=fields) as answer:
        assert answer.status_code == 200
        for part in answer.iter_raw():
            arrived.append(time.monotonic())
            data += part
    pieces = list(voice.stream(LONG, steps=1, cfg_strength=0.0))
    assert len(pieces) > 1 and arrived[-1] - arrived[0] > 0.1
    samples = torch.from_numpy(numpy.frombuffer(data, "<i2").astype("float32") / 32768)
    assert_same(samples, torch.cat([piece.audio for piece in pieces]))


def test_what_cannot_be_said_is_told_by_a_status(client):
    told = {
        422: [{"gen_text": "!?"}, {"gen_text": "Привет"}, {"gen_text": ""}, {"gen_text": "a" * 501}, {"speed": 9},
              {"seed": -1}, {"format": "exe"}, {"nfe_step": 9}, {"cfg_strength": "nan"}, {"nfe_step": "many"},
              {"ref_text": "Words without a reference."}],
        404: [{"voice": "nobody"}],
    }  # fmt: skip
    for status, cases in told.items():
        for fields in cases:
            answer = client.post("/tts", data={"gen_text": TEXT, **QUICK, **{k: str(v) for k, v in fields.items()}})
            assert answer.status_code == status, (fields, answer.text)
            error = answer.json()["error"]
            assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
    assert client.get("/health").json()["status"] == "ok"


# ---- OpenAI's form


@pytest.fixture(scope="module")
def openai(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


QUICK_BODY = {"nfe_step": 1}


def test_the_openai_client_speaks(openai, voice):
    for form in ("wav", "mp3", "flac", "opus", "pcm"):
        how = {"model": "tts-1", "voice": "anna", "input": TEXT, "response_format": form, "extra_body": QUICK_BODY}
        data = openai.audio.speech.create(**how).content
        if form == "wav":
            assert_same(heard(data), alone(voice, cfg_strength=2.0))
        assert form == "pcm" or decoded_by_av(data) > 5_000


def test_the_openai_client_streams(openai, voice, tmp_path):
    how = {"model": "tts-1", "voice": "anna", "input": LONG, "extra_body": QUICK_BODY}
    with openai.audio.speech.with_streaming_response.create(response_format="wav", **how) as answer:
        answer.stream_to_file(tmp_path / "speech.wav")
    whole = torch.cat([p.audio for p in voice.stream(LONG, steps=1)])
    assert_same(heard((tmp_path / "speech.wav").read_bytes()), whole)
    with openai.audio.speech.with_streaming_response.create(
        response_format="pcm", stream_format="sse", **how
    ) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert [e["type"] for e in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1) and len(events) > 2
    assert events[-1]["type"] == "speech.audio.done" and events[-1]["usage"]["input_tokens"] == len(LONG)
    assert len(b"".join(base64.b64decode(e["audio"]) for e in events[:-1])) == 2 * len(whole)


def test_the_openai_client_understands_our_errors(openai):
    import openai as library

    for error, how in {
        library.NotFoundError: {"voice": "nobody", "input": TEXT},
        library.UnprocessableEntityError: {"voice": "anna", "input": "!?"},
    }.items():
        with pytest.raises(error) as found:
            openai.audio.speech.create(model="tts-1", **how)
        assert found.value.body["message"]


# ---- Callers together


def test_a_full_queue_says_when_to_come_back(voice):
    with running(voice, limits=small_limits(waiting=1), batch=1) as (_, client), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: say(client, seed=seed, nfe_step=4), range(8)))
        by_status = {status: [a for a in answers if a.status_code == status] for status in (200, 429)}
        assert len(by_status[200]) >= 2 and len(by_status[429]) >= 1 and sum(map(len, by_status.values())) == 8
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in by_status[429])
        assert by_status[429][0].json()["error"]["type"] == "rate_limit_error"
        assert say(client).status_code == 200


def test_a_client_that_leaves_stops_its_speech(client):
    began = figure(client, "f5kit_audio_seconds_total")
    with pytest.raises(httpx.ReadTimeout):
        fields = {"gen_text": LONG * 5, "nfe_step": "8"}
        httpx.post(f"{client.base_url}/tts", data=fields, timeout=0.5)
    deadline = time.monotonic() + 10
    while client.get("/health").json()["speaking"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.get("/health").json()["speaking"] == 0, "half a minute of speech was made for nobody"
    assert figure(client, "f5kit_audio_seconds_total") == began
    assert figure(client, 'f5kit_requests_total{path="/tts",status="499"}') == 1


def test_stopping_lets_what_is_spoken_end(voice):
    with running(voice, limits=small_limits(grace=20)) as (server, client), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(say, client, nfe_step=4)
        while not client.get("/health").json()["speaking"]:
            time.sleep(0.01)
        server.stop()
        assert answer.result().status_code == 200 and not server.running
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


# ---- What it says of itself


def test_voices_health_metrics_and_the_page(client, server):
    assert [v["name"] for v in client.get("/voices").json()["voices"]] == ["anna", "tom"] == list(server.voices)
    assert client.get("/health").json()["status"] == "ok"
    say(client)
    metrics = client.get("/metrics").text
    for name in ("f5kit_requests_total", "f5kit_waiting", "f5kit_real_time_factor_sum", "f5kit_audio_seconds_total",
                 "f5kit_first_sound_seconds_sum", "process_resident_memory_bytes"):  # fmt: skip
        assert figure(client, name) >= 0 and name in metrics
    assert figure(client, "process_resident_memory_bytes") > 1e8
    schema = client.get("/openapi.json").json()
    assert {"/tts", "/v1/audio/speech", "/voices", "/health", "/metrics"} <= schema["paths"].keys()
    assert "Good evening." in json.dumps(schema["components"]["schemas"])  # the examples
    assert client.get("/docs").status_code == 200


def test_the_log_has_no_texts_unless_asked(voice, caplog):
    for asked in (False, True):
        caplog.clear()
        how = {"limits": small_limits(), "log_texts": asked}
        with caplog.at_level("INFO", "f5kit.serve"), running(voice, **how) as (_, client):
            say(client, "Seven secret words.")
        (line,) = [r.message for r in caplog.records if r.name == "f5kit.serve" and "/tts" in r.message]
        entry = json.loads(line)
        assert entry["status"] == 200 and entry["characters"] == 19 and entry["audio_seconds"] > 0.1
        assert ("secret" in line) == asked


def test_threads_end_with_the_server(voice):
    before = set(threading.enumerate())
    with running(voice, limits=small_limits()) as (_, client):
        say(client)
    left = {thread for thread in set(threading.enumerate()) - before if thread.is_alive()}
    assert not left


def test_the_contract_holds_for_schemathesis(tmp_path):
    """No 5xx and nothing that the served OpenAPI does not promise, for valid and broken requests, with and without key.

    That valid requests are accepted is not asked: a text or recording of random bytes is refused on purpose. The model
    is the tiny one, so that a few hundred requests take seconds.
    """
    tiny = Voice.load("tiny", vocoder=GriffinLim(iterations=1))
    key, entry = new_key("tester")
    limits = small_limits(text=16, steps=1, requests_per_minute=100_000, characters_per_day=10**9)
    with running(tiny, limits=limits, keys=entry) as (server, client):
        how = ["--max-examples", "3", "--exclude-checks", "positive_data_acceptance", "--seed", "1", "--no-color"]
        how += ["--header", f"Authorization: Bearer {key}", "--phases", "examples,coverage,fuzzing"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *how]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
        assert done.returncode == 0, done.stdout[-4000:]
        assert "5 selected / 5 total" in done.stdout
        client.headers["authorization"] = f"Bearer {key}"
        assert figure(client, 'f5kit_requests_total{path="/tts",status="200"}') > 5
        assert figure(client, 'f5kit_requests_total{path="/v1/audio/speech",status="200"}') > 5
        assert 'status="5' not in client.get("/metrics").text


class BreakingVocoder:
    """A vocoder that fails as it is told to, and otherwise is another one."""

    name = "breaking"

    def __init__(self, vocoder):
        self.vocoder, self.fault = vocoder, None

    def decode(self, mel):
        if self.fault:
            raise self.fault
        return self.vocoder.decode(mel)


def test_faults_of_ours_are_told_without_details(voice, caplog):
    vocoder = BreakingVocoder(voice.vocoder)
    broken = Voice(voice.model, voice.reference, vocoder)
    with running(broken, limits=small_limits()) as (_, client):
        vocoder.fault = RuntimeError("inner secret of /home/somebody")
        answer = say(client)
        assert answer.status_code == 500 and "secret" not in answer.text and "home" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["connection"] == "close"  # as the server does: the next call takes another one
        deadline = time.monotonic() + 5
        while "inner secret" not in caplog.text:  # the log gets it after the caller
            assert time.monotonic() < deadline
            time.sleep(0.01)
        vocoder.fault = torch.cuda.OutOfMemoryError("CUDA out of memory")
        answer = say(client)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5" and "CUDA" not in answer.text
        vocoder.fault = None
        assert_same(heard(say(client).content), alone(broken))
