"""Which Whisper writes down a dataset on this machine, and where it is computed.

CTranslate2 brings CUDA libraries of its own and has broken on Colab, sometimes by ending the process. So a device is
tried in a process of its own first, and the CPU in int8 takes over when it dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from f5kit.asr import Whisper, look_for
from f5kit.errors import UserError
from f5kit.host import Host, detect_host

_TRIAL_SECONDS = 900  # the first trial may download the model
_TRIAL = """
import sys
import torch
from f5kit.asr import RATE, Whisper
model, device, compute, language = sys.argv[1:]
Whisper(model, language or None, device, compute)(torch.randn(RATE) * 0.01, RATE)
print("works")
"""


def load_transcriber(model: str | Path = "auto", language: str | None = None, device: str | None = None) -> Whisper:
    """A Whisper on the best device on which it works; its `.why` says in a sentence why there.

    model: a folder in CTranslate2's form, a name of the Hub such as "large-v3", or "auto": large-v3 on a GPU with room
    for it, small on a CPU. language: a code, or None to detect it. Raises UserError when it works nowhere, or where
    faster-whisper is not installed.
    """
    host, tried = detect_host(device), []
    for place, compute, reason in _choices(host):
        size = str(model) if model != "auto" else _size(host, place)
        look_for(size)
        failed = _try(size, place, compute, language)
        if failed is None:
            chosen = Whisper(size, language, place, compute)
            chosen.why = "; ".join([reason, *tried])
            return chosen
        tried.append(f"{place} {compute} failed: {failed}")
    raise UserError(f"{model} can't be used to transcribe ({'; '.join(tried)}); give a folder that holds the model")


def _choices(host: Host) -> list[tuple[str, str, str]]:
    """(device, compute type, reason), the best first."""
    cpu = ("cpu", "int8", "8-bit integers are the fastest a CPU has")
    if host.device != "cuda":
        return [cpu]
    if host.memory_gb < 6:
        return [("cuda", "int8_float16", f"{host.memory_gb:.1f} GB of GPU memory ask for 8-bit weights"), cpu]
    return [("cuda", "float16", f"{host.device_name} computes in half precision"), cpu]


def _size(host: Host, place: str) -> str:
    return "large-v3" if place == "cuda" and host.memory_gb >= 4 else "small"


def _try(model: str, device: str, compute: str, language: str | None) -> str | None:
    """Load and use the model in a process of its own. Returns why that failed, or None."""
    folder = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _TRIAL, model, device, compute, language or ""]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, env={**os.environ, "PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_TRIAL_SECONDS} s"
    if done.returncode == 0 and done.stdout.rstrip().endswith("works"):
        return None
    if done.returncode < 0:
        return f"the process died of signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
