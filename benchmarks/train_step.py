"""One training update: f5kit beside upstream's Trainer, on the same preset, clips, precision and machine, interleaved.

    .venv-parity/bin/python benchmarks/train_step.py            both presets, some minutes each on a CPU
    .venv-parity/bin/python benchmarks/train_step.py --quick    a small model, once: does it run?

writes results/train_step.json (with --quick, nothing): frames a second with every repetition, ratios, the most bytes
alive in an update, padding of both samplers, the time until each can train, and the profile of one of our updates.

Upstream's step is what its Trainer does in one pass of its loop (f5_tts/model/trainer.py): model, backward, clipping to
1.0, fused AdamW, EMA with its defaults; in fp32, as it runs unless told otherwise, and under bf16 autocast. Ours is the
update that f5kit.trial makes for a plan. Dropout is upstream's 0.1 in both; f5kit's default for finetuning, 0, is a row
of its own. Loss and gradients of the two agree, as `make parity` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

import f5kit
from f5kit.cfm import draw
from f5kit.config import PRESETS, ModelConfig, TrainConfig
from f5kit.data import Batch, collate, epoch_batches, padding
from f5kit.memory import counted
from f5kit.trial import Update
from f5kit.tuning import autocast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
RESULT = ROOT / "benchmarks" / "results" / "train_step.json"


class Upstream:
    """Upstream's model, optimizer and average, as its Trainer makes them."""

    def __init__(self, config: ModelConfig, device: str):
        from ema_pytorch import EMA
        from models import upstream_model

        self.model = upstream_model(config).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-9, fused=True)
        self.ema = EMA(self.model, include_online_model=False).to(device)
        self.device = torch.device(device)

    def do(self, batch: Batch, precision: str) -> float:
        """One pass of its loop; the loss."""
        with autocast(self.device, precision):
            loss, _, _ = self.model(batch.mel.to(self.device), text=batch.text.to(self.device),
                                    lens=batch.lens.to(self.device))  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update()
        return loss.item()


def our_update(config: ModelConfig, precision: str, device: str) -> Update:
    train = TrainConfig(updates=1, learning_rate=1e-9, warmup_updates=0, update_frames=1, micro_frames=1,
                        ema_horizon=100, evaluate_every=1, save_every=1, precision=precision)  # fmt: skip
    return Update(config, train, device)


def lengths(n: int, seed: int = 0) -> list[int]:
    """Clips of 2 to 12 s, lognormal, in frames."""
    rng = random.Random(seed)
    return [int(min(max(rng.lognormvariate(1.6, 0.5), 2), 12) * 93.75) for _ in range(n)]


