"""Recordings to a dataset folder: find the clips, judge and clean each one, write them, report.

Nothing is dropped silently: every recording and every line of metadata becomes a row of manifest.jsonl and is
accepted (used as it is), repaired (used, a fault was mended) or rejected (not used), with the reasons.
Resampling, trimming and levelling are no repair: every clip gets them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import statistics
import unicodedata
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from f5kit.audio import (
    Levels,
    decode,
    log_mel,
    match_loudness,
    measure_levels,
    read_audio,
    resample,
    to_mono,
    trim_silence,
    write_audio,
)
from f5kit.config import MelConfig
from f5kit.data import DEMO_CONSENT, Dataset, load_dataset, write_consent
from f5kit.errors import UserError
from f5kit.ingest import Recording, find_recordings, list_files
from f5kit.text import normalise

FORMAT = 1
MAX_CHARACTERS_PER_SECOND = 25.0  # nobody speaks so fast: the text belongs to another recording


@dataclass(frozen=True)
class _Options:
    """All that the prepared clips depend on, beside the source."""

    name: str
    seed: int
    min_seconds: float
    max_seconds: float
    loudness: float | None
    trim: bool
    heldout: int | None = None
    mel: MelConfig = field(default_factory=MelConfig)
    format: int = FORMAT

    def __post_init__(self):
        if not 0.1 <= self.min_seconds < self.max_seconds:
            raise UserError(f"min_seconds is {self.min_seconds:g}; choose 0.1 or more, below {self.max_seconds:g}")
        if self.heldout is not None and self.heldout < 0:
            raise UserError(f"heldout is {self.heldout}; choose how many clips to hold out, 0 or more")


def prepare_dataset(
    source: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    seed: int = 0,
    min_seconds: float = 0.3,
    max_seconds: float = 30.0,
    loudness: float | None = -23.0,
    trim: bool = True,
    heldout: int | None = None,
    consent: str = "",
    progress: bool = True,
) -> Dataset:
    """Make the dataset folder `out` from recordings and open it.

    source: a folder with a metadata.csv of lines `name|text` (as LJSpeech: no header, audio in the folder or
    in wavs/, a third column is not used); or with a text file beside each recording, at any depth; or "demo",
    the bundled voice. Clips of `min_seconds` to `max_seconds` are used, brought to 24 kHz mono, without the
    silence at their ends (`trim`), at `loudness` dBFS (None leaves it). `seed` chooses the held-out clips, and
    `heldout` says how many they are (None: 5 %, at least 3 and at most 32). `consent` says who is speaking and what
    they have agreed to; it travels into checkpoints and cards, and without it nothing can be published.

    The folder appears whole, by one rename. Prepared again from the same source it is opened at once; from a
    changed one it is made anew in the old one's place. Raises UserError when no clip is usable.
    """
    folder, out = _source_folder(source), Path(out)
    _check_place(folder, out)
    files = list_files(folder)
    recordings = find_recordings(folder, files)
    options = _Options(name or out.name, seed, min_seconds, max_seconds, loudness, trim, heldout)
    source_hash = _hash_source(folder, files, options)
    if _prepared_from(out) == source_hash:
        with suppress(UserError):  # a folder that lost a clip is made again
            write_consent(out, consent)
            return load_dataset(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        (partial / "clips").mkdir(parents=True)
        rows, heard = _make_clips(folder, recordings, partial, options, progress)
        _split(rows, seed, heldout)
        _write_manifest(partial, rows, options, str(source), source_hash)
        write_consent(partial, consent or (DEMO_CONSENT if str(source) == "demo" else ""))
        _write_report(partial, rows, heard)
        _put_in_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return load_dataset(out)


def _source_folder(source: str | Path) -> Path:
    if str(source) == "demo":
        return Path(__file__).with_name("demo_voice")
    folder = Path(source)
    if not folder.exists():
        raise UserError(f"there is no folder {folder}; give the folder that holds your recordings")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; unpack it and give the folder that holds the recordings")
    return folder


def _check_place(folder: Path, out: Path) -> None:
    here, there = folder.resolve(), out.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"{out} and {folder} overlap; choose a place apart from the recordings")
    if out.exists() and not (out / "dataset.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is no dataset of f5kit; choose another folder, or remove it")


def _hash_source(folder: Path, files: list[str], options: _Options) -> str:
    """sha256 of names, sizes and contents of the source, and of the options."""
    digest = hashlib.sha256(json.dumps(asdict(options), sort_keys=True).encode())
    for name in files:
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1  # a pipe or a dangling link is not read
        digest.update(f"{name}\n{size}\n".encode("utf-8", "surrogateescape"))
        if size > 0:
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _prepared_from(out: Path) -> str | None:
    """The source_hash of a folder that was prepared before."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((out / "dataset.json").read_text(encoding="utf-8"))["source_hash"]
    return None


