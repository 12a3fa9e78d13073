"""What moves the weights: optimizers, the learning-rate schedule, and the running average (EMA)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from f5kit.config import TrainConfig
from f5kit.errors import UserError


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, fused, or bitsandbytes' AdamW8bit (2 bytes of state a parameter in place of 8), paged or not."""
    common = dict(lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **common)
    try:
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
    except ImportError:
        raise UserError(
            f'"{config.optimizer}" needs bitsandbytes: pip install bitsandbytes, or choose "adamw"'
        ) from None
    kind = {"adamw8bit": AdamW8bit, "paged_adamw8bit": PagedAdamW8bit}[config.optimizer]
    return kind(parameters, **common)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state, flat: "<parameter>/<entry>", ready for safetensors.

    bitsandbytes shares its quantisation maps between parameters and nests them in its own state dict; here each entry
    stands alone, on the CPU, so that a full GPU can be saved; and plain numbers become tensors.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{name}/{entry}": value.to("cpu", copy=True) if torch.is_tensor(value) else torch.tensor(value)
        for name, parameter in zip(names, parameters, strict=True)
        for entry, value in optimizer.state[parameter].items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` took, on the parameters' devices."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_name = dict(zip(names, parameters, strict=True))
    eight_bit = not isinstance(optimizer, torch.optim.AdamW)
    for key, value in tensors.items():
        name, entry = key.rsplit("/", 1)
        parameter = by_name[name]
        if entry == "step" and eight_bit:
            optimizer.state[parameter][entry] = int(value)
        elif entry.startswith("state") and getattr(optimizer, "is_paged", False):
            paged = optimizer.get_state_buffer(parameter, dtype=value.dtype)  # memory that can leave the GPU
            optimizer.state[parameter][entry] = paged.copy_(value.view_as(paged))
        else:
            optimizer.state[parameter][entry] = value.to(parameter.device).clone()


def learning_rate(update: int, config: TrainConfig) -> float:
    """The rate for the update that follows `update` applied ones: a linear rise to the peak, then linearly to 0.

    It depends on nothing else, so a resumed run needs no stored schedule.
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / (config.warmup_updates + 1)
    left = (config.updates - update) / max(config.updates - config.warmup_updates, 1)
    return config.learning_rate * max(left, 0.0)


class EMA:
    """A running average of the weights that are trained, started at the weights it is given.

    After u updates the average forgets at 1 - 1/horizon, and faster before that, at (1 + u) / (10 + u), so that the
    weights it started from are soon gone: a finetune must not be judged by its pretrained past. `device` is where it
    is kept; None: beside the weights.
    """

    def __init__(self, model: nn.Module, horizon: int, device: str | None = None):
        self.horizon = horizon
        self.weights = {n: p.detach().to(device or p.device, copy=True) for n, p in trained_parameters(model)}

    def decay(self, update: int) -> float:
        return min(1 - 1 / self.horizon, (1 + update) / (10 + update))

    def start_share(self, update: int) -> float:
        """How much of the average is still the weights it started from, after that many updates: 0 to 1."""
        return math.prod(self.decay(u) for u in range(1, update + 1))

    @torch.no_grad()
    def follow(self, model: nn.Module, update: int) -> None:
        """Move the average towards the model's weights, after the update of that number."""
        weight = 1 - self.decay(update)
        for name, parameter in trained_parameters(model):
            average = self.weights[name]
            average.lerp_(parameter.detach().to(average.device), weight)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the average and the model's weights; a second call puts them back."""
        for name, parameter in trained_parameters(model):
            kept = parameter.detach().clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(kept)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by name: all of them, or the adapters alone."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
