"""Preparing recordings: every vector gets its verdict, every row is accounted for, nothing is half-made."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import soundfile
import torch
from librivox import INSTALLED, lay_out_librivox, librivox_available

from f5kit import prepare
from f5kit.audio import log_mel, measure_levels, read_audio
from f5kit.errors import UserError
from f5kit.prepare import prepare_dataset

TEXT = "A short sentence to say."


pytestmark = pytest.mark.usefixtures("one_thread")  # short clips are no work to share


def voice(seconds: float = 2.0, rate: int = 24_000, level: float = 0.1, seed: int = 0) -> numpy.ndarray:
    """Tone and noise, loud from the first sample to the last, so that trimming takes nothing."""
    time = numpy.arange(round(seconds * rate)) / rate
    noise = numpy.random.default_rng(seed).standard_normal(len(time))
    return (level * (numpy.sin(2 * math.pi * 200 * time) + 0.2 * noise)).astype(numpy.float32)


def folder_with(path: Path, rows: list[str] | bytes, clips: int = 3) -> Path:
    """A folder of recordings wavs/a1.wav, wavs/a2.wav ... and a metadata.csv."""
    (path / "wavs").mkdir(parents=True)
    for number in range(1, clips + 1):
        soundfile.write(path / "wavs" / f"a{number}.wav", voice(seed=number), 24_000)
    content = rows if isinstance(rows, bytes) else "".join(f"{row}\n" for row in rows).encode()
    (path / "metadata.csv").write_bytes(content)
    return path


def prepared(source: Path, **options) -> tuple[list[dict], dict]:
    """The manifest and the report, after checking that they account for one another and for the files."""
    out = source.parent / f"{source.name}_prepared"
    dataset = prepare_dataset(source, out, progress=False, **options)
    rows, report = dataset.rows(), dataset.report
    statuses = [row["status"] for row in rows]
    assert report["seen"] == len(rows) == sum(report[name] for name in ("accepted", "repaired", "rejected"))
    for name in ("accepted", "repaired", "rejected"):
        assert report[name] == statuses.count(name)
    usable = [row for row in rows if row["status"] != "rejected"]
    assert sorted(os.listdir(out / "clips")) == sorted(Path(row["audio"]).name for row in usable)
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    for row in rows:
        assert (row["reasons"] == []) == (row["status"] == "accepted")
        if row["status"] == "rejected":
            assert row["audio"] is row["seconds"] is row["frames"] is row["split"] is None
    assert [p.name for p in source.parent.iterdir() if p.name.startswith(".")] == []
    return rows, report


# --- audio vectors --------------------------------------------------------------------------------


def wav(samples: numpy.ndarray, rate: int = 24_000, subtype: str = "PCM_16"):
    return lambda path: soundfile.write(path, samples, rate, subtype=subtype, format="WAV")


def raw(content: bytes):
    return lambda path: path.write_bytes(content)


def cut(writer, keep):
    def write(path):
        writer(path)
        content = path.read_bytes()
        path.write_bytes(content[: keep(len(content))])

    return write


def with_header_bytes(place: int, value: bytes):
    def write(path):
        wav(voice())(path)
        content = bytearray(path.read_bytes())
        content[place : place + len(value)] = value
        path.write_bytes(content)

    return write


def link(path):
    wav(voice())(path.with_suffix(".hidden"))
    path.symlink_to(path.with_suffix(".hidden").name)


def changed(index, value) -> numpy.ndarray:
    samples = voice()
    samples[index] = value
    return samples


MONO = voice()
# (name, how to write it, verdict, a word of the reason)
AUDIO = [
    ("good", wav(MONO), "accepted", None),
    ("zero_bytes", raw(b""), "rejected", "cannot be read"),
    ("header_of_30_bytes", cut(wav(MONO), lambda n: 30), "rejected", "cannot be read|holds no samples"),
    ("header_only", cut(wav(MONO), lambda n: 44), "rejected", "holds no samples|cut short"),
    ("one_sample", wav(MONO[:1]), "rejected", "silent|lasts"),
    ("truncated_to_half", cut(wav(MONO), lambda n: n // 2), "rejected", "holds 1.00 s of the 2.00 s"),
    ("size_of_a_pipe", with_header_bytes(40, b"\xff\xff\xff\xff"), "accepted", None),
    ("rate_0", with_header_bytes(24, b"\0\0\0\0"), "rejected", "cannot be read|sample rate"),
    ("rate_4000", wav(voice(rate=4000), 4000), "rejected", "sample rate of 4000 Hz"),
    ("rate_8000", wav(voice(rate=8000), 8000), "accepted", None),
    ("rate_44100", wav(voice(rate=44_100), 44_100), "accepted", None),
    ("u8", wav(MONO, subtype="PCM_U8"), "accepted", None),
    ("s24", wav(MONO, subtype="PCM_24"), "accepted", None),
    ("float", wav(MONO, subtype="FLOAT"), "accepted", None),
    ("nan", wav(changed(500, numpy.nan), subtype="FLOAT"), "rejected", "not finite"),
    ("inf", wav(changed(500, numpy.inf), subtype="FLOAT"), "rejected", "not finite"),
    ("peak_12", wav(MONO * 12 / abs(MONO).max(), subtype="FLOAT"), "repaired", "peak of 12.00 lowered"),
    ("silent", wav(0 * MONO), "rejected", "silent"),
    ("faint_hiss", wav(MONO * 1e-3, subtype="FLOAT"), "rejected", "silent"),
    ("clipped", wav(numpy.clip(MONO * 40, -1, 1)), "rejected", "clipped"),
    ("offset", wav(MONO + 0.2), "repaired", "DC offset of 0.200 removed"),
    ("stereo", wav(numpy.stack([MONO, 0.5 * MONO], 1)), "accepted", None),
    ("anti_phase", wav(numpy.stack([MONO, -MONO], 1)), "repaired", "opposite phase"),
    ("mp3_named_wav", lambda path: soundfile.write(path, MONO, 24_000, format="MP3"), "accepted", None),
    ("flac_named_wav", lambda path: soundfile.write(path, MONO, 24_000, format="FLAC"), "accepted", None),
    ("html_named_wav", raw(b"<!DOCTYPE html><html>404</html>" * 99), "rejected", "cannot be read"),
    ("pipe", os.mkfifo, "rejected", "is not a file"),
    ("link", link, "accepted", None),
    ("seconds_0.29", wav(voice(0.29)), "rejected", "lasts 0.29 s"),
    ("seconds_0.3", wav(voice(0.3)), "accepted", None),
    ("seconds_30", wav(voice(30.0)), "accepted", None),
    ("seconds_30.01", wav(voice(30.01)), "rejected", "lasts 30.01 s"),
    ("an_hour", wav(numpy.zeros(8000 * 3600, numpy.int16), 8000), "rejected", "lasts 3600"),
]  # fmt: skip


def test_every_audio_vector_gets_its_verdict(tmp_path):
    source = tmp_path / "recordings"
    source.mkdir()
    for name, write, _, _ in AUDIO:
        write(source / f"{name}.wav")
    text = {"seconds_0.3": "Yes."}
    (source / "metadata.csv").write_text("".join(f"{n}.wav|{text.get(n, TEXT)}\n" for n, *_ in AUDIO))
    rows, report = prepared(source)
    got = {row["id"]: row for row in rows}
    assert len(rows) == len(AUDIO)
    for name, _, verdict, reason in AUDIO:
        row = got[name]
        assert row["status"] == verdict, row
        if reason:
            assert any(re.search(reason, said) for said in row["reasons"]), row
        assert str(tmp_path) not in json.dumps(row)  # no path of this machine in a file that is shared
    # What is used is equally loud, 24 kHz, mono, 16 bit, and as long as it says.
    for row in rows:
        if row["status"] != "rejected":
            path = tmp_path / "recordings_prepared" / row["audio"]
            info = soundfile.info(str(path))
            assert (info.samplerate, info.channels, info.subtype) == (24_000, 1, "PCM_16")
            assert info.frames / 24_000 == pytest.approx(row["seconds"], abs=1e-4)
            assert row["frames"] == info.frames // 256 + 1
            assert measure_levels(read_audio(path), 24_000).rms_dbfs == pytest.approx(-23, abs=0.2)


# --- csv vectors ----------------------------------------------------------------------------------

GOOD = [f"a{n}|{TEXT}" for n in (1, 2, 3)]
# (name, metadata.csv, statuses of a1..a3, reasons of all other rows)
TABLES = [
    ("plain", GOOD, "aaa", []),
    ("byte_order_mark", b"\xef\xbb\xbf" + "\n".join(GOOD).encode(), "raa", []),
    ("utf16", "\n".join(GOOD).encode("utf-16"), "aaa", []),
    ("crlf", "\r\n".join(GOOD).encode(), "aaa", []),
    ("blank_lines", ["", *GOOD, "", "   "], "aaa", []),
    ("with_folder", [f"wavs/a1.wav|{TEXT}", f"./wavs/a2|{TEXT}", f"wavs\\a3.wav|{TEXT}"], "aaa", []),
    ("other_suffix", [f"a1.flac|{TEXT}", *GOOD[1:]], "aaa", []),
    ("third_column", [f"{row}|a short sentence" for row in GOOD], "aaa", []),
    ("header", ["file_name|text", *GOOD], "aaa", []),
    ("lone_quote", ['a1|He said "Stop and was gone.', *GOOD[1:]], "aaa", []),
    ("extra_column", [GOOD[0] + "|and more", *GOOD[1:]], "xaa", []),
    ("too_many_columns", [GOOD[0] + "|b|c|d", *GOOD[1:]], "xaa", []),
    ("wrong_delimiter", [f"a1,{TEXT}", *GOOD[1:]], "xaa", ["line 1: expected name|text, found 1 field;"]),
    ("missing_file", [*GOOD, f"a9|{TEXT}"], "aaa", ["line 4: there is no recording 'a9'"]),
    ("duplicate", [*GOOD, f"wavs/a2.wav|{TEXT}"], "aaa", ["line 4: wavs/a2.wav is named already in line 2"]),
    ("absolute", [*GOOD, f"/etc/passwd|{TEXT}"], "aaa", ["line 4: /etc/passwd points outside"]),
    ("drive", [*GOOD, f"C:\\a.wav|{TEXT}"], "aaa", ["points outside"]),
    ("parent", [*GOOD, f"../secret.wav|{TEXT}"], "aaa", ["points outside"]),
    ("empty_text", ["a1|", *GOOD[1:]], "xaa", []),
    ("white_text", ["a1| \t\u00a0", *GOOD[1:]], "xaa", []),
    ("no_letters", ["a1|... --- !", *GOOD[1:]], "xaa", []),
    ("long_line", ["a1|" + "word " * 2_000_000, *GOOD[1:]], "xaa", []),
    ("not_utf8", b"a1|caf\xe9 au lait\n" + "\n".join(GOOD[1:]).encode(), "xaa", []),
    ("control_characters", ["a1|A short\x00 sentence\x07 to say.", *GOOD[1:]], "raa", []),
    ("emoji_and_formula", ["a1|Well done \U0001f600!", f"a2|=SUM(A1:A2) {TEXT}", GOOD[2]], "aaa", []),
    ("unnamed_recording", GOOD[:2], "aax", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "table", "expected", "others"), TABLES, ids=[row[0] for row in TABLES])
def test_every_row_of_a_table_is_accounted_for(tmp_path, name, table, expected, others):
    rows, report = prepared(folder_with(tmp_path / "in", table))
    letter = {"accepted": "a", "repaired": "r", "rejected": "x"}
    by_source = {row["source"]: row for row in rows if row["source"] and "-2" not in row["id"]}
    said = [reason for row in rows for reason in row["reasons"]]
    assert "".join(letter[by_source[f"wavs/a{n}.wav"]["status"]] for n in (1, 2, 3)) == expected, said
    rest = [row for row in rows if row not in by_source.values()]
    assert len(rows) == 3 + len(rest) and all(row["status"] == "rejected" for row in rest)
    assert len(rest) == len(others), said
    for reason in others:
        assert any(reason in sentence for row in rest for sentence in row["reasons"]), said


def test_texts_are_kept_as_people_wrote_them(tmp_path):
    lines = ['a1|He said, "Stop."', "a2|It cost $5 in  1905\u2014or so.", "a3|Caf\u0065\u0301 \u4f60\u597d"]
    rows, _ = prepared(folder_with(tmp_path / "in", lines))
    assert [row["text"] for row in rows] == [
        'He said, "Stop."', "It cost $5 in 1905\u2014or so.", "Caf\u00e9 \u4f60\u597d",
    ]  # fmt: skip


def test_more_text_than_anybody_speaks_is_rejected(tmp_path):
    rows, _ = prepared(folder_with(tmp_path / "in", [f"a1|{TEXT * 3}", f"a2|{TEXT}", f"a3|{TEXT}"]))
    assert rows[0]["status"] == "rejected"
    assert "metadata.csv line 1: 36 characters a second" in rows[0]["reasons"][0]


def test_names_composed_and_decomposed_are_the_same(tmp_path):
    source = folder_with(tmp_path / "in", [f"caf\u00e9|{TEXT}", *GOOD[1:]])
    (source / "wavs" / "a1.wav").rename(source / "wavs" / "cafe\u0301.wav")
    rows, _ = prepared(source)
    assert [row["status"] for row in rows] == ["accepted"] * 3


# --- pairs, folders, the demo ---------------------------------------------------------------------


def test_pairs_are_found_at_any_depth_and_odd_ones_are_told(tmp_path):
    source = tmp_path / "in"
    for name in ("a", "deep/er/a", "b", ".hidden/c"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(source / f"{name}.wav", voice(), 24_000)
    (source / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (source / "deep/er/a.txt").write_text("A short\nsentence.\r\n")
    (source / "notes.txt").write_text("Not a transcript.")
    rows, _ = prepared(source)
    assert {row["id"]: (row["status"], row["text"]) for row in rows} == {
        "a": ("repaired", TEXT),
        "b": ("rejected", ""),
        "deep_er_a": ("accepted", "A short sentence."),
        "notes": ("rejected", ""),
    }
    assert "b.wav has no transcript; write it to b.txt" in rows[1]["reasons"]


def test_names_that_would_collide_stay_apart(tmp_path):
    source = tmp_path / "in"
    for name in ("x/y", "x_y", "X_Y"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(source / f"{name}.wav", voice(), 24_000)
        (source / f"{name}.txt").write_text(TEXT)
    rows, _ = prepared(source)
    assert len({row["id"].casefold() for row in rows}) == 3 and {r["status"] for r in rows} == {"accepted"}


def says(tmp_path: Path, source, out="out") -> str:
    with pytest.raises(UserError) as caught:
        prepare_dataset(source, tmp_path / out, progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_what_the_user_can_mend_is_one_sentence(tmp_path):
    source = tmp_path / "in"
    assert f"there is no folder {source}" in says(tmp_path, source)
    source.mkdir()
    assert "holds no recordings; put .wav" in says(tmp_path, source)
    soundfile.write(source / "a.wav", voice(), 24_000)
    assert "has 1 recordings and no transcripts; add metadata.csv" in says(tmp_path, source)
    (source / "list.tsv").write_text("a\tb")
    assert "list.tsv must become metadata.csv" in says(tmp_path, source)
    (source / "metadata.csv").write_text("\n\n")
    assert "metadata.csv is empty; write one line name|text" in says(tmp_path, source)
    (source / "metadata.csv").write_text("a, hello\n")
    assert "metadata.csv line 1: expected name|text, found 1 field" in says(tmp_path, source)
    (source / "metadata.csv").write_text("a|\n")
    assert "none of the 1 clips" in (said := says(tmp_path, source)) and "line 1: the text is empty" in said
    (source / "metadata.csv").write_text(f"a|{TEXT}\n")
    assert "overlap" in says(tmp_path, source, out="in/prepared")
    assert "is a file; unpack it" in says(tmp_path, source / "metadata.csv")
    with pytest.raises(UserError, match="min_seconds is 5"):
        prepare_dataset(source, tmp_path / "out", min_seconds=5, max_seconds=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "is no dataset of f5kit" in says(tmp_path, source, out="mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_the_demo_voice_is_clean_and_small(tmp_path):
    dataset = prepare_dataset("demo", tmp_path / "demo", progress=False)
    report = dataset.report
    assert 44 <= report["seen"] == report["accepted"] <= 48
    assert 3.5 <= dataset.seconds / 60 <= 4.5
    assert len(dataset.heldout) == 3
    assert all(2 <= clip.seconds <= 10 for clip in dataset.clips)
    assert all(" " <= c <= "~" for clip in dataset.clips for c in clip.text)
    assert any(c.isdigit() for clip in dataset.clips for c in clip.text)
    assert report["characters_per_second"]["outliers"] == {}
    folder = Path(prepare.__file__).with_name("demo_voice")
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 6 * 2**20


def test_the_report_tells_what_the_clips_hold(tmp_path):
    dataset = prepare_dataset("demo", tmp_path / "demo", progress=False)
    report = dataset.report
    assert sum(report["duration_histogram"]["clips"]) == report["seen"]
    assert report["characters"]["e"] == sum(clip.text.count("e") for clip in dataset.clips)
    assert report["durations"]["max"] == max(clip.seconds for clip in dataset.clips)
    mels = torch.cat([log_mel(read_audio(dataset.path(clip))) for clip in dataset.train]).double()
    assert report["mel_mean"] == pytest.approx(float(mels.mean()), abs=1e-5)
    assert report["mel_std"] == pytest.approx(float(mels.std(correction=0)), abs=1e-5)
    assert (dataset.folder / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(
    not librivox_available(), reason=f"{INSTALLED} is absent: apt-get install pocketsphinx-testdata"
)
def test_real_human_speech_is_prepared(tmp_path):
    texts = lay_out_librivox(tmp_path / "in")
    rows, report = prepared(tmp_path / "in")
    assert len(texts) == 5 and report["accepted"] + report["repaired"] == 5
    # Four of the five carry a constant offset of a tenth of their level or more.
    assert {reason[:9] for row in rows for reason in row["reasons"]} == {"DC offset"}
    assert {row["id"]: row["text"] for row in rows} == texts
    assert [row["split"] for row in rows].count("heldout") == 1
    assert 15 < report["seconds"] < 60 and report["characters_per_second"]["outliers"] == {}


# --- the split ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clips", "held"), [(1, 0), (2, 1), (19, 1), (20, 3), (59, 3), (200, 10), (1000, 32)]
)
def test_about_a_twentieth_is_held_out(clips, held):
    def split(order, seed):
        rows = [{"id": f"c{n}", "status": "accepted", "split": None} for n in order]
        prepare._split(rows, seed, None)
        return {row["id"] for row in rows if row["split"] == "heldout"}

    chosen = split(range(clips), 0)
    assert len(chosen) == held
    assert split(reversed(range(clips)), 0) == chosen
    assert clips < 20 or split(range(clips), 1) != chosen


# --- once, whole, or not at all -------------------------------------------------------------------


def test_prepared_again_it_is_opened_and_changed_it_is_made_anew(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", GOOD)
    first = prepare_dataset(source, tmp_path / "out", progress=False)
    made = (tmp_path / "out" / "manifest.jsonl").stat().st_mtime_ns
    again = prepare_dataset(source, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "manifest.jsonl").stat().st_mtime_ns == made
    assert again.manifest_hash == first.manifest_hash
    # The same sound and text give the same manifest anywhere.
    assert (
        prepare_dataset(source, tmp_path / "elsewhere", progress=False).manifest_hash == first.manifest_hash
    )
    (source / "metadata.csv").write_text("\n".join([f"a1|{TEXT} Yes.", *GOOD[1:]]))
    changed = prepare_dataset(source, tmp_path / "out", progress=False)
    assert changed.manifest_hash != first.manifest_hash
    assert prepare_dataset(source, tmp_path / "out", max_seconds=9, progress=False).info != changed.info
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "in", "out"]


def test_a_dataset_that_lost_a_clip_is_made_again(tmp_path):
    source = folder_with(tmp_path / "in", GOOD)
    dataset = prepare_dataset(source, tmp_path / "out", progress=False)
    dataset.path(dataset.clips[0]).unlink()
    assert len(prepare_dataset(source, tmp_path / "out", progress=False).clips) == 3


def test_an_exception_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", GOOD)
    real, calls = prepare.write_audio, []

    def fails_at_the_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return real(*args)

    monkeypatch.setattr(prepare, "write_audio", fails_at_the_second)
    with pytest.raises(OSError, match="No space"):
        prepare_dataset(source, tmp_path / "out", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_failed_preparation_leaves_the_old_dataset(tmp_path, monkeypatch):
    source = folder_with(tmp_path / "in", GOOD)
    first = prepare_dataset(source, tmp_path / "out", progress=False)
    monkeypatch.setattr(prepare, "log_mel", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(source, tmp_path / "out", seed=1, progress=False)
    assert prepare.load_dataset(tmp_path / "out").manifest_hash == first.manifest_hash


def test_a_kill_on_the_way_leaves_no_half_folder_and_its_remains_go(tmp_path):
    source = folder_with(tmp_path / "in", [f"a{n}|{TEXT}" for n in range(1, 41)], clips=40)
    code = f"""
import time
from f5kit import prepare
real = prepare.write_audio
def slowly(*args):
    time.sleep(0.1)
    return real(*args)
prepare.write_audio = slowly
prepare.prepare_dataset({str(source)!r}, {str(tmp_path / "out")!r}, progress=False)
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial-*/clips/a*.flac")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out").exists() and len(list(tmp_path.glob(".out.partial-*"))) == 1
    assert len(prepare_dataset(source, tmp_path / "out", progress=False).clips) == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_as_many_clips_are_held_out_as_asked(tmp_path):
    source = folder_with(tmp_path / "source", [f"a{n}|{TEXT}" for n in range(1, 5)], clips=4)
    for asked, held in ((None, 1), (2, 2), (0, 0), (9, 3)):
        rows, report = prepared(source, heldout=asked)
        assert report["heldout"] == held == sum(row["split"] == "heldout" for row in rows)
    with pytest.raises(UserError, match="heldout is -1"):
        prepare_dataset(source, tmp_path / "out", heldout=-1)
