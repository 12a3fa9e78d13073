"""How many padded frames fit in a pass, on cards of 8 to 80 GB: predicted by f5kit.memory, beside the seed's table.

    python benchmarks/memory_table.py

writes results/memory_table.json. No GPU is needed and none is asked: every figure is counted on the meta device, and
none was measured but the seconds that `plan_run` took to answer for each named card, for the bundled recordings.
benchmarks/gpu.py sets the prediction beside what a card really takes.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

from f5kit import detect_host, named_host, plan_run, prepare_dataset
from f5kit.cards import CARDS as NAMED
from f5kit.config import PRESETS
from f5kit.memory import MemoryModel
from f5kit.pick import CONTEXT_GB, USABLE

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "memory_table.json"

# Memory as the driver reports it, of the smallest card that is sold with so many GB.
CARDS = {8: 7.75, 12: 11.76, 16: 14.74, 24: 22.03, 32: 31.37, 40: 39.39, 80: 79.11}
SEED = {8: 3_200, 12: 5_000, 16: 7_000, 24: 10_000, 32: 14_000, 40: 18_000}  # the rule of thumb that users pass on
CLIP, LETTERS = 938, 150  # frames of the longest clip (10 s), and its letters

_WAYS = [  # (precision, optimizer, average off the GPU, checkpointing, rank of adapters)
    ("fp32", "adamw", False, "none", 0),
    ("fp16", "adamw", False, "none", 0),
    ("fp16", "adamw8bit", False, "none", 0),
    ("fp16", "adamw8bit", True, "none", 0),
    ("fp16", "adamw8bit", False, "selective", 0),
    ("fp16", "adamw8bit", False, "full", 0),
    ("fp16", "adamw", False, "none", 8),
    ("fp16", "adamw", False, "full", 8),
]
PRESETS_SHOWN = ("F5TTS_v1_Base", "F5TTS_v1_Small", "E2TTS_Base")


def row(name: str, precision: str, optimizer: str, ema_offload: bool, checkpointing: str, lora_rank: int) -> dict:
    """Frames by card for one way of training, where an update takes several passes; 0 where a clip of 10 s does not
    fit."""
    memory = MemoryModel(PRESETS[name], "cuda", precision, CLIP, LETTERS, lora_rank)
    frames = {}
    for gb, reported in CARDS.items():
        fit = memory.largest(reported * USABLE - CONTEXT_GB, checkpointing, optimizer, ema_offload)
        frames[gb] = fit if fit >= CLIP else 0
    constant, frame = memory.cost(checkpointing)
    return {
        "preset": name, "precision": precision, "optimizer": optimizer, "ema_offload": ema_offload,
        "checkpointing": checkpointing, "lora_rank": lora_rank, "frames": frames,
        "kb_per_frame": round(frame.peak / 1e3, 1), "constant_gb": round(constant.peak / 2**30, 3),
        "kept_gb": round(memory.kept_gb(optimizer, ema_offload), 3),
        "gflop_per_frame": round(frame.operations / 1e9, 3),
    }  # fmt: skip


def answer_seconds(preset: str = "F5TTS_v1_Base") -> dict[str, float]:
    """Seconds until each named card is planned for; what the first answer has to import is in its time."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare_dataset(ROOT / "f5kit" / "demo_voice", Path(folder) / "data", progress=False)
        taken = {}
        for name in NAMED:
            begun = time.perf_counter()
            plan_run(preset, dataset, named_host(name))
            taken[name] = round(time.perf_counter() - begun, 2)
    return taken


def main() -> None:
    answers = answer_seconds()
    begun = time.time()
    rows = [row(name, *way) for name in PRESETS_SHOWN for way in _WAYS]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "command": "python benchmarks/memory_table.py", "commit": commit, "predicted": True,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": "none: counted on the meta device; the answers' seconds on " + str(detect_host()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {"longest_clip_frames": CLIP, "letters": LETTERS, "usable": USABLE, "context_gb": CONTEXT_GB,
                     "reported_gb": CARDS, "passes": "two or more in an update, masks needed, dropout 0"},
        "seed": SEED, "rows": rows, "answer_seconds": answers, "seconds": round(time.time() - begun, 1),
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{RESULT}: {len(rows)} rows in {record['seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
