"""Preparing recordings: every form of a source, every row accounted for, and who is held out."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import soundfile
import torch
from librivox import INSTALLED, lay_out_librivox, librivox_available
from preparing import TEXT, folder_with, prepared, voice

from f5kit import prepare
from f5kit.audio import log_mel, read_audio
from f5kit.checkpoint import export_model, find_preset, fresh_model, load_model
from f5kit.durations import duration_errors
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.journal import Journal
from f5kit.plan import plan_run
from f5kit.prepare import prepare_dataset
from f5kit.text import Tokenizer
from f5kit.verdicts import split

pytestmark = pytest.mark.usefixtures("one_thread")  # short clips are no work to share

GOOD = [f"a{n}|{TEXT}" for n in (1, 2, 3)]


# --- texts ----------------------------------------------------------------------------------------


def test_texts_are_kept_as_people_wrote_them(tmp_path):
    lines = ['a1|He said, "Stop."', "a2|It cost $5 in  1905\u2014or so.", "a3|Caf\u0065\u0301 \u4f60\u597d"]
    rows, _ = prepared(folder_with(tmp_path / "in", lines))
    assert [row["text"] for row in rows] == [
        'He said, "Stop."', "It cost $5 in 1905\u2014or so.", "Caf\u00e9 \u4f60\u597d",
    ]  # fmt: skip


def test_more_text_than_anybody_speaks_is_rejected(tmp_path):
    rows, _ = prepared(folder_with(tmp_path / "in", [f"a1|{TEXT * 3}", f"a2|{TEXT}", f"a3|{TEXT}"]))
    assert rows[0]["status"] == "rejected" and rows[0]["audio"]  # it was heard, and can be listened to
    assert "metadata.csv line 1: 36 characters a second" in rows[0]["reasons"][0]


def test_names_composed_and_decomposed_are_the_same(tmp_path):
    source = folder_with(tmp_path / "in", [f"caf\u00e9|{TEXT}", *GOOD[1:]])
    (source / "wavs" / "a1.wav").rename(source / "wavs" / "cafe\u0301.wav")
    rows, _ = prepared(source)
    assert [row["status"] for row in rows] == ["accepted"] * 3


# --- pairs, folders, the demo ---------------------------------------------------------------------


def test_pairs_are_found_at_any_depth_and_odd_ones_are_told(tmp_path):
    source = tmp_path / "in"
    for seed, name in enumerate(("a", "deep/er/a", "b", ".hidden/c")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(source / f"{name}.wav", voice(seed=seed), 24_000)
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
    assert "b.wav has no transcript; write it to b.txt, or have it transcribed" in rows[1]["reasons"]


def test_names_that_would_collide_stay_apart(tmp_path):
    source = tmp_path / "in"
    for seed, name in enumerate(("x/y", "x_y", "X_Y")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(source / f"{name}.wav", voice(seed=seed), 24_000)
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
    for name in ("list.tsv", "other.csv"):
        (source / name).write_text("a\tb")
    assert "has several tables, list.tsv, other.csv; give the one" in says(tmp_path, source)
    (source / "metadata.csv").write_text("\n\n")
    assert "metadata.csv is empty; write one line name|text" in says(tmp_path, source)
    (source / "metadata.csv").write_text("hello\n")
    assert "metadata.csv line 1: expected name|text, found 1 field" in says(tmp_path, source)
    (source / "metadata.csv").write_text("a|\n")
    assert "none of the 1 clips" in (said := says(tmp_path, source)) and "line 1: the text is empty" in said
    (source / "metadata.csv").write_text(f"a|{TEXT}\n")
    assert "overlap" in says(tmp_path, source, out="in/prepared")
    (tmp_path / "voice.docx").write_text("hello")
    assert "voice.docx is no folder, archive, table or recording" in says(tmp_path, tmp_path / "voice.docx")
    (source / "metadata.csv").write_text(f"a|{TEXT}\n")
    with pytest.raises(UserError, match="check_texts is on and there is no transcriber"):
        prepare_dataset(source, tmp_path / "out", check_texts=True)
    with pytest.raises(UserError, match="slices are 9 to 3 s"):
        prepare_dataset(source, tmp_path / "out", slices=(9, 3))
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
    cached = torch.cat([dataset.mel(clip) for clip in dataset.train])
    assert float((cached - mels).abs().max()) < 0.005  # half precision
    assert report["duration_errors"] == duration_errors(dataset.clips)
    assert (dataset.folder / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not librivox_available(), reason=f"{INSTALLED} is absent: apt-get install pocketsphinx-testdata")
def test_real_human_speech_is_prepared(tmp_path):
    texts = lay_out_librivox(tmp_path / "in")
    rows, report = prepared(tmp_path / "in")
    assert len(texts) == 5 and report["accepted"] + report["repaired"] == 5
    # Four of the five carry a constant offset of a tenth of their level or more.
    assert {reason[:9] for row in rows for reason in row["reasons"]} == {"DC offset"}
    assert {row["id"]: row["text"] for row in rows} == texts
    assert [row["split"] for row in rows].count("heldout") == 1
    assert 15 < report["seconds"] < 60 and report["characters_per_second"]["outliers"] == {}


def test_one_normaliser_checks_trains_and_speaks(tmp_path):
    """It is recorded in the dataset and in a checkpoint, and both read a number as the same letters."""
    lines = [f"a{n}|Tôi có {n}21 con mèo." for n in (1, 2, 3)]
    reading = "basic+numbers:vi+lower"
    dataset = prepare_dataset(folder_with(tmp_path / "in", lines), tmp_path / "out", normaliser=reading, progress=False)
    assert dataset.info["normaliser"] == reading and dataset.clips[0].text == "Tôi có 121 con mèo."
    assert not any("digits" in row["flags"] for row in dataset.rows())
    tokenizer = Tokenizer.load(dataset.folder / "vocab.txt", dataset.info["tokenizer"], reading)
    assert tokenizer.hash == dataset.info["tokenizer_hash"]
    config = find_preset("tiny").replace(vocab_size=len(tokenizer.vocab))
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=2)
    assert "looked at them as basic+numbers:vi+lower" in str(plan)
    model = fresh_model(config, tokenizer)
    export_model(model, tmp_path / "voice", torch.float32)
    speaking = load_model(tmp_path / "voice").tokenizer
    assert (speaking.normaliser, speaking.hash) == (reading, tokenizer.hash)
    batch = dataset.batch(dataset.clips[:1], model.tokenizer)
    assert batch.text[0].tolist() == speaking.encode("tôi có một trăm hai mươi mốt con mèo.")


# --- the split ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clips", "held"), [(1, 0), (2, 1), (19, 1), (20, 3), (59, 3), (200, 10), (1000, 32)])
def test_about_a_twentieth_is_held_out(tmp_path, clips, held):
    def chosen(order, seed):
        rows = [{"input": f"c{n}", "part": 0, "same": f"t{n}"} for n in order]
        return split_of(tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite", rows, seed)

    first = chosen(range(clips), 0)
    assert len(first) == held
    assert chosen(reversed(range(clips)), 0) == first
    assert clips < 20 or chosen(range(clips), 1) != first


def split_of(path: Path, rows: list[dict], seed: int = 0) -> set[tuple[str, int]]:
    """(input, part) of the held-out clips among these."""
    journal = Journal(path)
    for row in rows:
        values = {"id": f"{row['input']}_{row['part']}", "seconds": 5.0, "status": "accepted"}
        journal.add(row["input"], {**values, "part": row["part"], "same": row["same"]})
    split(journal, seed)
    held = journal.all("SELECT input, part FROM clips WHERE split = 'heldout'")
    return {(row["input"], row["part"]) for row in held}


def test_no_held_out_text_is_trained_on(tmp_path):
    rows = [{"input": f"c{n}", "part": 0, "same": f"t{n // 3 if n < 90 else n}"} for n in range(100)]
    for seed in range(5):
        held = split_of(tmp_path / f"{seed}.sqlite", rows, seed)
        assert len(held) == 5 and all(int(name[1:]) >= 90 for name, _ in held)


def test_whole_recordings_are_held_out_where_there_are_many(tmp_path):
    rows = [{"input": f"r{n % 20}", "part": n // 20, "same": f"t{n}"} for n in range(400)]
    held = split_of(tmp_path / "many.sqlite", rows)
    assert len(held) == 20 and len({name for name, _ in held}) == 1


def test_the_end_of_one_long_recording_is_held_out(tmp_path):
    rows = [{"input": "talk", "part": n, "same": f"t{n}"} for n in range(100)]
    assert split_of(tmp_path / "one.sqlite", rows) == {("talk", n) for n in range(95, 100)}


def test_as_many_clips_are_held_out_as_asked(tmp_path):
    source = folder_with(tmp_path / "source", [f"a{n}|{TEXT} And {n}." for n in range(1, 5)], clips=4)
    for asked, held in ((None, 1), (2, 2), (0, 0), (9, 3)):
        rows, report = prepared(source, heldout=asked)
        assert report["heldout"] == held == sum(row["split"] == "heldout" for row in rows)
    with pytest.raises(UserError, match="heldout is -1"):
        prepare_dataset(source, tmp_path / "out", heldout=-1)


# --- forms of a source ----------------------------------------------------------------------------


def texts_of(rows: list[dict]) -> dict[str, str]:
    return {row["source"].rsplit("/", 1)[-1]: row["text"] for row in rows if row["status"] != "rejected"}


EXPECTED = {f"a{n}.wav": TEXT for n in (1, 2, 3)}


@pytest.mark.parametrize("form", ["zip", "tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_an_archive_is_a_folder(tmp_path, form):
    source = folder_with(tmp_path / "in", GOOD)
    if form == "zip":
        with zipfile.ZipFile(tmp_path / "voice.zip", "w") as packed:
            for path in [*source.rglob("*.wav"), source / "metadata.csv"]:
                packed.write(path, Path("my voice") / path.relative_to(source))
    else:
        with tarfile.open(tmp_path / f"voice.{form}", f"w:{form[4:]}") as packed:
            packed.add(source, "my voice")
    rows, _ = prepared(tmp_path / f"voice.{form}")
    assert texts_of(rows) == EXPECTED
    again = prepare_dataset(tmp_path / f"voice.{form}", tmp_path / f"voice.{form}_prepared", progress=False)
    assert len(again.clips) == 3


def test_a_table_may_be_given_and_the_recordings_lie_elsewhere(tmp_path):
    source = folder_with(tmp_path / "in", GOOD)
    shutil.move(source / "metadata.csv", tmp_path / "list.csv")
    dataset = prepare_dataset(tmp_path / "list.csv", tmp_path / "out", audio_root=source, progress=False)
    assert len(dataset.clips) == 3


def test_upstreams_raw_arrow_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    source = folder_with(tmp_path / "in", b"")
    (source / "metadata.csv").unlink()
    rows = [{"audio_path": str(source / "wavs" / f"a{n}.wav"), "text": list(TEXT), "duration": 2.0} for n in (1, 2, 3)]
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(source / "raw.arrow"), table.schema) as writer:
        writer.write_table(table)
    rows, _ = prepared(source)
    assert texts_of(rows) == EXPECTED
    shutil.move(source / "raw.arrow", source / "moved.arrow")
    with pyarrow.ipc.new_file(str(source / "moved.arrow"), table.schema) as writer:
        writer.write_table(table)
    dataset = prepare_dataset(source / "moved.arrow", tmp_path / "other", audio_root=source, progress=False)
    assert len(dataset.clips) == 3


def test_recordings_may_lie_in_a_parquet_file_with_speakers(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = []
    for n in (1, 2, 3):
        sound = io.BytesIO()
        soundfile.write(sound, voice(seed=n), 24_000, format="FLAC")
        rows.append({"audio": {"bytes": sound.getvalue(), "path": f"a{n}.flac"}, "text": TEXT, "speaker_id": n % 2,
                     "language": "en"})  # fmt: skip
    (tmp_path / "in").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in" / "train.parquet")
    rows, report = prepared(tmp_path / "in")
    assert texts_of(rows) == {f"a{n}.flac": TEXT for n in (1, 2, 3)}
    assert [row["speaker"] for row in rows] == ["1", "0", "1"] and {row["language"] for row in rows} == {"en"}
    assert set(report["speakers"]) == {"0", "1"}


def test_speakers_come_from_a_column_or_from_folders(tmp_path):
    lines = [f"a{n}|{name}|{TEXT} And {n}." for n, name in enumerate(("ann", "bob") * 4, 1)]
    rows, report = prepared(folder_with(tmp_path / "in", lines, clips=8))
    assert [row["speaker"] for row in rows] == ["ann", "bob"] * 4 and set(report["speakers"]) == {"ann", "bob"}
    for n, name in enumerate(("ann", "ann", "bob")):
        (tmp_path / "pairs" / name).mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / "pairs" / name / f"{n}.wav", voice(seed=n), 24_000)
        (tmp_path / "pairs" / name / f"{n}.txt").write_text(f"{TEXT} And {n}.")
    dataset = prepare_dataset(tmp_path / "pairs", tmp_path / "out", speaker="folder", progress=False)
    assert [clip.speaker for clip in dataset.clips] == ["ann", "ann", "bob"]


def test_the_same_sound_twice_is_used_once(tmp_path):
    source = folder_with(tmp_path / "in", [*GOOD, f"a4|{TEXT} Yes."])
    shutil.copy(source / "wavs" / "a1.wav", source / "wavs" / "a4.wav")
    rows, _ = prepared(source)
    assert [row["status"] for row in rows] == ["accepted"] * 3 + ["rejected"]
    assert "holds the same sound as a1" in rows[3]["reasons"][0]
    assert all("says the same" in row["flags"]["same text"] for row in rows[:3])
