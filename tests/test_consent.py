"""What the speaker has agreed to: kept with the dataset, in every checkpoint, and on the card."""

from __future__ import annotations

import json
import shutil

import pytest

from f5kit.data import load_dataset, write_consent
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.hub import build_export
from f5kit.plan import plan_run
from f5kit.prepare import prepare_dataset
from f5kit.provenance import read_provenance
from f5kit.trainer import Trainer

AGREED = "I am the speaker, and anyone may use the voice."


def test_it_travels_from_the_recordings_to_the_card(dataset, recordings, tmp_path):
    folder = shutil.copytree(dataset.folder, tmp_path / "small")
    assert load_dataset(folder).consent == ""
    told = prepare_dataset(recordings, folder, name="small", consent=AGREED, progress=False)  # opened at once
    assert told.consent == AGREED and load_dataset(folder).consent == AGREED
    plan = plan_run("tiny", told, detect_host("cpu"), updates=1, update_frames=600, micro_frames=600)
    run = Trainer(plan, told, tmp_path / "run").fit()
    kept = json.loads((run.latest().path / "data.json").read_text(encoding="utf-8"))
    assert kept["consent"] == AGREED and kept["clips"] == len(told.clips)
    assert run.latest().damage() is None
    write_consent(folder, "Another sentence, written later.")
    speech = load_dataset(folder).path(told.train[0])
    export = build_export(run, tmp_path / "voice", language="en", samples=[speech])
    assert AGREED in (export / "README.md").read_text(encoding="utf-8")  # what held when it was trained
    assert read_provenance(export / "samples" / "01.wav").by.startswith("f5kit ")
    other = build_export(run, tmp_path / "voice", language="en", consent="Said for the card alone.")
    assert "Said for the card alone." in (other / "README.md").read_text(encoding="utf-8")


def test_without_it_nothing_is_exported(dataset, tmp_path):
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=1, update_frames=600, micro_frames=600)
    run = Trainer(plan, dataset, tmp_path / "run").fit()
    with pytest.raises(UserError, match="consent is empty"):
        build_export(run, tmp_path / "voice", language="en")


def test_an_empty_word_takes_nothing_back(dataset, tmp_path):
    folder = shutil.copytree(dataset.folder, tmp_path / "small")
    write_consent(folder, AGREED)
    write_consent(folder, "  ")
    assert load_dataset(folder).consent == AGREED
