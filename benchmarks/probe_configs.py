"""Does the probe name the right reading? Tiny v0 and v1 models are trained, their configs hidden, and both are asked.

    python benchmarks/probe_configs.py [--repetitions 20] [--updates 120]

Every repetition trains a fresh model (v0 and v1 by turns, another seed each) on clips of the demo voice, writes it in
the published layout without a config, and asks `probe_configs` on clips that no training step saw. Writes
benchmarks/results/probe_configs.json with the losses of every reading in every repetition.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

import f5kit
from f5kit.cfm import CFM, draw
from f5kit.checkpoint import fresh_model
from f5kit.config import PRESETS
from f5kit.data import Clip, Dataset, batches
from f5kit.host import detect_host
from f5kit.prepare import prepare_dataset
from f5kit.probe import probe_configs
from f5kit.text import Tokenizer, english_vocab
from f5kit.weights import to_published, write_json, write_tensors

SIZES = dict(dim=64, depth=2, heads=2, dim_head=32, text_dim=32, conv_layers=1, vocab_size=95)
FAMILIES = ("F5TTS", "F5TTS_v1")
RATE, UPDATE_FRAMES = 2e-3, 1_500


def train(family: str, dataset: Dataset, clips: list[Clip], updates: int, seed: int) -> CFM:
    """A tiny model of a family, trained on these clips."""
    config = PRESETS[f"{family}_Base"].replace(name=f"{family}_64x2", **SIZES)
    model = fresh_model(config, Tokenizer(english_vocab()), seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for step, members in batches([clip.frames for clip in clips], UPDATE_FRAMES, seed):
        if step == updates:
            return model.eval()
        batch = dataset.batch([clips[i] for i in members], model.tokenizer, step)
        draws = draw(batch, seed)
        loss = model(batch, draws) / (draws.span.sum() * batch.mel.shape[-1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("batches never end")


def hide(model: CFM, folder: Path) -> Path:
    """Write a model as upstream publishes one: weights and vocabulary, and no word on what they mean."""
    folder.mkdir(parents=True)
    write_tensors(folder / "model_1.safetensors", to_published(model.state_dict()))
    model.tokenizer.save(folder / "vocab.txt")
    return folder


def demo_dataset(folder: Path, clips: int) -> Dataset:
    """The shortest clips of the demo voice, prepared."""
    voice = Path(f5kit.__file__).parent / "demo_voice"
    (folder / "recordings" / "wavs").mkdir(parents=True)
    files = sorted((voice / "wavs").glob("*.flac"), key=lambda f: f.stat().st_size)[:clips]
    for file in files:
        shutil.copy(file, folder / "recordings" / "wavs")
    lines = (voice / "metadata.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.split("|")[0] in {file.stem for file in files}]
    (folder / "recordings" / "metadata.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return prepare_dataset(folder / "recordings", folder / "prepared", progress=False)


def repetition(number: int, dataset: Dataset, updates: int, folder: Path) -> dict:
    """Train, hide, ask. Returns what was right and what was said."""
    family = FAMILIES[number % 2]
    started = time.monotonic()
    unseen = dataset.clips[::5]
    seen = [clip for clip in dataset.clips if clip not in unseen]
    source = hide(train(family, dataset, seen, updates, number), folder / str(number))
    trained = time.monotonic()
    probe = probe_configs(source, [(dataset.path(clip), clip.text) for clip in unseen])
    return {
        "right": f"{family}_64x2", "named": probe.name, "seed": number, "certain": probe.certain,
        "margin": round(probe.margin, 4), "standard_errors": round(probe.errors, 2),
        "losses": {name: round(loss, 5) for name, loss in probe.losses.items()}, "clips": probe.clips,
        "train_seconds": round(trained - started, 1), "probe_seconds": round(time.monotonic() - trained, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--clips", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    host = detect_host("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        dataset = demo_dataset(Path(temporary), options.clips)
        for number in range(options.repetitions):
            rows.append(repetition(number, dataset, options.updates, Path(temporary) / "models"))
            print(json.dumps(rows[-1]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    right = sum(row["right"] == row["named"] for row in rows)
    result = {
        "command": "python benchmarks/probe_configs.py " + " ".join(sys.argv[1:]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "hardware": {"device": host.device_name, "cores": host.cores, "ram_gb": host.ram_gb, "threads": 1},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "f5kit": f5kit.__version__},
        "options": vars(options),
        "right": right,
        "of": len(rows),
        "certain": sum(row["certain"] for row in rows),
        "smallest_margin": min(row["margin"] for row in rows),
        "repetitions": rows,
    }
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    write_json(results / "probe_configs.json", result)
    print(f"right {right} of {len(rows)}, smallest margin {result['smallest_margin']:.1%}")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