# One clip


@dataclass(frozen=True)
class _Heard:
    """What the report says of one usable clip: levels as recorded, log-mel sums as written."""

    levels: Levels
    count: int
    total: float
    squares: float


def _make_clips(
    folder: Path, recordings: list[Recording], partial: Path, options: _Options, progress: bool
) -> tuple[list[dict], dict[str, _Heard]]:
    """Judge and write every clip. Returns the manifest's rows, sorted by id, and what was heard, by id."""
    from tqdm.auto import tqdm

    rows, heard = [], {}
    for recording in tqdm(recordings, desc="prepare", unit="clip", disable=not progress):
        text, mended = clean_text(recording.text)
        row = {"id": recording.id, "audio": None, "text": text}
        row |= dict.fromkeys(("seconds", "frames", "rms_dbfs", "noise_dbfs", "split"))
        try:
            if recording.problem:
                raise UserError(recording.problem)
            check_text(text, recording.place)
            audio, faults, levels = clean_clip(folder / recording.source, options)
            check_pace(text, len(audio) / options.mel.sample_rate, recording.place)
            row["audio"] = f"clips/{recording.id}.flac"
            written = write_audio(partial / row["audio"], audio, options.mel.sample_rate)
            mel = log_mel(read_audio(written, options.mel.sample_rate), options.mel).double()  # n d
            row |= {"seconds": round(len(audio) / options.mel.sample_rate, 4), "frames": len(mel)}
            row |= {name: round(getattr(levels, name), 2) for name in ("rms_dbfs", "noise_dbfs")}
            reasons = [*recording.mended, *mended, *faults]
            row |= {"status": "repaired" if reasons else "accepted", "reasons": reasons}
            heard[recording.id] = _Heard(levels, mel.numel(), float(mel.sum()), float(mel.square().sum()))
        except UserError as error:
            row |= {"status": "rejected", "reasons": [str(error).replace(f"{folder}{os.sep}", "")]}
        rows.append({**row, "source": recording.source})
    if not heard:
        raise UserError(f"none of the {len(rows)} clips in {folder} can be used; {rows[0]['reasons'][0]}")
    return sorted(rows, key=lambda row: row["id"]), heard


def clean_text(text: str) -> tuple[str, list[str]]:
    """NFC, white space joined, control characters removed; and what was mended."""
    text = unicodedata.normalize("NFC", text)
    kept = "".join(c for c in text if c.isspace() or (unicodedata.category(c) != "Cc" and c != "\ufeff"))
    return " ".join(kept.split()), ["control characters removed from the text"] if kept != text else []


def check_text(text: str, place: str) -> None:
    """Raises UserError, naming the place, for a text that nobody can read aloud."""
    if not text:
        raise UserError(f"{place}: the text is empty; write what is spoken")
    if not any(c.isalnum() for c in text):
        raise UserError(f"{place}: the text {text[:20]!r} has no letter and no digit; write what is spoken")


def check_pace(text: str, seconds: float, place: str) -> None:
    """Raises UserError for more text than can be spoken in that time (far below one letter a mel frame)."""
    pace = len(normalise(text)) / seconds
    if pace > MAX_CHARACTERS_PER_SECOND:
        raise UserError(
            f"{place}: {pace:.0f} characters a second, and speech has up to {MAX_CHARACTERS_PER_SECOND:g}; "
            "the text belongs to another recording, or the recording is cut"
        )


