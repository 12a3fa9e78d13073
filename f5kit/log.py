"""The trainer's events in Weights & Biases and in TensorBoard: callbacks for `Trainer(callbacks=[...])`.

Every number of every event becomes one curve, named event/number ("update/loss", "evaluate/loss_ema"), over
the count of updates; spoken samples become players and spectrograms. Logging goes on in a thread of its own. A logger
that fails or hangs says so once and falls silent: it never stops the training, nor holds it up.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from f5kit.audio import read_audio
from f5kit.errors import UserError
from f5kit.host import secret
from f5kit.runs import RunFolder


class _About(NamedTuple):
    """What a logger asks of a trainer; the trainer itself moves on meanwhile."""

    run: RunFolder
    plan: object


class _Logger(ABC):
    """What both have in common: which numbers are logged, and that failing and hanging are harmless.

    Events wait in a queue for the logger's thread. When 10,000 of them wait, or when at the end the thread does not
    finish in `patience` seconds, the logger counts as hung: it is given up, and what waits is dropped.
    """

    service = ""
    patience = 30.0

    def __init__(self):
        self._failed: str | None = None
        self._told = False
        self._skipped = 0
        self._waiting: queue.Queue = queue.Queue(maxsize=10_000)
        self._thread: threading.Thread | None = None

    def __call__(self, event: dict, trainer=None) -> None:
        """Take one event of the trainer."""
        if event["event"] == "start":
            self._end_thread()  # of a run before
            self._failed, self._told, self._waiting = None, False, queue.Queue(maxsize=10_000)
            self._thread = threading.Thread(target=self._work, args=(self._waiting,), daemon=True, name=self.service)
            self._thread.start()
        if self._failed is None and self._thread is not None:
            about = _About(trainer.run, trainer.plan) if trainer is not None else None  # what the thread may look at
            try:
                self._waiting.put_nowait((dict(event), about))
            except queue.Full:
                self._failed = "it hangs"
            if event["event"] == "end":
                self._end_thread()
        if self._failed is not None and not self._told:
            self._told = True
            warnings.warn(f"{self.service} logging stopped, training goes on ({self._failed})", stacklevel=2)

    def _end_thread(self) -> None:
        """Let the thread finish what waits, if it can."""
        if self._thread is not None and self._failed is None:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                pass
            self._thread.join(self.patience)
            if self._thread.is_alive():
                self._failed = f"it hangs: it did not finish in {self.patience:g} s"
        self._thread = None

    def _work(self, waiting: queue.Queue) -> None:
        while (item := waiting.get()) is not None:
            try:
                self._log(*item)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".replace(secret("WANDB_API_KEY") or "\0", "***")
                self._failed = reason
                return

    def _log(self, event: dict, about: _About) -> None:
        if event["event"] == "start":
            self._start(event, about)
        if event["event"] == "skip":
            self._skipped += 1
            event = {**event, "count": self._skipped}
        self._write(_numbers(event), event)
        if event["event"] == "sample":
            self._sample(event, about)
        if event["event"] == "end":
            self._end()

    @abstractmethod
    def _start(self, event: dict, about: _About) -> None:
        """Open the log of a run."""

    @abstractmethod
    def _write(self, numbers: dict[str, float], event: dict) -> None:
        """Add the numbers of one event."""

    @abstractmethod
    def _sample(self, event: dict, about: _About) -> None:
        """Add a spoken sentence: its sound and its spectrogram."""

    @abstractmethod
    def _end(self) -> None:
        """Close the log."""


class WandbLogger(_Logger):
    """Weights & Biases. Its files go to `wandb` in $WANDB_DIR, or else in the run folder.

    mode: "online", "offline" (kept on disk for `wandb sync`) or "disabled". None is what WANDB_MODE says, else online
    where the secret WANDB_API_KEY can be had, else offline. A resumed run goes on under its former identity.
    Raises UserError when wandb is not installed.
    """

    service = "wandb"

    def __init__(self, project: str, name: str | None = None, mode: str | None = None):
        super().__init__()
        try:
            import wandb
        except ImportError:
            raise UserError("WandbLogger needs wandb: pip install 'f5kit[log]'") from None
        modes = ("online", "offline", "disabled")
        if mode not in (None, *modes):
            raise UserError(f"WandbLogger's mode is {mode!r}; choose one of {', '.join(modes)}, or None")
        self._wandb, self._run = wandb, None
        self.project, self.name = project, name
        asked = os.environ.get("WANDB_MODE")
        usual = asked if asked in modes else "online" if secret("WANDB_API_KEY") else "offline"
        self.mode = mode or usual

    def _start(self, event: dict, about: _About) -> None:
        # Output of the notebook is not captured and code is not sent: either could hold what is private.
        settings = self._wandb.Settings(
            console="off", silent=self.mode != "online", save_code=False, disable_git=True, init_timeout=30,
            api_key=secret("WANDB_API_KEY") if self.mode == "online" else None,
        )  # fmt: skip
        self._run = self._wandb.init(
            project=self.project, name=self.name, id=_identity(about), mode=self.mode, settings=settings,
            resume="allow" if self.mode == "online" else None, config=_settings(event, about),
            dir=os.environ.get("WANDB_DIR") or str(about.run.path),
        )  # fmt: skip
        # Not wandb's own step, which may never fall: a rollback goes back to an earlier update.
        self._run.define_metric("*", step_metric="update")

    def _write(self, numbers: dict[str, float], event: dict) -> None:
        if numbers and self._run is not None:
            self._run.log({**numbers, "update": event.get("update", 0)})

    def _sample(self, event: dict, about: _About) -> None:
        sound = self._wandb.Audio(str(about.run.path / event["audio"]), caption=event["text"])
        picture = self._wandb.Image(str(about.run.path / event["spectrogram"]), caption=event["text"])
        name = Path(event["audio"]).stem.split("_", 2)[2]  # raw, ema, raw_2
        self._run.log({f"sound/{name}": sound, f"spectrogram/{name}": picture, "update": event["update"]})

    def _end(self) -> None:
        self._run.finish()


class TensorBoardLogger(_Logger):
    """TensorBoard event files in `folder`; without one, in the run folder's `tensorboard`.

    Curves of a resumed run go on where the checkpoint was taken. UserError when tensorboard is not installed.
    """

    service = "TensorBoard"

    def __init__(self, folder: str | Path | None = None):
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("TensorBoardLogger needs tensorboard: pip install 'f5kit[log]'") from None
        self._open, self._writer = SummaryWriter, None
        self.folder = None if folder is None else Path(folder)

    def _start(self, event: dict, about: _About) -> None:
        if self.folder is None:
            self.folder = about.run.path / "tensorboard"
        # What an interrupted run logged beyond its last checkpoint comes again: hide the former curve there.
        self._writer = self._open(str(self.folder), purge_step=event.get("update", 0) + 1)
        text = json.dumps(_settings(event, about), indent=1, default=str)
        self._writer.add_text("start", f"```json\n{text}\n```", event.get("update", 0))

    def _write(self, numbers: dict[str, float], event: dict) -> None:
        if self._writer is None:
            return
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, event.get("update", 0))
        if event["event"] != "update":
            self._writer.flush()

    def _sample(self, event: dict, about: _About) -> None:
        from matplotlib.image import imread

        name = Path(event["audio"]).stem.split("_", 2)[2]  # raw, ema, raw_2
        sound, update = read_audio(about.run.path / event["audio"]), event["update"]
        self._writer.add_audio(f"sound/{name}", sound[None], update, sample_rate=24_000)
        picture = imread(about.run.path / event["spectrogram"])[..., :3]
        self._writer.add_image(f"spectrogram/{name}", picture, update, dataformats="HWC")

    def _end(self) -> None:
        self._writer.close()


def _numbers(event: dict) -> dict[str, float]:
    kind = event["event"]
    numbers = {key: value for key, value in event.items() if type(value) in (int, float) and key != "update"}
    return {f"{kind}/{key}": value for key, value in numbers.items()} if kind != "start" else {}


def _settings(event: dict, about: _About) -> dict:
    """What is to be known of a run beside its curves."""
    return {"plan": about.plan.to_dict(), **{key: value for key, value in event.items() if key != "event"}}


def _identity(about: _About) -> str:
    """The id of this run at wandb, kept in the run folder so that a resumed run keeps it."""
    file = about.run.path / "wandb_id.txt"
    if not file.is_file():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()
