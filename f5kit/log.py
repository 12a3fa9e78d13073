"""The trainer's events in Weights & Biases and in TensorBoard: callbacks for `Trainer(callbacks=[...])`.

Every number of every event becomes one curve, named event/number ("update/loss", "evaluate/loss_ema"), over
the count of updates. A logger that fails says so once and falls silent: it never stops the training.
"""

from __future__ import annotations

import json
import os
import secrets
import warnings
from abc import ABC, abstractmethod
from pathlib import Path

from f5kit.errors import UserError
from f5kit.host import secret


class _Logger(ABC):
    """What both have in common: which numbers are logged, and that failing is harmless."""

    service = ""

    def __init__(self):
        self._failed = False
        self._skipped = 0

    def __call__(self, event: dict, trainer=None) -> None:
        """Log one event of the trainer."""
        if self._failed:
            return
        try:
            self._log(event, trainer)
        except Exception as error:
            self._failed = True
            reason = f"{type(error).__name__}: {error}".replace(secret("WANDB_API_KEY") or "\0", "***")
            warnings.warn(f"{self.service} logging stopped, training goes on ({reason})", stacklevel=2)

    def _log(self, event: dict, trainer) -> None:
        if event["event"] == "start":
            self._start(event, trainer)
        if event["event"] == "skip":
            self._skipped += 1
            event = {**event, "count": self._skipped}
        self._write(_numbers(event), event)
        if event["event"] == "end":
            self._end()

    @abstractmethod
    def _start(self, event: dict, trainer) -> None:
        """Open the log of a run."""

    @abstractmethod
    def _write(self, numbers: dict[str, float], event: dict) -> None:
        """Add the numbers of one event."""

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

    def _start(self, event: dict, trainer) -> None:
        # Output of the notebook is not captured and code is not sent: either could hold what is private.
        settings = self._wandb.Settings(
            console="off", silent=self.mode != "online", save_code=False, disable_git=True, init_timeout=30,
            api_key=secret("WANDB_API_KEY") if self.mode == "online" else None,
        )  # fmt: skip
        self._run = self._wandb.init(
            project=self.project, name=self.name, id=_identity(trainer), mode=self.mode, settings=settings,
            resume="allow" if self.mode == "online" else None, config=_settings(event, trainer),
            dir=os.environ.get("WANDB_DIR") or str(trainer.run.path),
        )  # fmt: skip
        # Not wandb's own step, which may never fall: a rollback goes back to an earlier update.
        self._run.define_metric("*", step_metric="update")

    def _write(self, numbers: dict[str, float], event: dict) -> None:
        if numbers and self._run is not None:
            self._run.log({**numbers, "update": event.get("update", 0)})

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

    def _start(self, event: dict, trainer) -> None:
        if self.folder is None:
            self.folder = trainer.run.path / "tensorboard"
        # What an interrupted run logged beyond its last checkpoint comes again: hide the former curve there.
        self._writer = self._open(str(self.folder), purge_step=event.get("update", 0) + 1)
        text = json.dumps(_settings(event, trainer), indent=1, default=str)
        self._writer.add_text("start", f"```json\n{text}\n```", event.get("update", 0))

    def _write(self, numbers: dict[str, float], event: dict) -> None:
        if self._writer is None:
            return
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, event.get("update", 0))
        if event["event"] != "update":
            self._writer.flush()

    def _end(self) -> None:
        self._writer.close()


def _numbers(event: dict) -> dict[str, float]:
    kind = event["event"]
    numbers = {key: value for key, value in event.items() if type(value) in (int, float) and key != "update"}
    return {f"{kind}/{key}": value for key, value in numbers.items()} if kind != "start" else {}


def _settings(event: dict, trainer) -> dict:
    """What is to be known of a run beside its curves."""
    return {"plan": trainer.plan.to_dict(), **{key: value for key, value in event.items() if key != "event"}}


def _identity(trainer) -> str:
    """The id of this run at wandb, kept in the run folder so that a resumed run keeps it."""
    file = trainer.run.path / "wandb_id.txt"
    if not file.is_file():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()
