"""A new language, end to end: Spanish on a model that was trained on English and has never seen an ñ.

The old language is held by a low learning rate and by replay: the English clips stay among those that are trained on,
about as many minutes of them as of Spanish.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from f5kit.cfm import held_out_loss
from f5kit.checkpoint import load_model
from f5kit.evaluate import dataset_loss
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.prepare import prepare_dataset
from f5kit.text import coverage
from f5kit.trainer import Trainer
from f5kit.vocab import TABLE, extend_vocab

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(not shutil.which("espeak-ng"), reason="needs Debian's espeak-ng"),
    pytest.mark.usefixtures("one_thread"),
]

SPANISH = [
    "El niño pequeño soñó con una montaña.",
    "La señora española baña a su niña.",
    "¿Dónde está el camión rojo, señor?",
    "Mañana comeré jamón y limón aquí.",
    "¡Qué difícil es la lección de música!",
    "Mi corazón está en la región de León.",
    "El pingüino azul compró un cinturón.",
    "¡Qué vergüenza, dijo el músico gaditano!",
    "La cigüeña voló sobre el río Miño.",
    "¿Cuándo volverá el tren de Málaga?",
    "¡Feliz cumpleaños, pequeña Begoña!",
]
LETTERS = set("ñóáéíúü¿¡")


def train(model: str, dataset, folder, **settings):
    plan = plan_run(model, dataset, detect_host("cpu"), precision="fp32", **settings)
    return Trainer(plan, dataset, folder).fit()


def add_spanish(folder):
    """Say the sentences into folder/wavs and write them to its metadata.csv."""
    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    with open(folder / "metadata.csv", "a", encoding="utf-8") as metadata:
        for i, sentence in enumerate(SPANISH):
            clip = folder / "wavs" / f"es_{i}.wav"
            subprocess.run(["espeak-ng", "-v", "es", "-s", "220", "-w", clip, sentence], check=True)
            metadata.write(f"{clip.stem}|{sentence}\n")


def test_spanish_is_added_and_english_stays(dataset, recordings, tmp_path):
    mixed = tmp_path / "recordings"
    shutil.copytree(recordings, mixed)
    for clip in (*dataset.heldout, *dataset.train[:2]):  # what the old language is judged by is not replayed
        (mixed / "wavs" / f"{clip.id}.flac").unlink()
    add_spanish(mixed)
    both = prepare_dataset(mixed, tmp_path / "data", progress=False)

    english = train("tiny", dataset, tmp_path / "english", updates=60, update_frames=600, learning_rate=5e-3)
    missing = coverage([clip.text for clip in both.clips], load_model(english.path).tokenizer)
    assert LETTERS <= set(missing)
    assert missing["ñ"].count >= 8 and "niño" in " ".join(missing["ñ"].examples)

    base = extend_vocab(english.path, missing, tmp_path / "base")
    before = load_model(base, weights="raw")
    run = train(str(base), both, tmp_path / "spanish", updates=100, update_frames=400, learning_rate=1e-4)
    after = load_model(run.checkpoint("update_000100").path, weights="raw")

    moved = (after.state_dict()[TABLE] - before.state_dict()[TABLE]).norm(dim=1)[1:]  # by token
    place = {token: i for i, token in enumerate(after.tokenizer.vocab)}
    unused = torch.stack([moved[place[token]] for token in "{}~^`|"])  # decay alone
    new = torch.stack([moved[place[letter]] for letter in sorted(LETTERS)])
    old_loss, new_loss = (dataset_loss(model, dataset) for model in (before, after))
    spanish = [c for c in both.clips if c.id.startswith("es_")]
    batch = both.batch(spanish, after.tokenizer)
    old_spanish, new_spanish = (held_out_loss(model, [batch]) for model in (before, after))
    print(
        f"new rows moved {new.min():.4f} to {new.max():.4f}, unused {unused.max():.4f}; "
        f"Spanish {old_spanish:.4f} -> {new_spanish:.4f}, English {old_loss:.4f} -> {new_loss:.4f}"
    )
    assert new.min() > 5 * unused.max()
    assert abs(new_loss / old_loss - 1) < 0.02
    assert new_spanish < old_spanish


def test_the_notebooks_add_the_letters_from_their_parameters(dataset, tmp_path):
    english = train("tiny", dataset, tmp_path / "english", updates=2)
    add_spanish(tmp_path / "spanish")
    program = [sys.executable, str(ROOT / "notebooks" / "run.py"), "--only", "01,02"]
    values = {"voice": "paula", "source": tmp_path / "spanish", "base_model": english.path, "language": "es",
              "consent": "Public domain", "updates": 3}  # fmt: skip
    given = [part for name, value in values.items() for part in ("-p", name, str(value))]
    done = subprocess.run(
        [*program, "--workspace", str(tmp_path / "work"), *given],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    base = tmp_path / "work" / "models" / "paula_base"
    assert LETTERS <= set(load_model(base).tokenizer.vocab)
    result = json.loads((tmp_path / "work" / "runs" / "paula" / "result.json").read_text())
    assert result["base_model"] == str(base)
