"""What the fault cases train on: a speck of a model and a dozen short clips, so that a whole run takes a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from f5kit.checkpoint import export_model, fresh_model
from f5kit.config import PRESETS
from f5kit.data import Dataset, load_dataset
from f5kit.host import detect_host
from f5kit.plan import RunPlan, plan_run
from f5kit.prepare import prepare_dataset
from f5kit.text import Tokenizer, english_vocab
from f5kit.trainer import Trainer

SPECK = PRESETS["tiny"].replace(name="speck", dim=32, depth=1, heads=1, text_dim=16)
CLIPS = 13  # one of them is held out


def furnish(room: Path) -> Path:
    """Make the dataset and the model in `room`, unless they are there. Returns `room`."""
    import soundfile

    if (room / "model").is_dir():
        return room
    voice = room / "voice"
    voice.mkdir(parents=True)
    for number in range(CLIPS):
        g = torch.Generator().manual_seed(number)
        time = torch.arange(int((1.05 + 0.07 * number) * 24_000)) / 24_000
        tone = torch.sin((300 + 40 * number) * torch.pi * time) * (torch.sin(9 * torch.pi * time) > -0.5)
        soundfile.write(voice / f"c{number:02d}.wav", (0.2 * tone + 1e-3 * torch.randn(len(time), generator=g)), 24_000)
        (voice / f"c{number:02d}.txt").write_text(f"Words of clip {'abcdefghijklm'[number]}.")
    prepare_dataset(voice, room / "data", heldout=1, progress=False)
    model = fresh_model(SPECK, Tokenizer(english_vocab()))
    with torch.no_grad():  # nothing stays zero, so that every weight has a gradient from the start
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    export_model(model, room / "model", dtype=torch.float32)
    return room


def opened(room: Path, **train) -> tuple[RunPlan, Dataset]:
    """A plan for the speck, with fields of its TrainConfig replaced, and the dataset."""
    dataset = load_dataset(room / "data")
    plan = plan_run(str(room / "model"), dataset, detect_host("cpu"), updates=12, learning_rate=3e-3)
    usual = dict(update_frames=520, micro_frames=520, evaluate_every=10**6, save_every=10**6, keep_checkpoints=10**6)
    return replace(plan, train=replace(plan.train, **{**usual, **train})), dataset


def trainer(room: Path, run: Path, *callbacks, kind=Trainer, max_minutes=None, **train) -> Trainer:
    plan, dataset = opened(room, **train)
    return kind(plan, dataset, run, callbacks, max_minutes=max_minutes)


def losses(run) -> dict[int, tuple]:
    """Loss, norm and rate by step; of a step that was trained twice, the later."""
    return {e["step"]: (e["loss"], e["grad_norm"], e["lr"]) for e in run.events() if e["event"] == "update"}


def weights(run, which: str = "model") -> dict[str, torch.Tensor]:
    """A run's newest weights: "model", "ema" or "optimizer"."""
    from f5kit.weights import read_tensors

    return read_tensors(run.latest().path / f"{which}.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
