"""Kills, rotten bits and resumes, for f5kit's Trainer and for upstream's: the two columns of the README.

    .venv-parity/bin/python benchmarks/upstream_faults.py [--kills 20]      where both packages are installed

F1: a process saves checkpoints without a pause and is killed; what its loader then picks must load, and be whole.
F3: one bit of the newest checkpoint is flipped; a loader that takes it without a word is silent.
F4: a run of three epochs is stopped after update k and resumed, for every k; how often was each clip trained on?
Writes results/upstream_faults.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from demo import processor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))
from small import furnish, losses, trainer, weights  # noqa: E402

from f5kit.audio import import_torchaudio  # noqa: E402
from f5kit.checkpoint import load_model  # noqa: E402
from f5kit.data import load_dataset  # noqa: E402
from f5kit.runs import RunFolder  # noqa: E402
from f5kit.trainer import Trainer  # noqa: E402

import_torchaudio()
warnings.filterwarnings("ignore")
import f5_tts.model  # noqa: E402
from f5_tts.model.dataset import CustomDataset  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
SEED, EPOCHS = 7, 3


# --- upstream's side --------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def theirs(room: Path, folder: Path, seen: list | None = None, stop: int | None = None):
    """Upstream's Trainer on the small dataset; `seen` gets the clips of each batch, `stop` ends it after an update."""
    dataset = load_dataset(room / "data")
    rows = [dict(audio_path=clip.id, text=list(clip.text), duration=clip.seconds, mel_spec=dataset.mel(clip).T.tolist())
            for clip in dataset.train]  # fmt: skip
    data = CustomDataset(rows, durations=[row["duration"] for row in rows], preprocessed_mel=True)
    vocab = {token: i for i, token in enumerate(load_model(room / "model").tokenizer.vocab)}
    torch.manual_seed(0)
    shape = dict(dim=32, depth=1, heads=1, dim_head=32, ff_mult=2, text_dim=16, conv_layers=1)
    backbone = f5_tts.model.DiT(**shape, text_num_embeds=len(vocab), mel_dim=100)
    model = f5_tts.model.CFM(backbone, vocab_char_map=vocab, mel_spec_kwargs=dict(mel_spec_type="vocos"))
    made = f5_tts.model.Trainer(
        model, EPOCHS, 1e-4, num_warmup_updates=1, save_per_updates=10**6, last_per_updates=1,
        checkpoint_path=str(folder), batch_size_per_gpu=4, batch_size_type="sample", logger=None,
        accelerate_kwargs=dict(cpu=True),
    )  # fmt: skip
    if seen is not None:
        names = {"".join(row["text"]): row["audio_path"] for row in rows}
        forward, save = made.model.forward, made.save_checkpoint

        def watched(mel, text, **kwargs):
            seen.append([names["".join(t)] for t in text])
            return forward(mel, text=text, **kwargs)

        def saving(update, last=False):
            save(update, last)
            if update == stop:
                raise Stopped

        made.model.forward, made.save_checkpoint = watched, saving
    return made, data


def train_theirs(room: Path, folder: Path, stop: int | None = None) -> list[list[str]]:
    seen: list = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made, data = theirs(room, folder, seen, stop)
        with contextlib.suppress(Stopped):
            made.train(data, num_workers=1, resumable_with_seed=SEED)
    return seen


def save_theirs(room: Path, folder: Path) -> None:
    """Save without a pause, as upstream does each `last_per_updates`."""
    made, _ = theirs(room, folder)
    made.scheduler = torch.optim.lr_scheduler.LinearLR(made.optimizer)
    made.model.ballast = torch.nn.Parameter(torch.zeros(2 << 20))  # 8 MB
    while True:
        made.save_checkpoint(1, last=True)


def loads_theirs(folder: Path) -> bool:
    try:
        torch.load(folder / "model_last.pt", weights_only=True)
    except Exception:
        return False
    return True


# --- ours -------------------------------------------------------------------------------------------


class Watched(Trainer):
    def _accumulate(self, parts, count):
        self.seen.append([clip for batch, _ in parts for clip in batch.clip_ids])
        return super()._accumulate(parts, count)


