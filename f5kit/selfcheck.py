"""What this machine's card really does, in five minutes at most: beside what f5kit predicts for it.

    python -m f5kit.selfcheck                   on a GPU: F5TTS_v1_Base; writes selfcheck.json
    python -m f5kit.selfcheck --model tiny      another preset; on a CPU this is the default

Measured are the rate of matrix products, updates of training in several ways (seconds, memory beside the prediction,
is every update finite), and sampling. Weights are fresh and mels are noise: nothing is downloaded, and it says nothing
about sound. The kit's authors have few cards: a file from yours, sent with an issue, makes the predictions better.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

import torch

from f5kit.cards import card_of
from f5kit.checkpoint import find_preset, fresh_model
from f5kit.config import ModelConfig, TrainConfig
from f5kit.host import Host, detect_host
from f5kit.memory import MemoryModel
from f5kit.pick import CONTEXT_GB, USABLE
from f5kit.text import Tokenizer
from f5kit.trial import try_update
from f5kit.tuning import DTYPES, autocast
from f5kit.weights import write_json

LONGEST, LETTERS = 938, 150  # frames of a clip of 10 s, and its letters
# Ways of training that differ in what they need: settings of TrainConfig.
WAYS: tuple[dict, ...] = (
    dict(checkpointing="none", optimizer="adamw"),
    dict(checkpointing="none", optimizer="adamw8bit"),
    dict(checkpointing="selective", optimizer="adamw8bit"),
    dict(checkpointing="full", optimizer="adamw8bit"),
    dict(checkpointing="none", optimizer="adamw8bit", ema_offload=True),
    dict(checkpointing="none", optimizer="adamw", lora_rank=8),
)


def selfcheck(model: str | None = None, out: str | Path | None = "selfcheck.json", minutes: float = 5.0) -> dict:
    """Check this machine with the preset of that name (None: what fits the device), and write what was found to `out`.

    A part that would begin after its share of the time is left out and named in "left_out".
    """
    host, begun = detect_host(), time.monotonic()
    config = find_preset(model or ("F5TTS_v1_Base" if host.device == "cuda" else "tiny"))
    deadline = begun + 60 * minutes
    found = {
        "host": str(host), "device": host.device, "card": asdict(card_of(host)[0]), "model": config.name,
        "versions": {"f5kit": import_module(__package__).__version__, "torch": torch.__version__,
                     "cuda": torch.version.cuda},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "note": "measured on a GPU" if host.device == "cuda" else
                "there is no CUDA GPU here: these are a processor's figures, and say nothing about any card",
        "matrix_tflops": matrix_rates(host.device),
    }  # fmt: skip
    found["training"], left_out = check_ways(config, host, WAYS, begun + 0.8 * 60 * minutes)
    found["sampling"] = check_sampling(config, host) if time.monotonic() < deadline else None
    found["left_out"] = left_out + ([] if found["sampling"] else ["sampling"])
    found["seconds"] = round(time.monotonic() - begun, 1)
    if out is not None:
        write_json(Path(out), found)
    return found


def check_ways(
    config: ModelConfig, host: Host, ways: Sequence[dict], deadline: float, precisions: Sequence[str] | None = None
) -> tuple[list[dict], list[str]]:
    """A real update in each way, as large as a plan would make it, beside what was predicted; and ways left out."""
    rows, left_out = [], []
    for precision in precisions or (host.precision.value,):
        for way in ways:
            if time.monotonic() > deadline:
                left_out.append(f"{precision} {way}")
            elif host.device == "cuda" or not way.get("ema_offload"):
                rows.append(check_way(config, host, precision, way))
    return rows, left_out


def check_way(config: ModelConfig, host: Host, precision: str, way: dict, most: int = 16_000) -> dict:
    """One way of training: predicted and measured memory and time of an update of two passes."""
    cuda = host.device == "cuda"
    longest = LONGEST if cuda else 200
    memory = MemoryModel(config, "cuda" if cuda else "cpu", precision, longest, LETTERS if cuda else 40,
                         way.get("lora_rank", 0))  # fmt: skip
    how = way["checkpointing"], way["optimizer"], way.get("ema_offload", False)
    fit = memory.largest(host.memory_gb * USABLE - CONTEXT_GB, *how)
    if fit < longest:
        return {"precision": precision, **way, "predicted": "does not fit"}
    micro = min(fit, most) if cuda else 3 * longest
    train = TrainConfig(updates=1, learning_rate=1e-5, warmup_updates=0, update_frames=micro, micro_frames=micro,
                        ema_horizon=10, evaluate_every=1, save_every=1, precision=precision, **way)  # fmt: skip
    tried = try_update(config, train, host.device, longest, memory.tokens, passes=2, repeats=4)
    predicted = memory.allocated_gb(tried.frames, *how)
    row = {"precision": precision, **way, "frames": tried.frames, "predicted_gb": predicted,
           "allocated_gb": tried.allocated_gb, "reserved_gb": tried.reserved_gb, "finite": tried.finite,
           "shortage": tried.shortage}  # fmt: skip
    if tried.shortage is None:
        operations = memory.step(tried.frames, way["checkpointing"]).operations
        row |= {"error": predicted / tried.allocated_gb - 1, "seconds_per_pass": tried.seconds_per_pass,
                "seconds_per_update": tried.seconds_per_update, "tflops": operations / tried.seconds_per_pass / 1e12,
                "frames_per_second": tried.frames / tried.seconds_per_pass}  # fmt: skip
    return row


def check_sampling(config: ModelConfig, host: Host, steps: int = 16) -> dict:
    """Seconds to sample 5 s of mel after 3 s of reference, in the host's precision, and whether it is finite."""
    model = fresh_model(config, Tokenizer([" ", *(f"#{i}" for i in range(1, config.vocab_size))])).to(host.device)
    reference, text, frames = torch.zeros(1, 281, config.mel.n_mels) - 4, [list(range(1, 90))], 750
    taken = []
    with autocast(torch.device(host.device), host.precision.value):
        for _ in range(2):
            begun = time.perf_counter()
            *_, mel = model.sample(reference, text, [frames], steps=steps)
            finite = bool(mel.isfinite().all())  # waits for the device
            taken.append(time.perf_counter() - begun)
    seconds = (frames - 281) / config.mel.frames_per_second
    return {"steps": steps, "seconds": taken[-1], "rtf": taken[-1] / seconds, "finite": finite,
            "precision": host.precision.value}  # fmt: skip


