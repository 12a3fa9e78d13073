"""The check of a card, run here on the processor with a tiny model: the same code, and it says so."""

import json

import pytest

from f5kit.selfcheck import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_check_measures_and_says_what_it_ran_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    main(["--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["model"] == "tiny" and "no CUDA GPU here" in found["note"]
    assert {(r["checkpointing"], r["optimizer"], r.get("lora_rank", 0)) for r in found["training"]} >= {
        ("none", "adamw", 0), ("full", "adamw8bit", 0), ("none", "adamw", 8),
    }  # fmt: skip
    for row in found["training"]:
        assert row["finite"] and row["frames_per_second"] > 0 and abs(row["error"]) < 0.1  # of a few MB
    assert found["sampling"]["finite"] and found["sampling"]["rtf"] > 0 and not found["left_out"]
    assert set(found["matrix_tflops"]) == {"fp32", "bf16", "fp16"}
    said = capsys.readouterr().out
    assert "processor's figures" in said and "found.json" in said


def test_time_that_is_over_is_told(tmp_path):
    main(["--out", str(tmp_path / "found.json"), "--minutes", "0", "--model", "tiny"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["training"] == [] and found["sampling"] is None and "sampling" in found["left_out"]