def train_ours(room: Path, folder: Path, stop: int | None = None, updates: int = 10**6) -> list[list[str]]:
    def stopping(event, _):
        if event["event"] == "update" and event["update"] == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    made = trainer(room, folder, stopping, kind=Watched, updates=updates, warmup_updates=1)
    made.seen = []
    with contextlib.suppress(SystemExit):
        made.fit()
    return made.seen


def save_ours(room: Path, folder: Path) -> None:
    from zygote import save

    save(str(folder), megabytes=8)


def loads_ours(folder: Path) -> bool:
    newest = RunFolder(folder).latest()
    return newest is not None and bool((weights(RunFolder(folder))["a"] == newest.update).all())


# --- the three faults -------------------------------------------------------------------------------


def kills(save, loads, room: Path, folder: Path, number: int) -> dict:
    """SIGKILL a forked saver at random instants."""
    rng, lost = random.Random(0), 0
    for _ in range(number):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            save(room, folder)
        patterns = ("model_last.pt", "checkpoints/update_*")
        end = time.monotonic() + 60
        while not any(list(folder.glob(p)) for p in patterns) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.3, 0.8))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lost += not loads(folder)
    return {"kills": number, "unloadable": lost}


def flips(file: Path, refused, number: int) -> dict:
    """Flip one bit at a time and ask whether that is noticed."""
    rng, whole, noticed = random.Random(0), file.read_bytes(), 0
    for _ in range(number):
        spoilt = bytearray(whole)
        spoilt[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(spoilt)
        noticed += refused()
    file.write_bytes(whole)
    return {"flips": number, "silent": number - noticed}


def resumes(train, room: Path, folder: Path, clips: int, last: int, **about) -> dict:
    """Stop after each update but the last and resume; count the stops after which a clip did not come once an epoch."""
    wrong = 0
    for stop in range(1, last):
        seen = train(room, folder / str(stop), stop, **about) + train(room, folder / str(stop), **about)
        exposure = Counter(clip for batch in seen for clip in batch)
        wrong += len(exposure) != clips or set(exposure.values()) != {EPOCHS}
    return {"stops": last - 1, "clips_not_once_an_epoch": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict = {"f5kit": {}, "upstream": {}}
    with tempfile.TemporaryDirectory() as work:
        room, work = furnish(Path(work) / "room"), Path(work)
        clips = len(load_dataset(room / "data").train)
        for name in ("ours_f1", "theirs_f1"):
            (work / name).mkdir()
        found["f5kit"]["F1"] = kills(save_ours, loads_ours, room, work / "ours_f1", options.kills)
        found["upstream"]["F1"] = kills(save_theirs, loads_theirs, room, work / "theirs_f1", options.kills)
        from f5kit.data import epoch_batches

        frames = [clip.frames for clip in load_dataset(room / "data").train]
        ours = sum(len(epoch_batches(frames, 520, 0, epoch)) for epoch in range(EPOCHS))
        train_ours(room, work / "whole", updates=ours)
        run = RunFolder(work / "whole")
        assert len(losses(run)) == ours
        newest = run.checkpoints()[-1]
        file = newest.path / "model.safetensors"
        found["f5kit"]["F3"] = flips(file, lambda: newest.damage() is not None, 100)
        uninterrupted = Counter(clip for batch in train_theirs(room, work / "theirs") for clip in batch)
        last = work / "theirs" / "model_last.pt"
        found["upstream"]["F3"] = flips(last, lambda: not loads_theirs(last.parent), 100)
        updates = EPOCHS * -(-clips // 4)
        assert set(uninterrupted.values()) == {EPOCHS}, uninterrupted
        found["f5kit"]["F4"] = resumes(train_ours, room, work / "ours_f4", clips, ours, updates=ours)
        found["upstream"]["F4"] = resumes(train_theirs, room, work / "theirs_f4", clips, updates)
    for case in ("F1", "F3", "F4"):
        print(case, "f5kit", found["f5kit"][case], "upstream", found["upstream"][case])
    versions = {"python": platform.python_version(), "torch": torch.__version__, "f5-tts": version("f5-tts")}
    record = {"command": " ".join(["python", *sys.argv]), "date": date.today().isoformat(), "hardware": processor(),
              "versions": versions, **found}  # fmt: skip
    (RESULTS / "upstream_faults.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
