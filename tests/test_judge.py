"""The judge on recordings and controls whose order is known, and what its report holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import f5kit.scores
from f5kit.audio import log_mel, read_audio
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.judge import COPY, OTHER_REFERENCE, SHUFFLED, judge, judge_voice
from f5kit.report import MEASURES, RECORDINGS, Report
from f5kit.vocoder import GriffinLim

pytest.importorskip("pocketsphinx")
pytest.importorskip("jiwer")
encodes = pytest.mark.skipif(importlib.util.find_spec("resemblyzer") is None, reason="needs Resemblyzer's weights")
RATE = 24_000
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def clips(recordings):
    """[(path, text)] of four clips of the demo voice, of few words."""
    lines = (recordings / "metadata.csv").read_text(encoding="utf-8").splitlines()
    pairs = sorted((line.split("|") for line in lines), key=lambda pair: len(pair[1]))[:4]
    return [(recordings / "wavs" / f"{name}.flac", text) for name, text in pairs]


@pytest.fixture(scope="module")
def report(clips):
    """Recordings, their copies, the controls and noise."""
    recorded = [(read_audio(path, RATE), RATE) for path, _ in clips]
    vocoder = GriffinLim()
    copies = [(vocoder.decode(log_mel(audio)), RATE) for audio, _ in recorded]
    g = torch.Generator().manual_seed(0)
    systems = {RECORDINGS: [path for path, _ in clips], COPY: copies, SHUFFLED: recorded[1:] + recorded[:1]}
    systems["noise"] = [(0.1 * torch.randn(RATE, generator=g), RATE)] * len(clips)
    return judge(systems, [text for _, text in clips], recogniser="pocketsphinx", progress=False)


def value(report: Report, system: str, measure: str) -> float:
    return report.summary[system][measure]["value"]


def test_controls_stand_in_order(report):
    wer = {system: value(report, system, "wer") for system in report.summary}
    assert max(wer[RECORDINGS], wer[COPY]) < min(wer[SHUFFLED], wer["noise"]) - 0.2
    decoys = {system: value(report, system, "decoys") for system in report.summary}
    assert min(decoys[RECORDINGS], decoys[COPY]) >= 0.5 and decoys["noise"] == 0
    assert decoys[SHUFFLED] < min(decoys[RECORDINGS], decoys[COPY])
    assert value(report, COPY, "mcd") < value(report, SHUFFLED, "mcd") < value(report, "noise", "mcd")
    assert value(report, COPY, "duration_error") < 0.05 < value(report, SHUFFLED, "duration_error")


@encodes
def test_similarity_is_scaled_between_others_and_recordings(report):
    assert value(report, RECORDINGS, "similarity") == 1 and report.about["cosines"]["others"] < 0.8
    assert value(report, COPY, "similarity") > 0.8 > 0.2 > value(report, "noise", "similarity")


def test_figures_are_made_of_the_rows(report):
    rows = [row for row in report.rows if row["system"] == COPY]
    words = sum(row["words"] for row in rows)
    wer = sum(row["word_errors"] for row in rows) / words
    assert value(report, COPY, "wer") == round(wer, 4)
    base = sum(row["word_errors"] for row in report.rows if row["system"] == RECORDINGS)
    assert value(report, COPY, "wer_ratio") == round(wer * words / base, 4)
    for figures in report.summary.values():
        for measure, found in figures.items():
            assert measure in MEASURES
            assert found is None or found["low"] <= found["value"] and (found["high"] or 1e9) >= found["value"]
    assert report.summary[RECORDINGS]["mcd"] is None and report.summary[RECORDINGS]["dnsmos"] is None


def test_recordings_understood_without_an_error_give_no_ratio():
    row = {"word_errors": 0, "words": 4, "character_errors": 0, "characters": 9, "decoy_won": None, "cosine": None}
    row |= {"mcd": None, "duration_error": None, "dnsmos": None, "heard": "", "number": 1}
    rows = [{**row, "system": RECORDINGS}, {**row, "system": "voice", "word_errors": 2}]
    report = Report(["a"], {}, rows, {"seed": 0, "recogniser": "", "notes": []})
    assert report.summary["voice"]["wer_ratio"] is None and report.summary["voice"]["wer"]["value"] == 0.5


def test_a_report_can_be_kept_shown_and_heard(report, tmp_path):
    kept = json.loads((report.save(tmp_path) / "report.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(report.to_dict()))
    assert len(kept["sentences"]) == 4 * 4 and kept["sentences"][0]["heard"]
    assert len(read_audio(tmp_path / "sounds" / "copy_synthesis_003.wav")) == len(report.sounds[COPY][2])
    page = report._repr_html_()
    assert page.count("<audio") == 3 * 4 and SHUFFLED in page and report.sentences[0] in page
    assert [row["system"] for row in report.table()] == list(report.summary)
    assert len(report.figure().axes) >= 3


def test_two_processes_hear_the_same(report, clips):
    systems = {COPY: [(audio, RATE) for audio in report.sounds[COPY]]}
    texts = [text for _, text in clips]
    again = judge(systems, texts, recogniser="pocketsphinx", processes=2, progress=False)
    expected = [row for row in report.rows if row["system"] == COPY]
    assert [(r["heard"], r["decoy_won"]) for r in again.rows] == [(r["heard"], r["decoy_won"]) for r in expected]
    assert again.summary[COPY]["wer_ratio"] is None  # without recordings there is nothing to be measured by


def test_a_voice_is_judged_with_its_controls(clips, awake):
    """The plumbing, with a model that has learned nothing: who speaks, from which reference, scored against what."""
    other = next((Path(f5kit.scores.__file__).parent / "assets" / "other_speakers").glob("slt_1.flac"))
    text = "The boat lay still in the small harbour, waiting for wind."
    voice = Voice.load("tiny", *clips[3], vocoder="griffin-lim")
    awake(voice.model)
    how = {"sentences": 2, "steps": 2, "decoys": 0, "recogniser": "pocketsphinx", "progress": False}
    report = judge_voice({"before": voice, "after": voice}, clips[:3], other_reference=(other, text), **how)
    assert list(report.summary) == [RECORDINGS, COPY, "before", "after", OTHER_REFERENCE, SHUFFLED]
    assert report.sentences == [text for _, text in clips[:2]]
    sounds = report.sounds
    assert torch.equal(sounds["before"][0], sounds["after"][0])
    assert torch.equal(sounds[SHUFFLED][0], sounds["after"][1]) and torch.equal(sounds[SHUFFLED][1], sounds["after"][0])
    assert not torch.equal(sounds[OTHER_REFERENCE][0], sounds["after"][0])
    assert report.about["steps"] == 2 and "slt_1" in report.about["voices"][OTHER_REFERENCE]
    with pytest.raises(UserError, match="two recorded sentences"):
        judge_voice(voice, clips[:1])


def test_faults_are_told_in_a_sentence(clips):
    with pytest.raises(UserError, match="'voice' has 1 sounds for 2 sentences"):
        judge({"voice": [clips[0][0]]}, ["one", "two"])
    report = judge({RECORDINGS: [clips[0][0]]}, ["one"], recogniser="pocketsphinx", progress=False)
    assert "No similarity: similarity needs two recordings" in report.about["notes"][0]
