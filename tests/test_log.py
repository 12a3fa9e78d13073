"""f5kit.log: what the loggers keep is read back from their own files, without a network or an account."""

from __future__ import annotations

import json
import math
import sys
import time
import types
import warnings

import pytest

from f5kit.checkpoint import RunFolder
from f5kit.config import TrainConfig
from f5kit.errors import UserError
from f5kit.log import TensorBoardLogger, WandbLogger

CANARY = "canary" * 7  # as long as a real key, so that nothing rejects it for its shape
EVENTS = [
    {"event": "start", "update": 0, "step": 0, "resumed": False, "origin": "tiny with fresh weights"},
    {"event": "evaluate", "update": 0, "loss_raw": 4.0, "loss_ema": 4.0},
    {"event": "update", "update": 1, "step": 0, "loss": 3.5, "lr": 1e-4, "grad_norm": 0.9, "frames": 2400},
    {"event": "skip", "update": 1, "step": 1, "reason": "loss nan", "clips": ["a", "b"]},
    {"event": "update", "update": 2, "step": 2, "loss": 3.25, "lr": 2e-4, "grad_norm": 0.8, "frames": 2300},
    {"event": "evaluate", "update": 2, "loss_raw": 3.0, "loss_ema": 3.5},
    {"event": "save", "update": 2, "path": "runs/x/checkpoints/update_000002"},
    {"event": "end", "update": 2, "minutes": 0.1},
]


@pytest.fixture
def trainer(tmp_path):
    """What a logger asks of a trainer: its run folder and its plan."""
    config = TrainConfig(
        updates=2, learning_rate=1e-4, warmup_updates=1, update_frames=9, micro_frames=9, ema_horizon=1,
        evaluate_every=2, save_every=2,
    )  # fmt: skip
    run = RunFolder(tmp_path / "runs" / "x")
    run.path.mkdir(parents=True)
    plan = types.SimpleNamespace(to_dict=lambda: {"train": config.to_dict()})
    return types.SimpleNamespace(run=run, plan=plan)


def feed(logger, trainer, events=EVENTS):
    for event in events:
        logger(event, trainer)


# ---- TensorBoard


def read_back(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder))
    seen.Reload()
    return seen


def curve(seen, name):
    return [(point.step, pytest.approx(point.value)) for point in seen.Scalars(name)]


def test_tensorboard_curves_are_read_back(trainer):
    feed(TensorBoardLogger(), trainer)
    seen = read_back(trainer.run.path / "tensorboard")
    assert curve(seen, "update/loss") == [(1, 3.5), (2, 3.25)]
    assert curve(seen, "update/lr") == [(1, 1e-4), (2, 2e-4)]
    assert curve(seen, "evaluate/loss_raw") == [(0, 4.0), (2, 3.0)]
    assert curve(seen, "evaluate/loss_ema") == [(0, 4.0), (2, 3.5)]
    assert curve(seen, "skip/count") == [(1, 1)]
    assert "start/text_summary" in seen.Tags()["tensors"]


def test_tensorboard_of_a_resumed_run_shows_one_curve(trainer, tmp_path):
    folder = tmp_path / "curves"
    update = {"event": "update", "step": 0, "loss": 9.0}
    killed = TensorBoardLogger(folder)
    feed(killed, trainer, EVENTS[:1] + [{**update, "update": u} for u in (1, 2, 3)])
    killed._end_thread()  # all but the end was written when it was killed
    killed._writer.flush()
    resumed = [{**EVENTS[0], "update": 2, "resumed": True}, {**update, "update": 3, "loss": 1.0}]
    logger = TensorBoardLogger(folder)
    feed(logger, trainer, resumed + [{"event": "end", "update": 3}])
    assert curve(read_back(folder), "update/loss") == [(1, 9.0), (2, 9.0), (3, 1.0)]


def test_tensorboard_keeps_what_is_not_finite(trainer):
    event = {"event": "update", "update": 1, "loss": math.inf}
    feed(TensorBoardLogger(), trainer, [EVENTS[0], event, EVENTS[-1]])
    assert curve(read_back(trainer.run.path / "tensorboard"), "update/loss") == [(1, math.inf)]


# ---- Weights & Biases


@pytest.fixture
def wandb_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    return tmp_path / "wandb"


def records(data: bytes):
    """The records of a .wandb file: 7 bytes, then LevelDB's log format (32 KiB blocks of pieces)."""
    at, piece = 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # a piece's head never straddles two blocks
            at += 2**15 - at % 2**15
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):  # being written
            return
        piece += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of several
            yield piece
            piece = b""


