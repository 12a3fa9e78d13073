"""What tests of preparation share: sounds without pauses, folders of recordings, and the accounting of every row."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy
import soundfile

from f5kit.prepare import prepare_dataset

TEXT = "A short sentence to say."
VERDICTS = ("accepted", "repaired", "rejected")


def voice(seconds: float = 2.0, rate: int = 24_000, level: float = 0.1, seed: int = 0) -> numpy.ndarray:
    """Tone and noise, loud from the first sample to the last, so that trimming takes nothing."""
    time = numpy.arange(round(seconds * rate)) / rate
    noise = numpy.random.default_rng(seed).standard_normal(len(time))
    return (level * (numpy.sin(2 * math.pi * 200 * time) + 0.2 * noise)).astype(numpy.float32)


def folder_with(path: Path, rows: list[str] | bytes, clips: int = 3, table: str = "metadata.csv") -> Path:
    """A folder of recordings wavs/a1.wav, wavs/a2.wav ... and a table."""
    (path / "wavs").mkdir(parents=True)
    for number in range(1, clips + 1):
        soundfile.write(path / "wavs" / f"a{number}.wav", voice(seed=number), 24_000)
    content = rows if isinstance(rows, bytes) else "".join(f"{row}\n" for row in rows).encode()
    (path / table).write_bytes(content)
    return path


def accounted(totals: dict) -> dict[str, int]:
    """The figures of a line on faults: verdicts, and what was seen and got none, which would be dropped in silence."""
    counts = {name: totals[name] for name in ("seen", *VERDICTS)}
    return {"silent": counts["seen"] - sum(counts[name] for name in VERDICTS), **counts}


def prepared(source: Path, **options) -> tuple[list[dict], dict]:
    """The report's rows and the summary, after checking that they account for one another and for the files."""
    out = source.parent / f"{source.name}_prepared"
    dataset = prepare_dataset(source, out, progress=False, **options)
    rows, report = dataset.rows(), dataset.report
    statuses = [row["status"] for row in rows]
    assert report["seen"] == len(rows) == sum(report[name] for name in VERDICTS)
    for name in VERDICTS:
        assert report[name] == statuses.count(name)
    assert sorted(os.listdir(out / "clips")) == sorted(Path(row["audio"]).name for row in rows if row["audio"])
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    assert [clip.id for clip in dataset.clips] == [row["id"] for row in rows if row["status"] != "rejected"]
    for row in rows:
        assert (row["reasons"] == []) == (row["status"] == "accepted")
        assert (row["split"] is None) == (row["status"] == "rejected")
    assert [p.name for p in source.parent.iterdir() if p.name.startswith(".")] == []
    return rows, report
