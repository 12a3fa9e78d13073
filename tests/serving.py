"""What tests of the server share: the embedded voice, a running server, and a client on its loopback address."""

from __future__ import annotations

import io
from contextlib import contextmanager

import httpx
import soundfile
import torch

from f5kit.keys import Limits
from f5kit.serve import serve

TEXT = "Hi."
QUICK = {"nfe_step": "1", "cfg_strength": "0"}  # half a second on a slow core


@contextmanager
def running(voice, **how):
    """(server, client) on a free port."""
    with serve(voice, port=0, keys=how.pop("keys", ""), **how) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield server, client


def small_limits(**changes) -> Limits:
    return Limits(**{"text": 500, "steps": 8, "upload_mb": 4.0, "grace": 5.0, **changes})


def heard(data: bytes) -> torch.Tensor:
    """The samples of a sound file, read by soundfile."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.samplerate, file.channels) == (24_000, 1)
        return torch.from_numpy(file.read(24_000 * 600, dtype="float32"))


def alone(voice, text: str = TEXT, steps: int = 1, cfg_strength: float = 0.0, **settings) -> torch.Tensor:
    """What the voice says to nobody else."""
    return voice.speak(text, steps=steps, cfg_strength=cfg_strength, progress=False, **settings).audio


def assert_same(heard: torch.Tensor, expected: torch.Tensor) -> None:
    """To 1e-4: half a step of 16 bits is 1.5e-5."""
    assert heard.shape == expected.shape
    assert float((heard - expected.clamp(-1, 1)).abs().max()) < 1e-4


def say(client, text=TEXT, **fields):
    fields = {name: str(value) for name, value in fields.items()}
    return client.post("/tts", data={"gen_text": text, **QUICK, **fields})


def figure(client, name: str) -> float:
    """A figure of /metrics."""
    lines = [line.split() for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(value) for _, value in lines)