def matrix_rates(device: str) -> dict[str, float]:
    """TFLOP/s of a large product of square matrices, by number format."""
    size, rates = (8192, {}) if device == "cuda" else (512, {})
    for name, dtype in DTYPES.items():
        a = torch.randn(size, size, device=device).to(dtype)
        best = float("inf")
        for _ in range(4):
            begun = _now(device)
            a @ a
            best = min(best, _now(device) - begun)
        rates[name] = 2 * size**3 / best / 1e12
    return rates


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def summary(found: dict) -> str:
    """What was found, in some lines."""
    lines = [f"{found['host']} ({found['note']})"]
    for row in found["training"]:
        way = " ".join(f"{v}" for k, v in row.items() if k in ("precision", "checkpointing", "optimizer"))
        way += " adapters" * bool(row.get("lora_rank")) + " average off the GPU" * bool(row.get("ema_offload"))
        if "error" not in row:
            lines.append(f"  {way}: does not fit")
            continue
        gb, finite = f"{row['allocated_gb']:.2f} GB", "finite" if row["finite"] else "NOT FINITE"
        speed = f"{row['frames_per_second']:,.0f} frames/s"
        lines.append(f"  {way}: {row['frames']:,} frames, {gb} (predicted {row['error']:+.1%}), {speed}, {finite}")
    if found["sampling"]:
        lines.append(f"  sampling: RTF {found['sampling']['rtf']:.3f} in {found['sampling']['steps']} steps")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m f5kit.selfcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a preset; by default F5TTS_v1_Base on a GPU and tiny elsewhere")
    parser.add_argument("--out", default="selfcheck.json")
    parser.add_argument("--minutes", type=float, default=5.0)
    given = parser.parse_args(arguments)
    print(summary(selfcheck(given.model, given.out, given.minutes)))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
