"""How fast recordings become a dataset, how fast its cache is read, and what memory that takes.

    .venv-parity/bin/python benchmarks/prepare.py              writes benchmarks/results/prepare.json
    python benchmarks/prepare.py --hours 0.1 --rows 300 1000   a small form; without f5-tts, without upstream's side

road    one recording of 44.1 kHz speech (the demo voice again and again, each time at another level), from the file to
        clips, manifest, report and feature cache, by two processes and without a recogniser: each clip gets a text that
        is counted out. Memory is the most that all processes together held above what they hold with the libraries
        imported.
cache   clips read from that cache at random, on one thread.
rows    the same preparation of 1,000, 10,000 and 100,000 short recordings in a Parquet file, in processes of their own;
        the slope is the memory that each further clip takes.

Upstream prepares the same clips (prepare_csv_wavs.py: lengths, pinyin, raw.arrow, no look at the sound) and reads them
as its trainer does, by CustomDataset, which decodes and computes the mel of every clip each time. torchaudio.load needs
torchcodec, which this project does without, so soundfile reads for it.
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
import tempfile
import threading
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATE = 44_100


class CountedText:
    """Stands where a recogniser would: every clip gets words of its own."""

    name = "none"

    def __call__(self, audio, rate, language):
        return f"Clip of {len(audio)} samples.", "en"


def speech_file(path: Path, hours: float) -> None:
    """The demo voice at 44.1 kHz, with pauses, for so many hours."""
    import numpy
    import soundfile
    import soxr

    dice, clips = numpy.random.default_rng(0), []
    for clip in sorted((ROOT / "f5kit" / "demo_voice" / "wavs").glob("*.flac")):
        samples, rate = soundfile.read(clip, dtype="float32")
        clips.append(soxr.resample(samples, rate, RATE))
    with soundfile.SoundFile(str(path), "w", RATE, 1, subtype="PCM_16") as file:
        while file.tell() < hours * 3600 * RATE:
            file.write(clips[dice.integers(len(clips))] * dice.uniform(0.4, 1.0))
            file.write(dice.normal(0, 1e-4, round(dice.uniform(0.3, 1.2) * RATE)))


def short_recordings(path: Path, rows: int) -> None:
    """Sounds of 0.4 s at 8 kHz, no two alike, in one Parquet file, written piece by piece."""
    import io

    import numpy
    import pyarrow
    import pyarrow.parquet
    import soundfile

    dice, writer = numpy.random.default_rng(1), None
    for start in range(0, rows, 500):
        batch = []
        for n in range(start, min(rows, start + 500)):
            sound = io.BytesIO()
            soundfile.write(sound, dice.normal(0, 0.1, 3200), 8000, format="WAV")
            batch.append({"audio": {"bytes": sound.getvalue(), "path": f"{n}.wav"}, "text": f"Row {n}."})
        table = pyarrow.Table.from_pylist(batch)
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


# ---- What a child process does


def measure(source: str, out: str, jobs: int, text: str) -> dict:
    """Prepare in this process and its workers. Seconds, and the most memory above that of the libraries."""
    import psutil
    from loky import get_reusable_executor

    from f5kit import cleaning
    from f5kit.prepare import prepare_dataset

    def held() -> int:
        me = psutil.Process()
        return sum(p.memory_info().rss for p in (me, *me.children(recursive=True)) if p.is_running())

    import pyloudnorm  # noqa: F401  (what the workers import while they work)

    if jobs > 1:  # workers with everything imported
        pool = get_reusable_executor(max_workers=jobs, timeout=300)
        list(pool.map(_import_all, range(4 * jobs)))
    _import_all(0)
    libraries, most, done = held(), [0], threading.Event()

    def watch():
        while not done.wait(0.02):
            try:
                most[0] = max(most[0], held())
            except psutil.Error:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    dataset = prepare_dataset(source, out, jobs=jobs, transcriber=CountedText() if text else None, progress=False)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    row = {"seconds": seconds, "clips": len(dataset.clips), "clip_seconds": dataset.seconds, "jobs": jobs}
    row |= {"recorded_seconds": dataset.report["recorded_seconds"], "libraries_mb": libraries / 1e6}
    assert cleaning.Options().mel == dataset.mel_config
    return row | {"memory_above_libraries_mb": (most[0] - libraries) / 1e6}


def _import_all(_) -> None:
    import numpy
    import pyloudnorm
    import torch

    import f5kit.cleaning  # noqa: F401
    from f5kit.audio import log_mel
    from f5kit.slicing import load_vad

    load_vad()
    pyloudnorm.Meter(24_000).integrated_loudness(numpy.random.default_rng(0).normal(size=24_000))
    log_mel(torch.zeros(24_000))


def read_cache(folder: str, reads: int) -> dict:
    """Clips a second from the cache, at random, on one thread; every value is looked at."""
    import torch

    from f5kit.data import load_dataset

    torch.set_num_threads(1)
    dataset = load_dataset(folder)
    dice, rates = random.Random(0), []
    for _ in range(5):
        chosen = dice.choices(dataset.clips, k=reads)
        started = time.perf_counter()
        for clip in chosen:
            dataset.mel(clip)
        rates.append(reads / (time.perf_counter() - started))
    frames = statistics.mean(clip.frames for clip in dataset.clips)
    return {"clips_per_second": rates, "median": statistics.median(rates), "frames_per_clip": frames}


def upstream(folder: str, work: str, reads: int) -> dict:
    """Upstream's preparation of the same clips, and its reading of them."""
    import soundfile
    import torch

    from f5kit.audio import import_torchaudio
    from f5kit.data import load_dataset

    torchaudio = import_torchaudio()
    torchaudio.load = lambda path: (lambda x, r: (torch.from_numpy(x.T), r))(
        *soundfile.read(path, dtype="float32", always_2d=True)
    )
    from datasets import Dataset
    from f5_tts.model.dataset import CustomDataset
    from f5_tts.train.datasets import prepare_csv_wavs as theirs

    source, out = Path(work) / "theirs", Path(work) / "theirs_out"
    (source / "wavs").mkdir(parents=True)
    dataset, lines = load_dataset(folder), ["audio_file|text"]
    for clip in dataset.clips:
        audio, rate = soundfile.read(dataset.path(clip), dtype="int16")
        soundfile.write(source / "wavs" / f"{clip.id}.wav", audio, rate)
        lines.append(f"{source}/wavs/{clip.id}.wav|{clip.text}")
    (source / "metadata.csv").write_text("\n".join(lines))
    started = time.perf_counter()
    rows, durations, vocab = theirs.prepare_csv_wavs_dir(source / "metadata.csv", num_workers=2)
    theirs.save_prepped_dataset(out, rows, durations, vocab, is_finetune=False)
    seconds = time.perf_counter() - started
    torch.set_num_threads(1)
    read = CustomDataset(Dataset.from_file(str(out / "raw.arrow")), durations=durations)
    dice, started = random.Random(0), time.perf_counter()
    for _ in range(reads):
        read[dice.randrange(len(rows))]
    rate = reads / (time.perf_counter() - started)
    return {"seconds": seconds, "clips": len(rows), "read_clips_per_second": rate}


