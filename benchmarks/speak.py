"""Speaking: f5kit beside upstream's inference pipeline in one run, and what half precision changes in the mel.

    .venv-parity/bin/python benchmarks/speak.py                    v1_Small and v1_Base: minutes on a GPU, and
                                                                   five quarters of an hour on two cores
    .venv-parity/bin/python benchmarks/speak.py --quick            v1_Small, 5 s, 7 steps: a minute or two, only told

Both pipelines get the same random weights of the published structure, the same 3 s of reference, the same text and
length, each its own vocoder of the published Vocos structure, and run as they do by default on this device: upstream
through its infer_batch_process, with the chunks of its chunk_text; f5kit through Voice.speak. Repetitions alternate;
a row that has taken a minute is not repeated.
A time is that of the whole call, from the text to the samples. Writes benchmarks/results/speak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

import f5kit
from f5kit.audio import import_torchaudio, log_mel, match_loudness, read_audio
from f5kit.checkpoint import fresh_model
from f5kit.config import PRESETS
from f5kit.inference import Voice, demo_reference
from f5kit.reference import Reference
from f5kit.text import Tokenizer, english_vocab
from f5kit.tuning import apply_environment, speaking_precision
from f5kit.vocoder import VocosVocoder

ROOT = Path(__file__).parents[1]
REFERENCE_SECONDS = 3.0
PATIENCE = 60.0  # seconds after which a row is not repeated
SENTENCE = "The river ran high that spring, and the road along it was closed for many weeks. "
SAID = "A reference of three seconds, as it is said."
VOCOS = {  # charactr/vocos-mel-24khz
    "feature_extractor": {"class_path": "vocos.feature_extractors.MelSpectrogramFeatures", "init_args": {
        "sample_rate": 24_000, "n_fft": 1024, "hop_length": 256, "n_mels": 100, "padding": "center"}},
    "backbone": {"class_path": "vocos.models.VocosBackbone", "init_args": {
        "input_channels": 100, "dim": 512, "intermediate_dim": 1536, "num_layers": 8}},
    "head": {"class_path": "vocos.heads.ISTFTHead", "init_args": {
        "dim": 512, "n_fft": 1024, "hop_length": 256, "padding": "center"}},
}  # fmt: skip


def make_vocoder(device: str) -> VocosVocoder:
    """Vocos as it is published, with random weights."""
    import_torchaudio()
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    torch.manual_seed(0)
    parts = {"backbone": VocosBackbone, "head": ISTFTHead}
    tensors = {
        f"{name}.{k}": t
        for name, make in parts.items()
        for k, t in make(**VOCOS[name]["init_args"]).state_dict().items()
    }
    return VocosVocoder(VOCOS, tensors).to(device)


def make_voice(name: str, device: str) -> Voice:
    """A published structure with lively random weights, fp32."""
    config = PRESETS[name].replace(vocab_size=95, tokenizer="char", normaliser="basic")
    model = fresh_model(config, Tokenizer(english_vocab()))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.02)
    audio = match_loudness(read_audio(demo_reference()[0])[: int(REFERENCE_SECONDS * 24_000)])
    return Voice(model.to(device), Reference(audio, log_mel(audio), SAID, "demo"), make_vocoder(device))


def upstream_pipeline(voice: Voice, device: str):
    """A function (text, seconds, steps) -> samples that speaks as upstream does, with the same weights."""
    sys.path[:0] = [str(ROOT / "tests" / "parity"), str(ROOT / "tests")]
    import_torchaudio()
    from f5_tts.infer import utils_infer
    from models import upstream_model

    model = upstream_model(voice.model.config)
    model.load_state_dict(voice.model.state_dict())
    model.vocab_char_map = {c: i for i, c in enumerate(english_vocab())}
    # as its load_checkpoint does: half precision on a GPU of capability 7 and up, fp32 on a CPU
    half = device == "cuda" and torch.cuda.get_device_capability()[0] >= 7
    model = model.to(torch.float16 if half else torch.float32).to(device).eval()
    vocoder = make_vocoder(device)

    class Decoder:
        def decode(self, mel: Tensor) -> Tensor:
            return vocoder.head(vocoder.backbone(mel))

    audio = voice.reference.audio[None]
    reference_text = SAID + " "

    def speak(text: str, seconds: float, steps: int) -> Tensor:
        most = int(len(reference_text.encode()) / REFERENCE_SECONDS * (22 - REFERENCE_SECONDS))
        batches = utils_infer.chunk_text(text, max_chars=most)
        made = utils_infer.infer_batch_process(
            (audio, 24_000), reference_text, batches, model, Decoder(), progress=None, nfe_step=steps,
            fix_duration=REFERENCE_SECONDS + seconds, device=device,
        )  # fmt: skip
        return torch.from_numpy(next(made)[0])

    return speak


def timed(action, device: str) -> tuple[float, Tensor]:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    made = action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, made


def compare(name: str, lengths: list[int], steps: list[int], repeats: int, device: str) -> Iterator[dict]:
    """One row for each length and number of steps: medians, the ratio, and what the precision changes in the mel."""
    voice = make_voice(name, device)
    parameters = sum(p.numel() for p in voice.model.parameters())
    precision = speaking_precision(parameters, device)
    theirs = upstream_pipeline(voice, device)
    exact = {}
    for seconds in lengths:  # in fp32
        text = text_of(seconds)
        exact[seconds] = voice.speak(text, duration=seconds, steps=steps[0], progress=False).mel
    voice.precision = precision.value
    if apply_environment(device)["ENABLE_TORCH_COMPILE"]:
        from f5kit.tuning import compile_backbone

        compile_backbone(voice.model)
    for seconds in lengths:
        text = text_of(seconds)
        half = voice.speak(text, duration=seconds, steps=steps[0], progress=False).mel
        change = ((half - exact[seconds]).square().mean().sqrt() / exact[seconds].square().mean().sqrt()).item()
        theirs(text, seconds, 2)
        for count in steps:
            ours_took, theirs_took, first = [], [], []
            started = time.perf_counter()
            while not ours_took or (len(ours_took) < repeats and time.perf_counter() - started < PATIENCE):
                how = {"duration": float(seconds), "steps": count}
                took, said = timed(lambda: voice.speak(text, progress=False, **how), device)  # noqa: B023
                ours_took.append(took)
                took, samples = timed(lambda: theirs(text, seconds, count), device)  # noqa: B023
                theirs_took.append(took)
                first.append(timed(lambda: next(voice.stream(text, first=2.0, **how)), device)[0])  # noqa: B023
            row = {
                "model": name, "seconds": seconds, "steps": count, "precision": precision.value,
                "ours": statistics.median(ours_took), "upstream": statistics.median(theirs_took),
                "ratio": statistics.median(theirs_took) / statistics.median(ours_took),
                "rtf": statistics.median(ours_took) / said.seconds, "first_sound": statistics.median(first),
                "mel_change": change, "made": [said.seconds, len(samples) / 24_000],
                "repetitions": {"ours": ours_took, "upstream": theirs_took, "first_sound": first},
            }  # fmt: skip
            told = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items() if k != "repetitions"}
            print(json.dumps(told), flush=True)
            yield row


def text_of(seconds: float) -> str:
    """About as many letters as are said in that time."""
    return SENTENCE * max(1, round(seconds / 5))


def circumstances(device: str) -> dict:
    """What the figures depend on."""

    def git(*given: str) -> str:
        return subprocess.run(["git", *given], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = f"CPU {names[0] if names else platform.processor()}, {cores} cores, {torch.get_num_threads()} threads"
    if device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}, {hardware}"
    changed = " and uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD") + changed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "hardware": hardware,
        "versions": {"python": platform.python_version(), "f5kit": f5kit.__version__, "torch": version("torch")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["F5TTS_v1_Small", "F5TTS_v1_Base"])
    parser.add_argument("--seconds", nargs="+", type=int, default=[5, 30])
    parser.add_argument("--steps", nargs="+", type=int, default=[7, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="v1_Small, 5 s, 7 steps, once")
    given = parser.parse_args()
    if given.quick:
        given.models, given.seconds, given.steps, given.repeats = ["F5TTS_v1_Small"], [5], [7], 1
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    apply_environment(device)
    record = circumstances(device)
    record["versions"]["f5-tts"] = version("f5-tts")
    record["rows"] = []
    for name in given.models:
        for row in compare(name, given.seconds, given.steps, given.repeats, device):
            record["rows"].append(row)
            if not given.quick:
                write("speak.json", record)  # all of it takes an hour: what was measured is there


def write(name: str, record: dict) -> None:
    (ROOT / "benchmarks" / "results" / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