def clean_clip(path: Path, options: _Options) -> tuple[Tensor, list[str], Levels]:
    """A recording as a clip (nw,) at 24 kHz, the faults that were mended, and its levels as recorded.

    Raises UserError for one that cannot be used.
    """
    audio, rate = decode(path, max_seconds=max(600.0, 2 * options.max_seconds))
    if rate < 8000:
        raise UserError(f"{path} has a sample rate of {rate} Hz; speech needs 8000 Hz or more")
    mono, cancelled = to_mono(audio)
    levels = measure_levels(mono, rate)
    if levels.rms_dbfs < -60:
        raise UserError(f"{path} is silent ({levels.rms_dbfs:.0f} dBFS); record it again")
    if levels.clipped > 0.01:
        raise UserError(f"{path} is clipped for {levels.clipped:.0%} of its time; record it again, less loud")
    faults = ["channels in opposite phase: the left one is used"] if cancelled else []
    offset = float(mono.mean())
    if abs(offset) > 0.1 * 10 ** (levels.rms_dbfs / 20):
        mono, faults = mono - offset, [*faults, f"DC offset of {offset:.3f} removed"]
    if levels.peak > 1:
        mono, faults = mono / levels.peak, [*faults, f"peak of {levels.peak:.2f} lowered to full scale"]
    clip = resample(mono, rate, options.mel.sample_rate)
    if options.trim:
        clip = trim_silence(clip, options.mel.sample_rate)
    if options.loudness is not None:
        clip = match_loudness(clip, options.loudness)
    seconds = len(clip) / options.mel.sample_rate
    if not options.min_seconds <= seconds <= options.max_seconds:
        remedy = "cut it at its pauses" if seconds > options.max_seconds else "join it with its neighbour"
        span = f"{options.min_seconds:g} to {options.max_seconds:g} s"
        raise UserError(f"{path} lasts {seconds:.2f} s, and clips of {span} are used; {remedy}")
    return clip, faults, levels


# The folder


def _split(rows: list[dict], seed: int, heldout: int | None) -> None:
    """Hold out `heldout` of the usable clips, but leave one to train on at least.

    None: about 5 %, at least 3 and at most 32; one where there are fewer than 20. Chosen by a hash of seed and id, so
    that neither the order nor the machine matters.
    """
    usable = [row for row in rows if row["status"] != "rejected"]
    usable.sort(key=lambda row: hashlib.sha256(f"{seed}/{row['id']}".encode()).digest())
    few = 1 if len(usable) < 20 else min(32, max(3, round(0.05 * len(usable))))
    held = min(few if heldout is None else heldout, len(usable) - 1)
    for place, row in enumerate(usable):
        row["split"] = "heldout" if place < held else "train"


def _write_manifest(folder: Path, rows: list[dict], options: _Options, source: str, source_hash: str) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for mark in "\x85\u2028\u2029":  # line ends to some readers
        lines = lines.replace(mark, f"\\u{ord(mark):04x}")
    (folder / "manifest.jsonl").write_bytes(lines.encode("utf-8", "backslashreplace"))
    usable = [row for row in rows if row["status"] != "rejected"]
    info = {"format": FORMAT, "name": options.name, "source": source, "source_hash": source_hash}
    info |= {"sample_rate": options.mel.sample_rate, "clips": len(usable)}
    info |= {"seconds": round(sum(row["seconds"] for row in usable), 3), "mel": asdict(options.mel)}
    _write_json(folder / "dataset.json", {**info, "seed": options.seed})


