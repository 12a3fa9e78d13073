"""Adapters (LoRA): a finetune that leaves the weights alone and learns a small difference to each of them.

A linear layer W gets two thin matrices and becomes W + (alpha / rank) up @ down; `up` starts at zero, so that the model
starts as it was. They sit on the projections of attention and on both layers of the feed-forwards, in every backbone.
What is trained is below one hundredth of the model: so are gradients, optimizer state and averages, and the file.

Source: LoRA, arXiv 2106.09685. peft would do it too; it brings transformers (126 MB), puts a wrapper between a layer
and its published name, and does not know the averages and the resume of our trainer: these lines do.

The file (safetensors) holds "<name of the layer>.lora_down" and ".lora_up"; its metadata the rank, alpha, the name of
the base's config and a hash of the base's weights, so that it can't land on another model unseen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f5kit.errors import UserError
from f5kit.weights import TensorFile, read_tensors, write_tensors

ALPHA = 2.0  # times the rank: how loudly the adapters speak at the learning rate of LoRA
_TARGETS = re.compile(  # upstream's names: attention of frames and of text, feed-forwards
    r"\.(to_q|to_k|to_v|to_out\.0|to_q_c|to_k_c|to_v_c|to_out_c|(ff|ff_x|ff_c|4)\.ff\.(0\.0|2))$"
)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter beside its weight, under the same name; the weight itself is frozen."""

    lora_down: nn.Parameter
    """rank, in channels."""
    lora_up: nn.Parameter
    """out channels, rank."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_down), self.lora_up)

    def difference(self) -> Tensor:
        """What the adapter adds to the weight (out, in)."""
        return self.scale * (self.lora_up @ self.lora_down)


def add_adapters(model: nn.Module, rank: int, alpha: float | None = None, seed: int = 0) -> nn.Module:
    """Freeze the model and give each attention and feed-forward layer an adapter, in place. Returns the model.

    alpha is 2 * rank by default. The start depends on the seed and the layer's name alone. Raises UserError for a rank
    below 1, and for a model that has adapters already or no layer to adapt.
    """
    if rank < 1:
        raise UserError(f"an adapter's rank is {rank}: it must be at least 1; 4 to 32 is usual")
    if adapted_layers(model):
        raise UserError("the model has adapters already: merge them (f5kit.lora.merge_adapters) or load it afresh")
    model.requires_grad_(False)
    targets = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and _TARGETS.search(f".{n}")]
    if not targets:
        raise UserError(f"{type(model).__name__} has no attention or feed-forward layer to put an adapter on")
    for name, layer in targets:
        layer.__class__ = AdaptedLinear  # its weight and bias stay where they are, under their names
        layer.rank, layer.scale = rank, (alpha or ALPHA * rank) / rank
        down = layer.weight.new_empty(rank, layer.in_features)
        if not down.is_meta:
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            g = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            down.copy_(torch.randn(down.shape, generator=g) / layer.in_features**0.5)
        layer.lora_down = nn.Parameter(down)
        layer.lora_up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
    return model


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers with adapters by their names; empty for a model without."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}


@torch.no_grad()
def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with its adapters merged, under published names: new tensors, on the CPU. The model stays as
    it is."""
    state = {k: t for k, t in model.state_dict().items() if not k.endswith((".lora_down", ".lora_up"))}
    merged = {f"{name}.weight": layer.weight + layer.difference() for name, layer in adapted_layers(model).items()}
    return {k: merged.get(k, t).detach().to("cpu", copy=True) for k, t in state.items()}


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Add every adapter to its weight and take it away, in place: a plain model that says the same. Returns it."""
    for layer in adapted_layers(model).values():
        layer.weight += layer.difference()
        del layer.lora_down, layer.lora_up
        layer.__class__ = nn.Linear
    return model.requires_grad_(True)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, by the names they have in the file."""
    return {k: t for k, t in model.state_dict().items() if k.endswith((".lora_down", ".lora_up"))}


def save_adapters(model, path: str | Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write a model's adapters to a .safetensors file, in `dtype`; a few MB for a rank of 8. Returns its path."""
    if not adapted_layers(model):
        raise UserError(f"there are no adapters to save in {path}: train with lora_rank, or call add_adapters first")
    write_tensors(path, {k: t.to(dtype) for k, t in adapter_tensors(model).items()}, about_adapters(model))
    return Path(path)


def about_adapters(model) -> dict[str, str]:
    """What the file's metadata says of a CFM's adapters."""
    layer = next(iter(adapted_layers(model).values()))
    return {"format": "f5kit-lora", "rank": str(layer.rank), "alpha": str(layer.scale * layer.rank),
            "base": model.config.name, "base_hash": base_hash(model)}  # fmt: skip


@torch.no_grad()
def load_adapters(model, path: str | Path) -> nn.Module:
    """Put the adapters of a file on the base they were trained on, in place; `merge_adapters` makes it plain again.

    Raises UserError for a file that holds none, and for another base than theirs.
    """
    about = TensorFile(path).metadata
    if about.get("format") != "f5kit-lora":
        raise UserError(f"{path} is no adapter of f5kit: name the adapter.safetensors of a run or an export")
    if about["base_hash"] != base_hash(model):
        raise UserError(
            f"{path} was trained on other weights of {about['base']} than {model.origin}: load the base it belongs to"
        )
    add_adapters(model, int(about["rank"]), float(about["alpha"]))
    put_adapters(model, read_tensors(path))
    return model


@torch.no_grad()
def put_adapters(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a model's adapters the values of `adapter_tensors`. Raises UserError where they do not fit."""
    for name, parameter in _adapters(model):
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise UserError(f"these are adapters of another model: {name} is missing among them or of another shape")
        parameter.copy_(tensors[name])


def base_hash(model) -> str:
    """A hash of a model's frozen weights: of the first and the last of the layers that adapters sit on."""
    state = model.state_dict()
    names = [name for name in state if name.endswith(".weight") and _TARGETS.search("." + name[: -len(".weight")])]
    digest = hashlib.sha256()
    for name in (names[0], names[-1]):
        digest.update(name.encode() + state[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((n, p) for n, p in model.named_parameters() if n.endswith((".lora_down", ".lora_up")))
