"""Recordings to a dataset folder: every input is heard, judged and accounted for, and the folder appears whole.

Nothing is dropped silently: every recording, every line of a table and every piece of a long recording becomes a row of
report.jsonl and is accepted (used as it is), repaired (used, a fault was mended) or rejected (not used), with reasons.
Resampling, trimming and levelling are no repair: every clip gets them.

While it works, everything lies in a hidden folder beside the dataset, with a journal. It continues there when it was
interrupted; at the end that folder takes the dataset's place by one rename. What has not changed is not done again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from f5kit.audio import read_audio
from f5kit.cleaning import Options, Result, Task, jobs_for, spread
from f5kit.data import DEMO_CONSENT, FORMAT, Dataset, load_dataset, read_clips, write_consent
from f5kit.durations import duration_errors
from f5kit.errors import UserError
from f5kit.features import FeatureWriter, shard_path, write_index
from f5kit.ingest import Recording, open_source
from f5kit.journal import Journal, unpacked
from f5kit.lock import RunLock
from f5kit.summary import draw_summary, summarise
from f5kit.text import Tokenizer, normalise
from f5kit.transcribe import load_transcriber
from f5kit.verdicts import TextOptions, judge, split
from f5kit.workplace import (
    check_place,
    dropped,
    link,
    partial_folder,
    prepared_from,
    put_in_place,
    read_json,
    work_folder,
)

_SPANS_IN_A_TASK = 16
_SPARE = 64 << 20  # bytes of the feature cache that may be of no use
_COMMIT_EVERY = 0.2  # seconds of work that a kill may cost


def prepare_dataset(
    source: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    seed: int = 0,
    heldout: int | None = None,
    language: str | None = None,
    speaker: str | None = None,
    min_seconds: float = 0.3,
    max_seconds: float = 30.0,
    slices: tuple[float, float] = (3.0, 12.0),
    loudness: float | None = -23.0,
    trim: bool = True,
    transcriber=None,
    check_texts: bool = False,
    tokenizer: Tokenizer | None = None,
    normaliser: str = "basic",
    audio_root: str | Path | None = None,
    jobs: int | None = None,
    consent: str = "",
    progress: bool = True,
) -> Dataset:
    """Make the dataset folder `out` from recordings and open it.

    source: a folder, at any depth: recordings with a table (metadata.csv and its like, in LJSpeech's or upstream's
    form, JSON lines, raw.arrow) or with a text file beside each; a zip or tar of such a folder; a table; one recording;
    hf://owner/name?split=train, a data set of the Hub; or "demo", the bundled voice.

    Clips of `min_seconds` to `max_seconds` are used, as 24 kHz mono, without the silence at their ends (`trim`), at
    `loudness` LUFS (None leaves it). A recording without a text is cut at pauses into `slices` seconds when it is
    longer, and written down by `transcriber`: a Whisper model by name or folder ("auto": the best for this machine),
    what `f5kit.load_transcriber` gives, or any function of a clip, its rate and a language to a text and a language.
    `check_texts` has it hear the others too, and flags what differs.
    `tokenizer` is the model's that will be trained, to tell letters it lacks; `speaker` names the speaker, or "folder"
    takes the first folder's name. `heldout` clips are kept from the training, as far as whole recordings and texts that
    nobody else says allow (None: 5 %, at least 3 and at most 32); `seed` chooses them. Work is spread over `jobs`
    processes. `consent` says who is speaking and what they have agreed to; it travels into checkpoints and cards, and
    without it nothing can be published.

    Run again it works on what is new or changed, and continues where it was stopped. Clips listed in the folder's
    decisions.json, which the report's table writes, are taken out. Raises UserError when no clip is usable.
    """
    out = Path(out)
    place = Path(__file__).with_name("demo_voice") if str(source) == "demo" else source
    check_place(place, out)
    shorter = min(1.0, max_seconds / slices[1])
    options = Options(min_seconds, max_seconds, (shorter * slices[0], shorter * slices[1]), loudness, trim)
    normalise("", normaliser)
    if heldout is not None and heldout < 0:
        raise UserError(f"heldout is {heldout}; choose how many clips to hold out, 0 or more")
    texts = TextOptions(language, normaliser, tokenizer, dropped(out))
    if check_texts and transcriber is None:
        raise UserError("check_texts is on and there is no transcriber; give one, from load_transcriber()")
    with RunLock(partial_folder(out), "prepared") as lock:
        folder = work_folder(out)
        journal, finished = Journal(folder / "journal.sqlite"), False
        try:
            root, recordings = open_source(place, folder / "scratch", audio_root, untold=transcriber is not None)
            _hear_all(journal, place, recordings, root, folder, out, options, speaker, jobs, progress)
            if transcriber is not None:
                _transcribe(journal, folder, transcriber, language, check_texts, options, progress)
            state = _state(journal, options, texts, seed, heldout, name or out.name)
            if prepared_from(out) == state:
                with suppress(UserError):  # a folder that lost a clip is made again
                    write_consent(out, consent)
                    dataset = load_dataset(out)
                    finished = True
                    return dataset
            judge(journal, texts)
            _refuse_empty(journal, source)
            how = split(journal, seed, heldout)
            journal.commit()
            info = {"name": name or out.name, "source": str(source), "source_hash": state, "seed": seed, "split": how}
            _write(journal, folder, info, options, texts)
            usual = DEMO_CONSENT if str(source) == "demo" else read_json(out / "dataset.json").get("consent", "")
            write_consent(folder, consent or usual)
            journal.close()
            lock.path.unlink()
            put_in_place(folder, out)
            finished = True
            return load_dataset(out)
        finally:
            with suppress(Exception):
                journal.close()
            shutil.rmtree(folder / "scratch", ignore_errors=True)
            if finished or not (folder / "clips").is_dir() or not any((folder / "clips").iterdir()):
                shutil.rmtree(folder, ignore_errors=True)


# ---- Hearing


def _hear_all(
    journal: Journal, source, recordings, root: Path, folder: Path, out: Path, options: Options, speaker, jobs, progress
) -> None:
    """Bring the journal up to date with the source: hear what is new or changed, forget what is gone."""
    from tqdm.auto import tqdm

    more: deque[Task] = deque()  # spans of recordings that are laid out
    open_tasks, left = [0], {}  # tasks that are not done; {recording: its tasks of spans}
    bar = tqdm(desc="prepare", unit="recording", disable=not progress)

    def tasks():
        for recording in recordings:
            while more:
                yield more.popleft()
            bar.update()
            if task := _task(journal, _with_speaker(recording, speaker), root, folder, out, options):
                open_tasks[0] += 1
                yield task
        while open_tasks[0]:
            yield more.popleft() if more else None

    writer = FeatureWriter(folder / "features" / options.mel.kind, options.mel.n_mels)
    try:
        committed = time.monotonic()
        for result in spread(tasks(), folder, options, jobs_for(_size(source), jobs)):
            open_tasks[0] -= 1
            _store(journal, result, writer)
            if result.layout is not None:
                spans = list(enumerate(result.spans))
                parts = [tuple(spans[i : i + _SPANS_IN_A_TASK]) for i in range(0, len(spans), _SPANS_IN_A_TASK)]
                shown = journal.value("SELECT source FROM inputs WHERE id = ?", result.id)
                more.extend(Task(result.id, b"", shown, False, "", result.layout, part) for part in parts)
                open_tasks[0] += len(parts)
                left[result.id] = [len(parts), result.layout.path, result.hash]
            elif result.id in left:
                left[result.id][0] -= 1
                if left[result.id][0] == 0:
                    _, path, digest = left.pop(result.id)
                    path.unlink(missing_ok=True)
                    journal.base.execute("UPDATE inputs SET done = 1, hash = ? WHERE id = ?", (digest, result.id))
            if time.monotonic() - committed > _COMMIT_EVERY:
                writer.flush()
                journal.commit()
                committed = time.monotonic()
    finally:
        bar.close()
        writer.close()
        journal.commit()
    gone = "SELECT id FROM inputs WHERE run < ?"
    journal.base.execute(f"DELETE FROM clips WHERE input IN ({gone})", (journal.run,))
    journal.base.execute("DELETE FROM inputs WHERE run < ?", (journal.run,))
    journal.commit()


def _size(source) -> int | None:
    """Bytes of a source; None where nobody knows."""
    path = Path(source)
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.is_file() and path.suffix.lower() not in (".csv", ".jsonl", ".arrow") else None


def _with_speaker(recording: Recording, speaker: str | None) -> Recording:
    if recording.speaker or not speaker:
        return recording
    if speaker == "folder":
        head, _, tail = (recording.source or "").partition("/")
        return replace(recording, speaker=head if tail else None)
    return replace(recording, speaker=speaker)


def _task(journal: Journal, recording: Recording, root: Path, folder: Path, out: Path, options: Options) -> Task | None:
    """What there is to do for a recording; None where all is known."""
    whole, untouched = recording.text is not None, False
    if recording.sound is not None:
        source, known = recording.sound, journal.note(recording, len(recording.sound), 0)
    else:
        source = root / recording.source if recording.source else None
        stat = source.stat() if source and not recording.problem and source.is_file() else None
        size, mtime = (stat.st_size, stat.st_mtime_ns) if stat else (-1, 0)
        query = "SELECT 1 FROM inputs WHERE id = ? AND size = ? AND mtime = ? AND size >= 0"
        untouched = journal.value(query, recording.id, size, mtime)
        known = journal.note(recording, size, mtime)
    if recording.problem:
        return None
    if known and not (known.startswith(options.mark(whole)) and _all_there(journal, recording.id, folder, out)):
        known = ""
    if known and untouched:
        return None
    if not known:
        journal.forget(recording.id)
    journal.base.execute("UPDATE inputs SET done = 0 WHERE id = ?", (recording.id,))
    return Task(recording.id, source, recording.source, whole, known)


def _all_there(journal: Journal, identity: str, folder: Path, out: Path) -> bool:
    """Whether every clip of an input has its file; those of the finished dataset are linked to."""
    for (name,) in journal.all("SELECT id FROM clips WHERE input = ? AND seconds IS NOT NULL", identity):
        path = folder / "clips" / f"{name}.flac"
        if not path.exists():
            try:
                link(out / "clips" / path.name, path)
            except FileNotFoundError:
                return False
    return True


def _store(journal: Journal, result: Result, writer: FeatureWriter) -> None:
    if not result.same:
        if result.hash:
            journal.forget(result.id)
            journal.base.execute("UPDATE inputs SET seconds = ? WHERE id = ?", (result.seconds, result.id))
        for heard in result.clips:
            row = {name: value for name, value in vars(heard).items() if name != "mel"}
            if heard.mel is not None:
                row["shard"], row["first"], row["frames"] = writer.add(heard.mel)
            journal.add(result.id, row)
    if result.hash and result.layout is None:
        journal.base.execute("UPDATE inputs SET done = 1, hash = ? WHERE id = ?", (result.hash, result.id))


def _transcribe(
    journal: Journal, folder: Path, transcriber, language, check: bool, options: Options, progress: bool
) -> None:
    """Have the clips without a text written down, and with `check` the others too; what was heard before is kept."""
    from tqdm.auto import tqdm

    told = isinstance(transcriber, str | Path)
    name = f"whisper:{transcriber}" if told else getattr(transcriber, "name", None)
    name = name or getattr(transcriber, "__qualname__", type(transcriber).__name__)
    wanted = "clips.seconds IS NOT NULL" + ("" if check else " AND i.text IS NULL") + " AND (asr IS NULL"
    wanted += " OR json_extract(asr, '$.by') != ?)" if name != "whisper:auto" else " AND ? != '')"
    total = journal.value(f"SELECT count(*) FROM clips JOIN inputs i ON i.id = input WHERE {wanted}", name)
    if not total:
        return
    if told:  # a model is loaded when there is something to do for it
        transcriber = load_transcriber(transcriber, language)
        print(f"transcribing with {transcriber}")
    rate, clips = options.mel.sample_rate, folder / "clips"
    if language is None and hasattr(transcriber, "detect_language"):
        some = islice(journal.pages(f"{wanted} AND i.language IS NULL", name), 8)
        sounds = [read_audio(clips / f"{row['id']}.flac", rate) for row in some]
        language = transcriber.detect_language(sounds, rate) if sounds else None
    by = getattr(transcriber, "name", name)
    for row in tqdm(journal.pages(wanted, name), total=total, desc="transcribe", unit="clip", disable=not progress):
        audio = read_audio(clips / f"{row['id']}.flac", rate)
        text, heard_language = transcriber(audio, rate, row["input_language"] or language)
        journal.set(row, asr={"text": text, "language": heard_language, "by": by})
        journal.commit()


# ---- The folder


def _state(journal: Journal, options: Options, texts: TextOptions, *about) -> str:
    """sha256 of all inputs and of all that they are judged by. Times and paths of this machine are no part of it."""
    judged = texts.language, texts.normaliser, texts.tokenizer and texts.tokenizer.hash, sorted(texts.drop)
    digest = hashlib.sha256(json.dumps([sorted(asdict(options).items()), judged, about], default=str).encode())
    for row in journal.all(
        "SELECT id, source, place, text, speaker, language, problem, mended, hash FROM inputs ORDER BY id"
    ):
        digest.update(json.dumps(tuple(row)).encode())
    for row in journal.all("SELECT id, asr FROM clips WHERE asr IS NOT NULL ORDER BY id"):
        digest.update(json.dumps(tuple(row)).encode())
    return digest.hexdigest()


def _refuse_empty(journal: Journal, source) -> None:
    if not journal.value("SELECT count(*) FROM clips WHERE status != 'rejected'"):
        n = journal.value("SELECT count(*) FROM clips")
        first = journal.value("SELECT reasons FROM clips ORDER BY rowid LIMIT 1")
        raise UserError(
            f"none of the {n} clips in {source} can be used; {json.loads(first)[0] if first else 'it is empty'}"
        )


def _write(journal: Journal, folder: Path, info: dict, options: Options, texts: TextOptions) -> None:
    """manifest.jsonl, report.jsonl, report.json, report.png, vocab.txt, the index of the features, dataset.json."""
    letters: set[str] = set()
    with _lines(folder / "manifest.jsonl") as manifest, _lines(folder / "report.jsonl") as report:
        for row in journal.all(
            "SELECT clips.*, i.source, i.place, i.speaker FROM clips JOIN inputs i ON i.id = input ORDER BY clips.id"
        ):
            row = unpacked(row)
            row["audio"] = f"clips/{row['id']}.flac" if row["seconds"] else None
            used = row["status"] != "rejected"
            keys = "id audio text seconds frames split speaker language source start stop sha256".split()
            if used:
                letters.update(normalise(row["text"], texts.normaliser))
                levels = {key: row["measures"][key] for key in ("rms_dbfs", "snr")}
                manifest.write(_line({key: row[key] for key in keys} | levels))
            measures = {k: v for k, v in row["measures"].items() if not k.startswith("mel_")}
            verdict = {key: row[key] for key in ("id", "status", "reasons", "flags")}
            measures |= {} if row["cer"] is None else {"cer": row["cer"]}
            report.write(
                _line(verdict | {key: row[key] for key in keys[1:]} | {"place": row["place"], "measures": measures})
            )
    _forget_files(journal, folder)
    manifest_hash = hashlib.sha256((folder / "manifest.jsonl").read_bytes()).hexdigest()
    tokenizer = texts.tokenizer or Tokenizer([" ", *sorted(letters - {" "})], "char", texts.normaliser)
    tokenizer.save(folder / "vocab.txt")
    _index_features(journal, folder / "features" / options.mel.kind, manifest_hash, options)
    summary = summarise(journal, texts, info["split"])
    summary["duration_errors"] = duration_errors(read_clips(folder))
    _write_json(folder / "report.json", summary)
    draw_summary(folder / "report.png", summary)
    info = {"format": FORMAT, **info, "sample_rate": options.mel.sample_rate, "mel": asdict(options.mel)}
    info |= {
        "clips": summary["accepted"] + summary["repaired"],
        "seconds": summary["seconds"],
        "language": texts.language,
    }
    info |= {"normaliser": tokenizer.normaliser, "tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.hash}
    _write_json(folder / "dataset.json", info)


def _index_features(journal: Journal, folder: Path, manifest_hash: str, options: Options) -> None:
    """Write the index of the mels. Where files are gone, or hold mostly clips that are gone, there is none: then the
    cache is made anew when it is needed."""
    used = "FROM clips WHERE status != 'rejected'"
    live = journal.value(f"SELECT total(frames) {used}") * options.mel.n_mels * 2
    shards = [row[0] for row in journal.all(f"SELECT DISTINCT shard {used}")]
    if sum(path.stat().st_size for path in folder.glob("*.f16")) > 2 * live + _SPARE:
        shutil.rmtree(folder)
    elif all(shard_path(folder, shard).is_file() for shard in shards):
        places = journal.all(f"SELECT shard, first, frames {used} ORDER BY id")
        write_index(folder, manifest_hash, (tuple(row) for row in places))


def _lines(path: Path):
    return open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n")


def _line(row: dict) -> str:
    line = json.dumps(row, ensure_ascii=False)
    for mark in "\x85\u2028\u2029":  # line ends to some readers
        line = line.replace(mark, f"\\u{ord(mark):04x}")
    return line + "\n"


def _write_json(path: Path, value: dict) -> None:
    path.write_bytes((json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "backslashreplace"))


def _forget_files(journal: Journal, folder: Path) -> None:
    """Remove clips of inputs that are gone, and of those that could not be used."""
    for path in os.scandir(folder / "clips"):
        name = path.name.removesuffix(".flac")
        if not journal.value("SELECT 1 FROM clips WHERE id = ? AND seconds IS NOT NULL", name):
            os.unlink(path.path)
