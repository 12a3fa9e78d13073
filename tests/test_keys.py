"""Who may call a server, from where, and how much: keys, rates, quotas, addresses; and the command that starts one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import httpx
import pytest
from serving import running, say, small_limits

from f5kit.errors import UserError
from f5kit.keys import Keys, Limits, Refused, new_key
from f5kit.serve import serve
from f5kit.sounds import Encoder


def test_keys_are_hashed_and_known_again():
    key, entry = new_key("phone")
    assert key not in entry and len(entry.split(":")[1]) == 64
    keys = Keys(f"{entry}, {new_key('other')[1]}", Limits())
    assert (keys.owner(key), keys.owner(key + "x"), keys.owner(""), keys.owner(None)) == ("phone", None, None, None)
    assert Keys("", Limits()).owner(None) == "local"
    for wrong in (key, "phone", f"a b:{'0' * 64}"):
        with pytest.raises(UserError, match="--new-key") as found:
            Keys(wrong, Limits())
        assert key not in str(found.value)
    with pytest.raises(UserError, match="name of a key"):
        new_key("a/b")


def test_rates_and_quotas_belong_to_a_key():
    now = [1_000_000.0]
    limits = Limits(requests_per_minute=3, characters_per_day=100)
    keys = Keys(f"{new_key('a')[1]} {new_key('b')[1]}", limits, clock=lambda: now[0])
    for _ in range(3):
        keys.count_request("a")
    with pytest.raises(Refused, match="3 requests a minute") as found:
        keys.count_request("a")
    assert found.value.seconds == 20
    keys.count_request("b")
    now[0] += 20
    keys.count_request("a")
    keys.count_characters("a", 90)
    with pytest.raises(Refused, match="10 are left for today") as found:
        keys.count_characters("a", 11)
    assert found.value.seconds == 86_400 - 1_000_020 % 86_400
    keys.give_back("a", 5)
    keys.count_characters("a", 15)
    keys.count_characters("b", 100)
    now[0] += 86_400
    keys.count_characters("a", 100)


def test_quotas_over_http(voice):
    key, entry = new_key("phone")
    limits = small_limits(requests_per_minute=4, characters_per_day=10)
    with running(voice, limits=limits, keys=entry) as (_, client):
        client.headers["authorization"] = f"Bearer {key}"
        assert say(client, "!?").status_code == 422  # nothing spoken, nothing counted
        assert say(client, "Hi there.").status_code == 200
        spent = say(client, "Hi.")
        assert spent.status_code == 429 and int(spent.headers["retry-after"]) > 0
        assert client.get("/voices").status_code == 200
        assert say(client, "H.").status_code in (200, 429)
        assert "requests a minute" in say(client, "H.").json()["error"]["message"]


def test_only_this_machine_without_keys(voice):
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(UserError, match="there are no keys"):
            serve(voice, host=host, port=0, keys="")
    key, entry = new_key("phone")
    with serve(voice, host="0.0.0.0", port=0, keys=entry, limits=small_limits()) as server:
        port = server.url.rpartition(":")[2]
        assert httpx.get(f"http://127.0.0.1:{port}/voices").status_code == 401
        head = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"http://127.0.0.1:{port}/voices", headers=head).status_code == 200


def test_faults_of_the_caller_of_serve(voice):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="port .* can't be had"):
        serve(voice, port=taken.getsockname()[1], keys="")
    for name in ("../anna", "", "a b", ".hidden"):
        with pytest.raises(UserError, match="a voice is called"):
            serve({name: voice}, port=0, keys="")
    with pytest.raises(UserError, match="limit text is 0"):
        Limits(text=0)
    with pytest.raises(UserError, match="format is 'exe'"):
        Encoder("exe", 24_000, None)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "f5kit.serve"]
    made = subprocess.run([*command, "--new-key", "phone"], capture_output=True, text=True, check=True).stdout
    key, entry = (line.split()[-1] for line in made.splitlines())
    assert Keys(entry, Limits()).owner(key) == "phone"
    given = ["--voice", "anna=starter", "--port", "0"]
    process = subprocess.Popen([*command, *given], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = process.stdout.readline().split(": ")[1].split(",")[0]
        deadline = time.monotonic() + 60
        with httpx.Client(base_url=address, timeout=60) as client:
            assert say(client).status_code == 200 and time.monotonic() < deadline
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
