"""Writing down what nobody has written down: faster-whisper, on what this machine can do.

CTranslate2 brings CUDA libraries of its own and has broken on Colab, sometimes by ending the process. So a device is
tried in a process of its own first, and the CPU in int8 takes over when it dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from f5kit.audio import resample
from f5kit.errors import UserError
from f5kit.host import Host, detect_host

RATE = 16_000
_TRIAL_SECONDS = 900  # the first trial may download the model
_TRIAL = """
import sys
import numpy
from f5kit.transcribe import load_whisper, write_down
model = load_whisper(*sys.argv[1:4])
noise = numpy.random.default_rng(0).standard_normal(16000).astype("float32") * 0.01
write_down(model, noise, sys.argv[4] or None)
print("works")
"""


@dataclass
class Transcriber:
    """Writes down clips. Made by `load_transcriber`."""

    model: object
    name: str
    """The model and how it is computed: what a transcript depends on."""
    reason: str
    """Why on this device."""
    language: str | None = None

    def __call__(self, audio: Tensor, sample_rate: int, language: str | None = None) -> tuple[str, str]:
        """The text of a clip (nw,), and its language: the one given, else the one that is heard."""
        samples = resample(audio, sample_rate, RATE).numpy()
        return write_down(self.model, samples, language or self.language)

    def detect_language(self, clips: list[Tensor], sample_rate: int) -> str:
        """The language that most of some clips seem to be in, each weighted by how sure the model is."""
        votes: dict[str, float] = {}
        for audio in clips:
            name, probability, _ = self.model.detect_language(resample(audio, sample_rate, RATE).numpy())
            votes[name] = votes.get(name, 0.0) + probability
        return max(votes, key=votes.get)


def load_transcriber(model: str | Path = "auto", language: str | None = None, device: str | None = None) -> Transcriber:
    """A faster-whisper model, on the best device on which it works.

    model: a folder in CTranslate2's form, a name of the Hub such as "large-v3", or "auto": large-v3 on a GPU with room
    for it, small on a CPU. language: a code, or None to detect it. Raises UserError when it works nowhere, or where
    faster-whisper is not installed.
    """
    _import_whisper()
    host = detect_host(device)
    tried = []
    for place, compute, reason in _choices(host):
        size = str(model) if model != "auto" else _size(host, place)
        failed = _try(size, place, compute, language)
        if failed is None:
            reason = "; ".join([reason, *tried])
            return Transcriber(load_whisper(size, place, compute), f"{size} {place} {compute}", reason, language)
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
    return ("large-v3" if host.memory_gb >= 4 else "small") if place == "cuda" else "small"


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


def _import_whisper():
    try:
        import faster_whisper
    except ImportError:
        raise UserError("transcribing needs faster-whisper, of the extra data: pip install faster-whisper") from None
    return faster_whisper


def load_whisper(model: str, device: str, compute: str):
    """A WhisperModel. A name is looked for on the Hub, a path is read."""
    if (os.sep in model or "/" in model) and not Path(model).is_dir() and model.count("/") != 1:
        raise UserError(f"there is no folder {model}; give a model in CTranslate2's form, or a name such as large-v3")
    return _import_whisper().WhisperModel(model, device=device, compute_type=compute)


def write_down(model, samples: np.ndarray, language: str | None) -> tuple[str, str]:
    """(text, language) of samples at 16 kHz.

    Clips are judged one by one: what was said before is not told, because that is how Whisper starts to loop. One
    temperature: sampling at others would write another text each time.
    """
    segments, info = model.transcribe(
        samples, language=language, beam_size=5, temperature=0.0, condition_on_previous_text=False
    )
    return " ".join(segment.text.strip() for segment in segments).strip(), info.language