def _write_json(path: Path, value: dict) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished folder to `out`; what was prepared there before makes way and is removed."""
    old = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    if out.exists():
        os.replace(out, old)
    os.replace(partial, out)
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    """Remove what processes that were killed left beside `out`."""
    for path in out.parent.iterdir():
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(?:partial|replaced)-(\d+)", path.name)
        if match and not _is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    """Whether another process has that number. In doubt it has."""
    if process == os.getpid():  # numbers come again, in containers at once
        return False
    if os.name == "posix":  # elsewhere the question would end the process
        try:
            os.kill(process, 0)
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
    return True


# The report


def _report(rows: list[dict], heard: dict[str, _Heard]) -> dict:
    """What report.json holds: levels of the recordings as they came, all else of the clips as written."""
    usable = [row for row in rows if row["status"] != "rejected"]
    seconds = [row["seconds"] for row in usable]
    edges = list(range(int(max(seconds)) + 2))  # whole seconds
    train = [heard[row["id"]] for row in usable if row["split"] == "train"]
    count = sum(clip.count for clip in train)
    mean = sum(clip.total for clip in train) / count
    status = Counter(row["status"] for row in rows)
    report = {"seen": len(rows)} | {name: status[name] for name in ("accepted", "repaired", "rejected")}
    report |= {"train": len(train), "heldout": len(usable) - len(train), "seconds": round(sum(seconds), 3)}
    report["durations"] = _spread(seconds)
    report["duration_histogram"] = {
        "edges": edges,
        "clips": [sum(e <= s < e + 1 for s in seconds) for e in edges[:-1]],
    }
    report["text_lengths"] = _spread([len(row["text"]) for row in usable])
    report["characters"] = dict(Counter(c for row in usable for c in row["text"]).most_common())
    report["levels"] = {
        name: _spread([getattr(heard[row["id"]].levels, name) for row in usable])
        for name in ("peak", "rms_dbfs", "noise_dbfs", "clipped", "leading", "trailing")
    }
    report["characters_per_second"] = _paces(usable)
    report["mel_mean"] = round(mean, 6)
    report["mel_std"] = round((sum(clip.squares for clip in train) / count - mean**2) ** 0.5, 6)
    return report


def _spread(values: list[float]) -> dict[str, float]:
    """The least, the middle and the greatest."""
    low, high = round(min(values), 4), round(max(values), 4)
    return {"min": low, "median": round(statistics.median(values), 4), "max": high}


def _paces(rows: list[dict]) -> dict:
    """Characters a second, and the clips far from the rest: there text and sound most often disagree."""
    paces = {row["id"]: len(row["text"]) / row["seconds"] for row in rows}
    middle = statistics.median(paces.values())
    usual = 1.4826 * statistics.median(abs(pace - middle) for pace in paces.values())  # outliers can't move it
    limit = max(4 * usual, 0.25 * middle)
    far = {name: round(pace, 2) for name, pace in paces.items() if abs(pace - middle) > limit}
    return {**_spread(list(paces.values())), "outliers": far}


def _write_report(folder: Path, rows: list[dict], heard: dict[str, _Heard]) -> None:
    report = _report(rows, heard)
    _write_json(folder / "report.json", report)
    _draw_report(folder / "report.png", rows, report, heard)


def _draw_report(path: Path, rows: list[dict], report: dict, heard: dict[str, _Heard]) -> None:
    """Durations, characters and levels side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: pyplot and a notebook's backend stay as they are
    durations, characters, levels = figure.subplots(1, 3)
    durations.hist([row["seconds"] for row in rows if row["status"] != "rejected"], bins=30)
    durations.set(title=f"{report['seconds'] / 60:.1f} minutes", xlabel="seconds", ylabel="clips")
    most = list(report["characters"].items())[:40]
    characters.bar(range(len(most)), [count for _, count in most])
    characters.set_xticks(range(len(most)), ["\u2423" if c == " " else c for c, _ in most], fontsize=7)
    characters.set(title=f"{len(report['characters'])} characters", ylabel="times", yscale="log")
    levels.hist([clip.levels.rms_dbfs for clip in heard.values()], bins=30)
    levels.set(title="levels as recorded", xlabel="dB below full scale", ylabel="clips")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the figure's font does not have every script
        figure.savefig(path, dpi=110)
