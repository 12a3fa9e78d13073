"""The README's tables of measurements, made from the records in results/.

    python benchmarks/tables.py

prints them; tests/test_readme.py holds the README to them.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = {
    "word errors": "wer", "over the recordings'": "wer_ratio", "wins among decoys": "decoys",
    "speaker similarity": "similarity",
}  # fmt: skip


def judged(name: str, systems: dict[str, str]) -> str:
    """A row for each system of a judge's record, {its name there: what the README calls it}, with 95 % intervals."""
    summary = _record(name)["summary"]
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for system, called in systems.items():
        lines.append(f"| {called} | {' | '.join(_cell(summary[system][key]) for key in COLUMNS.values())} |")
    return "\n".join(lines)


def _cell(figure: dict | None) -> str:
    if figure is None:
        return ""
    low, high = ("?" if figure[end] is None else f"{figure[end]:.2f}" for end in ("low", "high"))
    return f"{figure['value']:.2f} ({low} to {high})"


def memory(name: str, preset: str) -> str:
    """Frames that fit in a pass by card, for each way of training of a preset, below the rule of thumb."""
    record = _record(name)
    cards = list(record["settings"]["reported_gb"])
    lines = [f"| {preset}, padded frames in a pass | {' | '.join(f'{card} GB' for card in cards)} |"]
    lines.append("|---" * (len(cards) + 1) + "|")
    lines.append(f"| rule of thumb, settings unknown | {' | '.join(_frames(record['seed'].get(c)) for c in cards)} |")
    for row in record["rows"]:
        if row["preset"] == preset:
            lines.append(f"| {_way(row)} | {' | '.join(_frames(row['frames'][card]) for card in cards)} |")
    return "\n".join(lines)


def _frames(count: int | None) -> str:
    return "" if count is None else f"{count:,}" if count else "none"


def _way(row: dict) -> str:
    """A way of training in words."""
    words = [row["precision"], {"adamw": "AdamW", "adamw8bit": "8-bit AdamW"}[row["optimizer"]]]
    words += [f"LoRA of rank {row['lora_rank']}"] * bool(row["lora_rank"])
    words += ["average off the GPU"] * row["ema_offload"]
    return ", ".join(words + [f"{row['checkpointing']} recomputing"] * (row["checkpointing"] != "none"))


def faults(name: str) -> str:
    """What both trainers made of the same faults."""
    record = _record(name)
    rows = {
        "killed while saving: the newest checkpoint could not be loaded": ("F1", "unloadable", "kills"),
        "a bit of the checkpoint flipped: loaded without a word": ("F3", "silent", "flips"),
        "stopped and resumed: a clip not once in each epoch": ("F4", "clips_not_once_an_epoch", "stops"),
    }
    lines = ["| | f5kit | upstream |", "|---|---|---|"]
    for words, (case, bad, of) in rows.items():
        counts = (f"{record[system][case][bad]} of {record[system][case][of]}" for system in ("f5kit", "upstream"))
        lines.append(f"| {words} | {' | '.join(counts)} |")
    return "\n".join(lines)


def updates(name: str) -> str:
    """Real frames a second in training updates, ours and upstream's, and the ratios with the lowest and highest."""
    columns = ("frames a second", "upstream in fp32, its default", "upstream in bf16", "f5kit in bf16",
               "over its default", "over its bf16")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in _record(name)["rows"]:
        speeds = [f"{row['frames_per_second'][way]:,.0f}" for way in ("upstream fp32", "upstream bf16", "f5kit bf16")]
        ratios = (row["ratios"][f"f5kit bf16 to upstream {precision}"] for precision in ("fp32", "bf16"))
        shown = [f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in ratios]
        lines.append(f"| {row['preset']} | {' | '.join(speeds + shown)} |")
    return "\n".join(lines)


def speaking(name: str) -> str:
    """Seconds that upstream's pipeline and ours take for the same speech, and the ratio, by structure and steps."""
    rows = _record(name)["rows"]
    steps = sorted({row["steps"] for row in rows})
    lines = [f"| | {' | '.join(f'{count} steps' for count in steps)} |", "|---" * (len(steps) + 1) + "|"]
    for model, seconds in dict.fromkeys((row["model"], row["seconds"]) for row in rows):
        cells = {
            row["steps"]: f"{row['upstream']:.0f} s to {row['ours']:.0f} s: **{row['ratio']:.2f}**"
            for row in rows if (row["model"], row["seconds"]) == (model, seconds)
        }  # fmt: skip
        lines.append(f"| {model}, {seconds} s | {' | '.join(cells[count] for count in steps)} |")
    return "\n".join(lines)


def serving(name: str) -> str:
    """Two servers under the same callers: the medians of their rounds."""
    medians = _record(name)["beside_upstream"]["medians"]
    rows = {
        "requests a second": ("requests_per_second", "{:.2f}"),
        "seconds of sound made in a second": ("audio_seconds_per_second", "{:.2f}"),
        "seconds to the first sound, median": ("first_byte_p50", "{:.0f}"),
        "seconds to the first sound, 95 %": ("first_byte_p95", "{:.0f}"),
    }
    lines = ["| | f5kit | upstream |", "|---|---|---|"]
    for words, (key, form) in rows.items():
        lines.append(f"| {words} | {' | '.join(form.format(medians[who][key]) for who in ('f5kit', 'upstream'))} |")
    return "\n".join(lines)


def _record(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def tables() -> list[str]:
    """Every table, as markdown."""
    controls = {"another speaker's reference": "with another speaker's reference", "shuffled texts": "texts shuffled"}
    ends = {"recordings": "recordings", "copy synthesis": "recordings through the vocoder"}
    starter = ends | {"voice": "**starter voice**"} | controls
    demo = ends | {"before": "starter voice, before the finetune", "voice": "**after the finetune**"} | controls
    return [
        judged("judge_starter.json", starter), judged("judge_demo.json", demo), faults("upstream_faults.json"),
        memory("memory_table.json", "F5TTS_v1_Base"), updates("train_step.json"), speaking("speak.json"),
        serving("serve.json"),
    ]  # fmt: skip


if __name__ == "__main__":
    print("\n\n".join(tables()))