def make_batch(config: ModelConfig, budget: int) -> Batch:
    """Clips of near-equal lengths, as both samplers make them, of about `budget` padded frames."""
    frames = lengths(300)
    groups = epoch_batches(frames, budget, seed=0, epoch=0)
    members = max(groups, key=lambda g: (len(g) * max(frames[i] for i in g), -len(g)))
    g = torch.Generator().manual_seed(0)
    mels = [torch.randn(frames[i], config.mel.n_mels, generator=g) * 2 - 4 for i in members]
    texts = [torch.randint(config.vocab_size, (max(frames[i] // 7, 1),), generator=g).tolist() for i in members]
    return collate(mels, texts, [str(i) for i in members], 0, range(len(members)))


def timed(action, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def most_memory(action, device: str) -> int:
    """The most bytes that were alive at once; on a CPU, tensors made within the action."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated()
    with counted() as alive:
        action()
    return alive.peak


def compare(name: str, config: ModelConfig, budget: int, repeats: int, device: str) -> dict:
    """Frames a second of each way, one repetition of all before the next, and ratios with their spread."""
    config = config.replace(dropout=0.1)
    batch = make_batch(config, budget)
    draws = draw(batch, 0)
    theirs = Upstream(config, device)
    ours = our_update(config, "fp32", device)

    def our_way(precision: str, dropout: float):
        def act():
            ours.train = replace(ours.train, precision=precision)  # one model for all ways: two would not fit in memory
            for module in ours.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = dropout
            ours.do([(batch, draws)])

        return act

    ways = {
        "upstream fp32": lambda: theirs.do(batch, "fp32"), "upstream bf16": lambda: theirs.do(batch, "bf16"),
        "f5kit fp32": our_way("fp32", 0.1), "f5kit bf16": our_way("bf16", 0.1),
        "f5kit bf16, dropout 0": our_way("bf16", 0.0),
    }  # fmt: skip
    for act in ways.values():
        act()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, act in ways.items():
            seconds[way].append(timed(act, device))
    real, padded = int(batch.lens.sum()), batch.mel[..., 0].numel()
    row = {
        "preset": name, "clips": len(batch.lens), "frames": real, "padded_frames": padded, "repetitions": seconds,
        "frames_per_second": {way: real / statistics.median(s) for way, s in seconds.items()},
        "memory_bytes": {way: most_memory(act, device) for way, act in ways.items()},
    }  # fmt: skip
    row["ratios"] = {
        f"{way} to {other}": spread(seconds[other], seconds[way])
        for way in ways if way.startswith("f5kit") for other in ways if other.startswith("upstream")
    }  # fmt: skip
    row["profile"] = profile(ways["f5kit bf16"], config, device)
    return row


def spread(slow: list[float], fast: list[float]) -> dict[str, float]:
    """How many times faster: by medians, and the lowest and highest of the repetitions that stood side by side."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return {"median": statistics.median(slow) / statistics.median(fast), "low": min(each), "high": max(each)}


def profile(act, config: ModelConfig, device: str) -> dict[str, float]:
    """Shares of one update by what the operations are; products are told apart by the widths that they have."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profiler(activities=kinds, record_shapes=True) as seen:
        act()
    shares: dict[str, float] = {}
    for event in seen.key_averages(group_by_input_shape=True):
        taken = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        kind = kind_of(event.key, event.input_shapes, config)
        shares[kind] = shares.get(kind, 0.0) + taken
    whole = sum(shares.values())
    return {kind: round(taken / whole, 4) for kind, taken in sorted(shares.items(), key=lambda item: -item[1])}


def kind_of(name: str, shapes: list, config: ModelConfig) -> str:
    """What an operation of the profile belongs to."""
    widths = {size for shape in shapes if isinstance(shape, (list, tuple)) for size in shape if isinstance(size, int)}
    if "attention" in name:
        return "attention"
    if "adam" in name or "foreach" in name or "lerp" in name:
        return "optimizer, clipping and average"
    if any(word in name for word in ("::mm", "addmm", "mkldnn", "linear", "bmm", "gemm")) and "conv" not in name:
        if 6 * config.dim in widths:
            return "products of the time's modulation"
        if int(config.dim * config.ff_mult) in widths:
            return "products of feed-forwards"
        return "products of attention" if config.dim in widths else "other products"
    if "conv" in name:
        return "convolutions"
    if "norm" in name:
        return "norms"
    if "gelu" in name or "mish" in name or "silu" in name:
        return "activations"
    if "dropout" in name or "bernoulli" in name:
        return "dropout"
    if "copy" in name or "_to" in name:
        return "copies and casts"
    return "other elementwise work"


def paddings() -> list[dict]:
    """Padded over real frames of one epoch: our batches, and upstream's rule (sorted, real frames up to the budget)."""
    rows = []
    for n in (300, 3_000):
        for budget in (3_200, 14_000, 38_400):
            frames = lengths(n)
            theirs, filled = [], budget + 1
            for i in sorted(range(n), key=lambda i: frames[i]):
                if filled + frames[i] > budget or len(theirs[-1]) == 64:
                    theirs.append([])
                    filled = 0
                theirs[-1].append(i)
                filled += frames[i]
            ours = epoch_batches(frames, budget, seed=0, epoch=0)
            largest = {who: max(len(g) * max(frames[i] for i in g) for g in groups)
                       for who, groups in (("f5kit", ours), ("upstream", theirs))}  # fmt: skip
            rows.append({"clips": n, "budget": budget, "f5kit": padding(ours, frames),
                         "upstream": padding(theirs, frames), "largest_padded_batch": largest})  # fmt: skip
    return rows


def import_seconds(repeats: int = 3) -> dict[str, list[float]]:
    """Until a model can be made: f5kit's and upstream's modules, each in a fresh interpreter that has torch already.

    Upstream's import of torchaudio is helped over the CPU build of torch where that is needed, outside the clock.
    """
    ours = "from f5kit.cfm import CFM; from f5kit.trainer import Trainer"
    theirs = "from f5_tts.model import CFM, DiT"
    taken = {"f5kit": [], "upstream": []}
    for _ in range(repeats):
        for who, statement in (("f5kit", ours), ("upstream", theirs)):
            code = ("import torch, time\nfrom f5kit.audio import import_torchaudio\nimport_torchaudio()\n"
                    f"begun = time.perf_counter()\n{statement}\nprint(time.perf_counter() - begun)")  # fmt: skip
            done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
            if done.returncode == 0:
                taken[who].append(float(done.stdout.split()[-1]))
    return taken


def circumstances(device: str) -> dict:
    """What the figures depend on."""

    def git(*given: str) -> str:
        return subprocess.run(["git", *given], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    half = ", ".join(flag for flag in ("amx_bf16", "avx512_bf16") if f" {flag}" in flags) or "no bf16 instructions"
    hardware = f"CPU {names[0] if names else platform.processor()} ({half}), {torch.get_num_threads()} threads"
    if device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}, {hardware}"
    changed = " and uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "command": "python benchmarks/train_step.py " + " ".join(sys.argv[1:]),
        "commit": git("rev-parse", "HEAD") + changed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "hardware": hardware,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": {"python": platform.python_version(), "f5kit": f5kit.__version__}
        | {name: version(name) for name in ("torch", "f5-tts")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["F5TTS_v1_Small", "F5TTS_v1_Base"])
    parser.add_argument("--budget", type=int, help="padded frames; default 1,700 on a CPU and 14,000 on a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = given.budget or (14_000 if device == "cuda" else 1_700)
    record = {**circumstances(device), "rows": []}
    if given.quick:
        small = PRESETS["F5TTS_v1_Small"].replace(name="quick", dim=256, depth=2, heads=4)
        print(json.dumps(compare("quick", small, 1_200, 1, device), indent=1))
        return
    for name in given.presets:
        record["rows"].append(compare(name, PRESETS[name], budget, given.repeats, device))
        print(json.dumps({k: v for k, v in record["rows"][-1].items() if k != "repetitions"}, indent=1), flush=True)
    record |= {"padding": paddings(), "import_seconds": import_seconds()}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
