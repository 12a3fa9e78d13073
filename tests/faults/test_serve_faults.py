"""F14: callers who break off, lie, dawdle, overload or pry. Each gets the right status, and the server lives on.

Raw sockets send what no library would. Nothing of keys, texts or this machine's folders may be in answers or logs.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import QUICK, TEXT, alone, assert_same, heard, running, small_limits  # noqa: E402

from f5kit.inference import Voice  # noqa: E402
from f5kit.keys import new_key  # noqa: E402

KEY, ENTRY = new_key("phone")
OTHER_KEY = new_key("stranger")[0]
PATIENCE = 2.0


@pytest.fixture(scope="module")
def voice():
    return Voice.load("starter")


@pytest.fixture(scope="module")
def log():
    """Every line that was logged by anybody."""
    import logging

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            if not record.name.startswith("http"):  # the client's own
                lines.append(record.getMessage() + ("Traceback" if record.exc_info else ""))

    handler, root = Keep(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("INFO")
    yield lines
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="module")
def server(voice, log):
    limits = small_limits(arrival=PATIENCE, requests_per_minute=10_000)
    with running({"anna": voice}, limits=limits, keys=ENTRY, log_texts=False) as (server, client):
        yield server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture(autouse=True)
def lives(server, client, voice, log):
    """After each fault: the server answers rightly, nothing is being spoken for nobody, nothing was leaked."""
    yield
    deadline = time.monotonic() + 15
    while client.get("/health").json()["speaking"] and time.monotonic() < deadline:
        time.sleep(0.02)
    told = client.get("/health").json()
    assert (told["speaking"], told["waiting"]) == (0, 0)
    answer = client.post("/tts", data={"gen_text": TEXT, **QUICK})
    assert answer.status_code == 200
    assert_same(heard(answer.content), alone(voice))
    everything = "\n".join(log)
    for secret in (KEY, KEY[8:30], ENTRY.split(":")[1], OTHER_KEY, "a secret text", "Traceback"):
        assert secret not in everything, secret


def raw(server, *parts: bytes, pause: float = 0.0, wait: float = 20.0) -> bytes:
    """Send parts over a socket; what comes back until the server closes or says nothing for `wait` seconds."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=wait) as sock:
        for part in parts:
            try:
                sock.sendall(part)
            except OSError:
                break
            time.sleep(pause)
        data = b""
        try:
            while block := sock.recv(65_536):
                data += block
        except OSError:
            pass
        return data


FORM = "application/x-www-form-urlencoded"


