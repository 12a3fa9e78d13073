"""What several training processes have to agree on: who trains on which clips, one gradient, one decision.

The gradient is summed once an update, after all of its parts: so a process that ran out of memory can do its parts
again in smaller ones, and processes may have different numbers of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET = 1 << 23  # values that travel at once


def shares(frames: Sequence[int], processes: int) -> list[list[int]]:
    """Places in a batch for each process, so that all have nearly the same number of frames: longest first, each to
    the process with the least so far. Depends on the lengths alone."""
    mine: list[list[int]] = [[] for _ in range(processes)]
    load = [0] * processes
    for place in sorted(range(len(frames)), key=lambda i: -frames[i]):
        least = load.index(min(load))
        mine[least].append(place)
        load[least] += frames[place]
    return [sorted(places) for places in mine]


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give every process the sum of all processes' gradients. Does nothing where there is one process."""
    if not together():
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:  # no clip here, or none that reached it
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        if sum(grad.numel() for grad in bucket) >= _BUCKET:
            _sum(bucket)
            bucket = []
    if bucket:
        _sum(bucket)


def _sum(grads: Sequence[Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def highest(value: float, device: torch.device) -> float:
    """The largest of all processes' values."""
    if not together():
        return value
    tensor = torch.tensor(float(value), dtype=torch.float32, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def total(value: float, device: torch.device) -> float:
    """The sum of all processes' values."""
    if not together():
        return value
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.item()


def leave() -> None:
    """Part from the others: at the interpreter's end a thread that serves them may be cut off and abort the process."""
    if joined():
        dist.destroy_process_group()


def together() -> bool:
    """Whether there are other processes."""
    return joined() and dist.get_world_size() > 1


def joined() -> bool:
    """Whether this process has met others, or would have."""
    return dist.is_available() and dist.is_initialized()
