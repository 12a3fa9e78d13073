"""The embedded voice: there without a network, the one that was measured, and honest about it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import f5kit
from f5kit import Voice, load_model
from f5kit.checkpoint import model_folder
from f5kit.inference import find_reference
from f5kit.plan import count_parameters
from f5kit.weights import file_hash

ROOT = Path(__file__).parents[1]
FOLDER = Path(f5kit.__file__).with_name("starter_voice")
JUDGED = json.loads((ROOT / "benchmarks" / "results" / "judge_starter.json").read_text(encoding="utf-8"))
TRAINING = json.loads((ROOT / "benchmarks" / "results" / "starter_training.json").read_text(encoding="utf-8"))


def test_the_shipped_weights_are_those_that_were_recorded():
    assert file_hash(FOLDER / "model.safetensors") == TRAINING["sha256"]
    assert TRAINING["parameters"] == count_parameters(load_model("starter").config) <= 8_000_000
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 25_000_000


def test_the_card_has_the_figures_of_the_record():
    card = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    judged, raw, averaged = TRAINING["curve"][-1]
    trained = int(TRAINING["checkpoint"].removeprefix("update_"))
    assert judged > trained - 500
    loss, hours = averaged if TRAINING["weights"] == "ema" else raw, TRAINING["hours_of_audio_seen"]
    for figure in (f"{TRAINING['parameters']:,}", f"{trained:,} updates", f"{hours:.0f} hours", f"{loss:.2f}"):
        assert figure in card, f"the card does not say {figure}"
    for script in set(re.findall(r"benchmarks/\S+\.py", card)):
        assert (ROOT / script).is_file()


def test_the_trained_vocoder_is_not_shipped_because_griffin_lim_is_better():
    record = json.loads((ROOT / "benchmarks" / "results" / "judge_vocoder.json").read_text())["figures"]
    recorded, found, trained = (record[name] for name in ("recordings", "griffin-lim", "build/vocoder/vocoder"))
    assert found["wer"] <= trained["wer"] and found["mel"] < trained["mel"]
    words = " ".join((ROOT / "benchmarks" / "starter" / "README.md").read_text(encoding="utf-8").split())
    shown = (f"{figures['wer']:.3f}" for figures in (recorded, found, trained))
    assert "a recogniser gets {} of the words wrong in the recordings themselves, {} through".format(*shown) in words
    assert f"{trained['wer']:.3f} through Vocos after 1,800 updates" in words


def test_the_card_says_what_the_judge_found():
    card = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    voice = JUDGED["summary"]["voice"]
    wrong, recorded = voice["wer"]["value"], JUDGED["summary"]["recordings"]["wer"]["value"]
    count = sum(row["system"] == "recordings" for row in JUDGED["sentences"])
    assert f"{count} sentences that it has not heard" in card
    assert f"{wrong:.2f} of the words wrong, and {recorded:.2f} of the recordings'" in card
    assert f"decoys in {voice['decoys']['value']:.0%}".replace("%", " %") in card
    assert JUDGED["text_advantage"]["low"] > 0, "it has learned text, and not only sound"


def test_it_loads_in_another_process_without_a_network(tmp_path):
    code = "from f5kit import load_model; print(load_model('starter').origin)"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=offline, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(FOLDER / "model.safetensors"), done.stderr


def test_loading_it_draws_no_random_number_and_imports_no_compiler():
    code = (
        "import sys, torch; from f5kit import load_model; state = torch.get_rng_state(); load_model('starter'); "
        "print(torch.equal(state, torch.get_rng_state()), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stdout + done.stderr


@pytest.mark.usefixtures("one_thread")
def test_it_speaks_with_a_voice_of_its_own():
    assert model_folder("starter") == FOLDER
    path, text = find_reference("starter")
    assert path.parent == FOLDER and text
    speech = Voice.load("starter", vocoder="griffin-lim").speak("Good morning.", steps=4, progress=False)
    assert speech.audio.isfinite().all() and 0.4 < speech.seconds < 3


@pytest.mark.usefixtures("one_thread")
def test_longer_words_are_expected_to_last_longer():
    model = load_model("starter")
    short, middling, long = (
        model.letter_lengths(model.tokenizer.encode(word)).sum().item() for word in ("I", "see", "wonderful")
    )
    assert short < middling < long
    assert torch.equal(*(model.letter_lengths(model.tokenizer.encode("see")) for _ in range(2)))