# ---- The whole


def child(*arguments) -> dict:
    """A function of this file in a process of its own, on two cores."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def about() -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version()}
    for name in ("f5kit", "torch", "soxr", "soundfile", "silero-vad", "onnxruntime", "f5-tts"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"command": " ".join(["python", "benchmarks/prepare.py", *sys.argv[1:]]), "commit": commit,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "versions": versions,
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores; load {load} when it began"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prepare.json")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        name, *arguments = json.loads(options.child)
        print(json.dumps(globals()[name](*arguments)))
        return
    result = {**about(), "hours": options.hours, "road": [], "rows": []}
    with tempfile.TemporaryDirectory() as work:
        talk = Path(work) / "talk" / "talk.wav"
        talk.parent.mkdir()
        speech_file(talk, options.hours)
        for repeat in range(options.repeats):
            row = child("measure", str(talk), f"{work}/ours{repeat}", options.jobs, "counted")
            result["road"].append({**row, "times_real_time": row["recorded_seconds"] / row["seconds"]})
            print("road", result["road"][-1], flush=True)
            if "f5-tts" in result["versions"]:
                theirs = child("upstream", f"{work}/ours{repeat}", f"{work}/theirs{repeat}", min(2_000, options.reads))
                result.setdefault("upstream", []).append(theirs)
                print("upstream", theirs, flush=True)
        result["cache"] = child("read_cache", f"{work}/ours0", options.reads)
        print("cache", result["cache"], flush=True)
        for rows in options.rows:
            (Path(work) / f"rows{rows}").mkdir()
            short_recordings(Path(work) / f"rows{rows}" / "rows.parquet", rows)
            result["rows"].append(child("measure", f"{work}/rows{rows}", f"{work}/out{rows}", options.jobs, ""))
            print("rows", result["rows"][-1], flush=True)
    if len(options.rows) > 1:
        first, last = result["rows"][0], result["rows"][-1]
        grown = (last["memory_above_libraries_mb"] - first["memory_above_libraries_mb"]) * 1e6
        result["bytes_per_further_clip"] = grown / (last["clips"] - first["clips"])
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
