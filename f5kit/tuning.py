"""Speed on this machine: the number format to speak in, compiled code, and what the environment asks for.

    ENABLE_TORCH_COMPILE    true or false: compile the backbone, with CUDA graphs on a GPU
    ENABLE_CUDNN_BENCHMARK  true or false: let cuDNN try its convolutions out
    TORCH_MATMUL_PRECISION  high or highest: whether fp32 products may be taken in TF32 on a GPU
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from f5kit.cfm import CFM
from f5kit.errors import UserError
from f5kit.host import Decision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGE = 50_000_000  # parameters from which on a CPU gains by bf16: below, casting costs what the products save
BUCKET = 64  # frames: lengths are rounded up to these for compiled code, which is made for each length anew


def speaking_precision(
    parameters: int, device: str, capability: tuple[int, int] | None = None, cpu_flags: frozenset[str] | None = None
) -> Decision:
    """"fp32", "bf16" or "fp16" to speak in, with the reason.

    capability: of the CUDA device; cpu_flags: what the processor can do. Both are asked for when they are None.
    """
    if device == "cuda":
        capability = capability or torch.cuda.get_device_capability()
        sm = "sm_{}{}".format(*capability)
        if capability >= (8, 0):
            return Decision("bf16", f"{sm} computes bf16 natively")
        if capability >= (7, 0) or capability == (6, 0):  # 6.1, 6.2 know fp16 and are slower in it
            return Decision("fp16", f"{sm} has no native bf16, and is quicker in fp16 than in fp32")
        return Decision("fp32", f"{sm} is quickest in fp32")
    if device == "cpu" and parameters >= LARGE:
        flags = _cpu_flags() if cpu_flags is None else cpu_flags
        native = sorted(flags & {"amx_bf16", "avx512_bf16", "bf16"})
        if native:
            return Decision("bf16", f"the processor has {native[0]}")
        return Decision("fp32", "the processor has no bf16 instructions")
    return Decision("fp32", "exact, and quickest for a model of this size" if device == "cpu" else "exact")


def _cpu_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(word for line in lines if line.startswith(("flags", "Features")) for word in line.split()[2:])


def autocast(device: torch.device, precision: str):
    """The context in which a model with fp32 weights runs in that precision."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


def apply_environment(device: str) -> dict[str, str | bool]:
    """Set what the three variables ask for, for the whole process, and return their values.

    Unset, nothing is compiled and cuDNN tries nothing out; on a GPU products may be taken in TF32.
    Raises UserError for a value that none of them knows.
    """
    asked = {name: _truth(name) for name in ("ENABLE_TORCH_COMPILE", "ENABLE_CUDNN_BENCHMARK")}
    matmul = os.environ.get("TORCH_MATMUL_PRECISION", "")
    if matmul not in ("", "high", "highest"):
        raise UserError(f"TORCH_MATMUL_PRECISION is {matmul!r}; set it to high or highest, or leave it out")
    if matmul or device == "cuda":
        torch.set_float32_matmul_precision(matmul or "high")
    if asked["ENABLE_CUDNN_BENCHMARK"] is not None:
        torch.backends.cudnn.benchmark = asked["ENABLE_CUDNN_BENCHMARK"]
    return {**asked, "TORCH_MATMUL_PRECISION": matmul}


def _truth(name: str) -> bool | None:
    value = os.environ.get(name, "").lower()
    if value not in ("", "true", "false"):
        raise UserError(f"{name} is {value!r}; set it to true or false, or leave it out")
    return None if value == "" else value == "true"


def compile_backbone(model: CFM) -> None:
    """Compile a model's backbone in place, a DiT for lengths rounded up to BUCKET frames; on a GPU with CUDA graphs.

    The names of the weights stay. A second call does nothing.
    """
    backbone = model.transformer
    if "forward" in vars(backbone):
        return
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    if model.config.backbone == "dit":
        backbone.forward = in_buckets(torch.compile(backbone.forward, mode=mode, dynamic=False))
    else:  # their text is no row beside the frames, to be padded with them
        backbone.forward = torch.compile(backbone.forward, mode=mode)


def compile_blocks(model: CFM) -> None:
    """Compile a backbone's blocks in place, to be trained with batches of any shape.

    The blocks are alike, so code is made once, and not for each of them as a compiled backbone would have it.
    """
    backbone = model.transformer
    for block in backbone.layers if model.config.backbone == "unett" else backbone.transformer_blocks:
        block.compile(dynamic=True)


def in_buckets(forward: Callable) -> Callable:
    """A DiT's forward for inputs padded to a multiple of BUCKET frames, so that few lengths are met.

    Padding changes nothing, for every item sees its own frames alone.
    """

    def padded(x: Tensor, cond: Tensor, text: Tensor, time: Tensor, mask: Tensor | None) -> Tensor:
        n = x.shape[1]
        more = -n % BUCKET
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        x, cond, text = (F.pad(t, (0, 0, 0, more)) for t in (x, cond, text))
        return forward(x, cond, text, time, F.pad(mask, (0, more)))[:, :n].clone()  # a CUDA graph reuses its output

    return padded
