"""What is done when an update is not finite, or does not fit into memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from f5kit.config import TrainConfig
from f5kit.errors import UserError

IN_A_ROW = 20  # updates that are not finite, until the run goes back to its last checkpoint
SCALE_FLOOR = 1.0  # a loss scale below this does not help any more


@dataclass
class Recovery:
    """The state of the run's troubles, kept in every checkpoint.

    A single bad update is skipped. After IN_A_ROW of them the weights go back to the last checkpoint and the learning
    rate is halved; when that was in vain, they go back once more and the run continues in fp32; after that it ends.
    """

    rate_factor: float = 1.0
    """The schedule's rate is multiplied by this."""
    in_a_row: int = 0
    returns: int = 0
    """How often the run went back since its last checkpoint."""
    precision: str | None = None
    """"fp32" once the run has had to leave its own."""

    def to_dict(self) -> dict:
        return asdict(self)

    def judge(self, loss: float, norm: float, scaler: torch.amp.GradScaler | None) -> str:
        """"apply" the update, "skip" it, go "back", or, after a mere overflow of fp16, try it "again".

        An overflow with a finite loss says only that the loss scale is too high, as long as it can fall.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return "apply"
        if scaler and math.isfinite(loss) and scaler.get_scale() > SCALE_FLOOR:
            return "again"
        self.in_a_row += 1
        return "back" if self.in_a_row >= IN_A_ROW else "skip"

    def go_back(self, precision: str) -> None:
        """Decide with what the run goes on from its last checkpoint. Raises UserError when that was tried in vain."""
        self.in_a_row = 0
        self.returns += 1
        if self.returns > 2:
            raise UserError(
                f"{IN_A_ROW} updates in a row were not finite, also after going back twice: look at the clips that the "
                "skip events in events.jsonl name, or plan a run with a tenth of the learning rate"
            )
        if self.returns == 2 and precision != "fp32":
            self.precision = "fp32"
        else:
            self.rate_factor /= 2

    def saved(self) -> None:
        """A checkpoint was written: the next trouble is a new one."""
        self.returns = 0


def shortage_of(error: BaseException) -> str:
    """What an error says of memory, on whatever device. Any other error is raised again."""
    said = str(error)
    signs = ("out of memory", "DefaultCPUAllocator: can't allocate", "CUBLAS_STATUS_ALLOC_FAILED")
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or any(sign in said for sign in signs):
        return (said or type(error).__name__).splitlines()[0]
    raise error


def would_fit(frames: int, config: TrainConfig) -> str:
    """What the user can do about a clip of so many frames that does not fit into memory by itself."""
    remedies = [f"prepare the data with max_seconds={max(frames / 93.75 / 2, 1):.0f}"]
    if config.checkpointing != "full":
        remedies.append('plan with checkpointing="full"')
    if config.optimizer != "adamw8bit":
        remedies.append('with optimizer="adamw8bit"')
    return ", or ".join([*remedies, "take a smaller model"])
