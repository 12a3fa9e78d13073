"""Everything that has to be measured on a GPU, in one call and one file: for a card that is lent for some minutes.

    python benchmarks/gpu.py                       writes results/gpu_<card>.json
    python benchmarks/gpu.py --dry-run             on a CPU with a tiny model: does it run? writes to --out alone

Parts, each kept as soon as it is done, so that a card taken away costs the rest only: the self-check (f5kit.selfcheck),
memory and speed of each preset, precision and way of training beside the prediction, the plan with its trial and how
long it took, and, where the package f5-tts is installed, updates beside upstream's (train_step.py).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from f5kit.config import PRESETS
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.preflight import described_voice
from f5kit.selfcheck import WAYS, check_ways, selfcheck
from f5kit.weights import write_json

RESULTS = Path(__file__).resolve().parent / "results"


def predictions(host, presets: list[str], precisions: list[str], minutes: float) -> list[dict]:
    """Every preset, precision and way, beside what was predicted, as far as the minutes last."""
    rows, deadline = [], time.monotonic() + 60 * minutes
    for name in presets:
        found, left_out = check_ways(PRESETS[name], host, WAYS, deadline, precisions)
        rows += [{"preset": name, **row} for row in found] + [{"preset": name, "left_out": way} for way in left_out]
    return rows


def planned(host, preset: str) -> dict:
    """The plan for an hour of voice, tried on this machine, beside the one that was only counted."""
    voice = described_voice(60 if host.device == "cuda" else 1, PRESETS[preset].normaliser, seconds=10.0)
    told = {}
    for kind, measure in (("counted", False), ("tried", True)):
        begun = time.monotonic()
        plan = plan_run(preset, voice, host, measure=measure)
        told[kind] = {**plan.to_dict(), "seconds_to_plan": time.monotonic() - begun}
    return told


def beside_upstream(device: str, dry: bool) -> list[dict] | str:
    """train_step.py's rows; or why there are none."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import train_step

    if dry:
        small = PRESETS["F5TTS_v1_Small"].replace(name="quick", dim=128, depth=2, heads=2)
        return [train_step.compare("quick", small, 600, 1, device)]
    return [train_step.compare(n, PRESETS[n], 14_000, 5, device) for n in ("F5TTS_v1_Small", "F5TTS_v1_Base")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--minutes", type=float, default=4.0, help="for the table of predictions")
    parser.add_argument("--out", help="another file than results/gpu_<card>.json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    host = detect_host()
    if host.device != "cuda" and not given.dry_run:
        raise SystemExit(f"this measures a CUDA GPU and there is none ({host.device_reason}): try it with --dry-run")
    dry = given.dry_run
    if dry:
        host = replace(host, device="cpu", memory_gb=min(host.memory_gb, 4.0))
    name = re.sub(r"\W+", "_", host.device_name).lower()
    out = Path(given.out or (RESULTS / f"gpu_{name}.json" if not dry else "gpu_dry_run.json"))
    presets = ["tiny"] if dry else ["F5TTS_v1_Base", "F5TTS_v1_Small", "E2TTS_Base"]
    precisions = ["fp32"] if dry else ["bf16" if host.precision.value == "bf16" else "fp16", "fp32"]
    parts = {
        "selfcheck": lambda: selfcheck(presets[0], None, minutes=0.5 if dry else 2.0),
        "plan": lambda: planned(host, presets[0]),
        "beside_upstream": lambda: beside_upstream(host.device, dry),
        "predictions": lambda: predictions(host, presets, precisions, 0.5 if dry else given.minutes),
    }
    record = {"command": "python benchmarks/gpu.py " + " ".join(sys.argv[1:]), "host": str(host), "dry_run": dry,
              "torch": torch.__version__, "seconds": {}}  # fmt: skip
    for part, run in parts.items():
        begun = time.monotonic()
        try:
            record[part] = run()
        except Exception as error:  # a part that fails must not cost the others
            record[part] = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        record["seconds"][part] = round(time.monotonic() - begun, 1)
        write_json(out, record)
        print(f"{part}: {record['seconds'][part]} s" + (" FAILED" * ("failed" in record[part])), flush=True)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
