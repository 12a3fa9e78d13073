"""Puts a trained starter voice into the package, and its training record into benchmarks/results.

    python benchmarks/starter/embed.py build/corpus build/starter/run

Writes f5kit/starter_voice/ (fp16 weights, config, vocabulary, a reference clip of its first speaker) and
benchmarks/results/starter_training.json (settings, learning curve, hash of the weights).
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from f5kit.audio import match_loudness, read_audio, trim_silence, write_audio
from f5kit.checkpoint import RunFolder, export_model, load_model
from f5kit.host import detect_host
from f5kit.weights import file_hash

ROOT = Path(__file__).resolve().parents[2]
VOICE = ROOT / "f5kit" / "starter_voice"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--weights", choices=("ema", "raw"), default="ema")
    parser.add_argument("--note", default="", help="what the record should say of the weights that the run began from")
    args = parser.parse_args()
    run = RunFolder(args.run)
    checkpoint = run.latest()
    export_model(load_model(checkpoint.path, weights=args.weights), VOICE, torch.float16)
    write_reference(args.corpus)
    path = ROOT / "benchmarks" / "results" / "starter_training.json"
    record = training_record(run, checkpoint.name, args.weights) | {"note": args.note}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in VOICE.rglob("*") if file.is_file())
    print(f"{VOICE}: {size / 1e6:.1f} MB, {checkpoint.name} {args.weights}")


def write_reference(corpus: Path) -> None:
    """The training clip of the first speaker that is nearest to 4 seconds and ends its sentence."""
    rows = [json.loads(line) for line in (corpus / "manifest.jsonl").read_text(encoding="ascii").splitlines()]
    whole = [row for row in rows if row["voice"] == "slt" and row["split"] == "train" and row["text"].endswith(".")]
    chosen = min(whole, key=lambda row: (not row["text"][0].isupper(), abs(row["seconds"] - 4), row["id"]))
    audio = read_audio(corpus / "train" / "wavs" / f"{chosen['id']}.wav")
    write_audio(VOICE / "reference.wav", match_loudness(trim_silence(audio, 24_000)))
    (VOICE / "reference.txt").write_text(chosen["text"] + "\n", encoding="ascii")


def training_record(run: RunFolder, checkpoint: str, weights: str) -> dict:
    """What was trained, how, for how long, and how its losses fell."""
    host, events = detect_host(), list(run.events())
    updates = {event["update"]: event for event in events if event["event"] == "update"}.values()  # as they count
    judged = {event["update"]: event for event in events if event["event"] == "evaluate"}
    frames = sum(event["frames"] for event in updates)
    return {
        "command": f"python {' '.join(sys.argv[:1])} build/corpus build/starter/run",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": {"device": host.device_name, "cores": torch.get_num_threads()},
        "versions": {"python": host.python, "torch": torch.__version__},
        "checkpoint": checkpoint, "weights": weights, "sha256": file_hash(VOICE / "model.safetensors"),
        "train": run.info["plan"]["train"], "parameters": run.info["plan"]["parameters"],
        "hours_of_audio_seen": round(frames / 93.75 / 3600, 2),
        "hours_of_training": round(sum(event["seconds"] for event in updates) / 3600, 2),
        "curve": [[u, round(e["loss_raw"], 4), round(e["loss_ema"], 4)] for u, e in sorted(judged.items())],
    }  # fmt: skip


if __name__ == "__main__":
    main()