def head(path: str = "/tts", key: str | None = KEY, kind: str = FORM, **headers) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-type: {kind}", "connection: close"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_killed_clients(server, client, report):
    """Connections that are reset in the middle of an answer, of a wait, and of a stream."""
    url, text = urlsplit(server.url), "It rained. " * 20
    for stream in ("true", "false"):
        body = f"gen_text={text}&nfe_step=8&stream={stream}".replace(" ", "+").encode()
        for wait in (0.0, 0.3, 1.5):
            sock = socket.create_connection((url.hostname, url.port))
            sock.sendall(head(content_length=len(body)) + body)
            time.sleep(wait)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close by a reset
            sock.close()
    deadline = time.monotonic() + 15
    while (busy := client.get("/health").json()["speaking"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    report("F14", injected=6, survived=6 if busy == 0 else 0)


def test_half_bodies(server):
    for half in (head(content_length=500) + b"gen_text=Hi", head(transfer_encoding="chunked") + b"5\r\ngen_"):
        assert status(raw(server, half)) == 408
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as sock:  # and one that hangs up
        sock.sendall(head(content_length=500) + b"gen_text=Hi")


@pytest.mark.parametrize(
    ("path", "kind", "body", "expected"),
    [
        ("/tts", "application/json", b'{"gen_text": "Hi."}', 422),
        ("/tts", "multipart/form-data", b"no boundary", 400),
        ("/tts", "multipart/form-data; boundary=x", b"--y\r\nnothing of the kind", 400),
        ("/tts", "text/plain", b"gen_text=Hi.", 422),
        ("/v1/audio/speech", "application/json", b'{"input": "Hi.", ', 400),
        ("/v1/audio/speech", "application/json", b"\xff\xfe\x00", 400),
        ("/v1/audio/speech", "application/json", b"[1, 2]", 422),
        ("/v1/audio/speech", "application/json", b'{"input": 5, "voice": "anna"}', 422),
        ("/v1/audio/speech", "text/plain", b'{"input": "Hi.", "voice": "anna"}', 422),
        ("/v1/audio/speech", "application/json", b"[" * 100_000, 400),
    ],
)
def test_wrong_types(server, path, kind, body, expected):
    answer = raw(server, head(path, kind=kind, content_length=len(body)) + body)
    assert status(answer) == expected, answer[-300:]
    assert b'"error"' in answer


@pytest.mark.parametrize("what", ["text", "picture", "silence", "cut", "hours", "script", "nothing"])
def test_references_that_are_none(client, tmp_path, what):
    import numpy
    import soundfile

    file = tmp_path / "reference.flac"
    samples = {"silence": numpy.zeros(48_000), "hours": numpy.random.default_rng(0).normal(0, 0.1, 8_000)}.get(what)
    if what == "hours":  # a minute and a half of 8 kHz: over this server's minute
        soundfile.write(file, numpy.tile(samples, 90), 8_000)
    elif what == "silence":
        soundfile.write(file, samples, 24_000)
    data = {"text": b"a secret text" * 50, "picture": b"\x89PNG\r\n\x1a\n" + bytes(500), "nothing": b"",
            "cut": b"fLaC" + bytes(40), "script": b"#EXTM3U\nfile:///etc/passwd\n"}.get(what)  # fmt: skip
    data = file.read_bytes() if data is None else data
    name = "list.m4a" if what == "script" else "/etc/passwd.flac"
    fields = {"gen_text": TEXT, **QUICK, "ref_text": "Words."}
    answer = client.post("/tts", data=fields, files={"reference": (name, data)})
    assert answer.status_code == 422, answer.text
    message = answer.json()["error"]["message"]
    assert "the reference" in message and "/" not in message and "passwd" not in message and "secret" not in message


def test_a_hundred_megabytes(server, client):
    """Announced or not, they are refused, and they never lie in memory."""

    def memory() -> float:
        line = next(x for x in client.get("/metrics").text.splitlines() if x.startswith("process_resident_memory"))
        return float(line.split()[1])

    before = memory()
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
    connection.putrequest("POST", "/tts")
    for name, value in {"content-length": str(10**8), "authorization": f"Bearer {KEY}"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413  # before a byte of the body
    connection.close()
    blocks = (b"10000\r\n" + bytes(65_536) + b"\r\n" for _ in range(1_600))
    answer = raw(server, head(transfer_encoding="chunked"), *blocks)
    assert answer == b"" or status(answer) == 413  # the reset of the connection may overtake the answer
    assert memory() - before < 50e6


BEGINNINGS = {"silent": b"", "head": b"POST /tts HTTP/1.1\r\nhost: a\r\n", "body": head(content_length=1000) + b"g"}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_slow_loris(server, client, begin):
    """Twenty connections that say next to nothing are closed, and others are served meanwhile."""
    url = urlsplit(server.url)
    sockets = [socket.create_connection((url.hostname, url.port), timeout=10) for _ in range(20)]
    started = time.monotonic()
    for sock in sockets:
        sock.sendall(begin)
    assert client.get("/voices").status_code == 200
    time.sleep(PATIENCE / 2)
    for sock in sockets if begin else []:  # a byte now and then wins no time
        sock.sendall(b"x")
    for sock in sockets:
        answer = sock.recv(1000)
        assert answer == b"" or status(answer) == 408
        sock.close()
    assert time.monotonic() - started < 3 * PATIENCE + 3


def test_who_takes_no_answer(server, client):
    """A client that asks for sound and never reads it holds nothing up."""
    url = urlsplit(server.url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((url.hostname, url.port))
        body = b"gen_text=" + b"It+rained.+" * 10 + b"&nfe_step=1&cfg_strength=0"
        sock.sendall(head(content_length=len(body)) + body)
        time.sleep(0.5)
        assert client.post("/tts", data={"gen_text": TEXT, **QUICK}).status_code == 200


@pytest.mark.parametrize("length", [501, 10_000, 900_000])
def test_long_texts(client, length):
    text = "a secret text " * (length // 14 + 1)
    forms = [client.post("/tts", data={"gen_text": text[:length]}),
             client.post("/v1/audio/speech", json={"input": text[:length], "voice": "anna"})]  # fmt: skip
    for answer in forms:
        assert answer.status_code == 422 and "500 characters" in answer.text and "secret" not in answer.text


WRONG = {
    "none": None, "empty": "Bearer", "stranger's": f"Bearer {OTHER_KEY}", "cut": f"Bearer {KEY[:-1]}",
    "longer": f"Bearer {KEY}x", "no ASCII": "Bearer é", "basic": f"Basic {KEY}",
    "hash": f"Bearer {ENTRY.split(':')[1]}",
}  # fmt: skip


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_missing_and_wrong_keys(server, given):
    headers = {} if given is None else {"authorization": given.encode()}
    for path in ("/tts", "/v1/audio/speech", "/voices", "/metrics", "/nothing"):
        answer = httpx.request("GET" if path in ("/voices", "/metrics") else "POST", server.url + path, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert "anna" not in answer.text and answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_key_in_the_url(server, client):
    for path in (f"/tts?key={KEY}", f"/voices?api_key={KEY}", f"/health?{KEY}", f"/v1/audio/speech?access_token={KEY}"):
        for answer in (httpx.get(server.url + path), client.post(path, data={"gen_text": TEXT})):
            assert answer.status_code == 400 and "Authorization" in answer.text and KEY not in answer.text
    answer = client.get(f"/voices/{KEY}")
    assert answer.status_code == 404


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\x", "anna/../anna", "anna\0", "%2e%2e", "."])
def test_paths_as_voice_names(client, name):
    for answer in (client.post("/tts", data={"gen_text": TEXT, "voice": name}),
                   client.post("/v1/audio/speech", json={"input": TEXT, "voice": name})):  # fmt: skip
        assert answer.status_code == 404 and "passwd" not in answer.text
        assert answer.json()["error"]["message"].endswith("there are anna")


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/voices/../../etc/passwd", "/%2e%2e/%2e%2e/etc", "//etc"])
def test_paths_in_the_address(server, path):
    answer = raw(server, head(path).replace(b"POST", b"GET"))
    assert status(answer) == 404 and b"root:" not in answer


def test_other_sites_and_other_names(server, client, voice):
    answer = client.post("/tts", data={"gen_text": TEXT}, headers={"origin": "https://evil.example"})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    own = {"origin": server.url, "access-control-request-method": "POST"}
    assert client.options("/tts", headers=own).status_code == 405
    with running(voice, limits=small_limits()) as (_, keyless):
        assert keyless.get("/voices", headers={"host": "evil.example"}).status_code == 403
        assert keyless.get("/voices", headers={"host": "localhost:80"}).status_code == 200


def test_garbage(server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\0" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        assert raw(server, data)[9:12] in (b"400", b"401", b"408", b"")
    assert json.loads(httpx.get(server.url + "/health").text)["status"] == "ok"
    long = b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    assert raw(server, long)[9:12] in (b"400", b"401", b"")