def history(folder):
    """(rows, config) of the one offline run below that folder, from wandb's own file."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("offline-run-*/*.wandb")
    written: list[Record] = []
    for _ in range(300):  # wandb's own process may still be writing when `finish` returns on a busy machine
        written = [Record.FromString(data) for data in records(file.read_bytes())]
        if any(record.HasField("exit") for record in written):
            break
        time.sleep(0.1)
    rows, config = [], {}
    for record in written:
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        if record.HasField("run"):
            config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
    return rows, config


def test_wandb_offline_curves_are_read_back(trainer, wandb_dir):
    feed(WandbLogger("f5kit-tests", "x", mode="offline"), trainer)
    rows, config = history(wandb_dir)
    losses = [(row["update"], row["update/loss"]) for row in rows if "update/loss" in row]
    assert losses == [(1, 3.5), (2, 3.25)]
    assert [row["evaluate/loss_ema"] for row in rows if "evaluate/loss_ema" in row] == [4.0, 3.5]
    assert [row["skip/count"] for row in rows if "skip/count" in row] == [1]
    assert config["plan"]["train"]["updates"] == 2 and config["origin"] == "tiny with fresh weights"


def test_wandb_resumed_keeps_its_identity(trainer, wandb_dir):
    feed(WandbLogger("f5kit-tests", mode="offline"), trainer)
    former = (trainer.run.path / "wandb_id.txt").read_text().strip()
    feed(WandbLogger("f5kit-tests", mode="offline"), trainer)
    assert {file.stem for file in wandb_dir.glob("offline-run-*/*.wandb")} == {f"run-{former}"}


def test_wandb_leaves_no_key_behind(trainer, wandb_dir, capfd, tmp_path):
    logger = WandbLogger("f5kit-tests", mode="offline")
    feed(logger, trainer)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert CANARY not in "".join(capfd.readouterr()) + repr(logger) + repr(vars(logger))


def test_wandb_mode(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    assert WandbLogger("p").mode == "online"
    monkeypatch.delenv("WANDB_API_KEY")
    assert WandbLogger("p").mode == "offline"
    with pytest.raises(UserError, match="mode is 'dry'; choose one of online, offline, disabled"):
        WandbLogger("p", mode="dry")


# ---- spoken samples


@pytest.fixture
def spoken(trainer):
    """The event of a sample, with its files."""
    import torch

    from f5kit.audio import write_audio
    from f5kit.evaluate import save_spectrogram

    samples = trainer.run.path / "samples"
    write_audio(samples / "update_000002_ema.wav", 0.1 * torch.sin(torch.arange(12_000) / 20))
    save_spectrogram(torch.rand(50, 100), samples / "update_000002_ema.png")
    files = {"audio": "samples/update_000002_ema.wav", "spectrogram": "samples/update_000002_ema.png"}
    return {"event": "sample", "update": 2, "weights": "ema", "text": "Hello.", **files}


def test_tensorboard_keeps_sounds_and_spectrograms(trainer, spoken):
    feed(TensorBoardLogger(), trainer, [EVENTS[0], spoken, EVENTS[-1]])
    seen = read_back(trainer.run.path / "tensorboard")
    (sound,), (picture,) = seen.Audio("sound/ema"), seen.Images("spectrogram/ema")
    assert sound.step == 2 and sound.sample_rate == 24_000 and abs(sound.length_frames - 12_000) < 2
    assert (picture.width, picture.height) == (50, 100)


def test_wandb_keeps_sounds_and_spectrograms(trainer, spoken, wandb_dir):
    feed(WandbLogger("f5kit-tests", mode="offline"), trainer, [EVENTS[0], spoken, EVENTS[-1]])
    rows, _ = history(wandb_dir)
    assert {path.suffix for path in wandb_dir.rglob("media/**/*") if path.is_file()} == {".wav", ".png"}
    assert any("sound/ema" in key for row in rows for key in row)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("logger", "package"),
    [(TensorBoardLogger, "torch.utils.tensorboard"), (lambda: WandbLogger("p"), "wandb")],
)
def test_a_missing_package_names_the_extra(monkeypatch, logger, package):
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails, as if it were not installed
    with pytest.raises(UserError, match=r"pip install 'f5kit\[log\]'"):
        logger()


def test_a_logger_that_fails_says_so_once(trainer, tmp_path):
    (tmp_path / "taken").write_text("a file where a folder should be")
    logger = TensorBoardLogger(tmp_path / "taken")
    with pytest.warns(UserWarning, match="TensorBoard logging stopped, training goes on") as told:
        feed(logger, trainer)
    assert len(told) == 1


def test_a_logger_that_hangs_costs_nothing(trainer):
    class Hangs(TensorBoardLogger):
        patience = 0.2

        def _write(self, numbers, event):
            time.sleep(60)

    logger, started = Hangs(), time.monotonic()
    with pytest.warns(UserWarning, match="training goes on .it hangs"):
        feed(logger, trainer, [*EVENTS[:-1], *[EVENTS[2]] * 20_000, EVENTS[-1]])
    assert time.monotonic() - started < 5


def test_a_failure_does_not_tell_the_key(trainer, wandb_dir, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError(f"401 for key {CANARY}")

    monkeypatch.setattr("wandb.init", fails)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        feed(WandbLogger("p", mode="online"), trainer)
    (message,) = [str(warning.message) for warning in told]
    assert message == "wandb logging stopped, training goes on (RuntimeError: 401 for key ***)"
