"""What moves the weights: optimizers, the learning-rate schedule, and the running average (EMA)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from f5kit.config import TrainConfig
from f5kit.errors import UserError


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, fused, or bitsandbytes' AdamW8bit (2 bytes of state a parameter in place of 8)."""
    common = dict(lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **common)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise UserError('"adamw8bit" needs bitsandbytes: pip install bitsandbytes, or choose "adamw"') from None
    return AdamW8bit(parameters, **common)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state, flat: "<parameter>/<entry>", ready for safetensors.

    bitsandbytes shares its quantisation maps between parameters and nests them in its own state dict; here each entry
    stands alone, and plain numbers become tensors.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{name}/{entry}": value.clone() if torch.is_tensor(value) else torch.tensor(value)
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
    """A running average of the weights, started at the weights it is given.

    After u updates the average forgets at 1 - 1/horizon, and faster before that, at (1 + u) / (10 + u), so that the
    weights it started from are soon gone: a finetune must not be judged by its pretrained past.
    """

    def __init__(self, model: nn.Module, horizon: int):
        self.horizon = horizon
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def decay(self, update: int) -> float:
        return min(1 - 1 / self.horizon, (1 + update) / (10 + update))

    def start_share(self, update: int) -> float:
        """How much of the average is still the weights it started from, after that many updates: 0 to 1."""
        return math.prod(self.decay(u) for u in range(1, update + 1))

    @torch.no_grad()
    def follow(self, model: nn.Module, update: int) -> None:
        """Move the average towards the model's weights, after the update of that number."""
        weight = 1 - self.decay(update)
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), weight)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the average and the model's weights; a second call puts them back."""
        for name, parameter in model.named_parameters():
            kept = parameter.detach().clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(kept)
