"""Solving dx/dt = v(t, x) from noise at t = 0 to speech at t = 1: the times to visit, and the steps between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Empirically pruned step sampling (EPSS): small steps first, in 1/32. Values published with F5-TTS (arXiv 2505.19931).
_EPSS = {
    5: (0, 2, 4, 8, 16, 32),
    6: (0, 2, 4, 6, 8, 16, 32),
    7: (0, 2, 4, 6, 8, 16, 24, 32),
    10: (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32),
    12: (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32),
    16: (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32),
}


def time_grid(steps: int, sway: float | None = -1.0, epss: bool = True, dtype=torch.float32) -> Tensor:
    """Times from 0 to 1, (steps + 1,).

    `sway` bends the grid towards t = 0, where the outline of the sentence is decided (F5-TTS paper, equation 7):
    t + s (cos(pi/2 t) - 1 + t); None leaves it. `epss` takes the published pruned grid for 5, 6, 7, 10, 12 and 16
    steps before the bend.
    """
    if epss and steps in _EPSS:
        t = torch.tensor(_EPSS[steps], dtype=dtype) / 32
    else:
        t = torch.linspace(0, 1, steps + 1, dtype=dtype)
    if sway is not None:
        t = t + sway * (torch.cos(torch.pi / 2 * t) - 1 + t)
    return t


def integrate(velocity: Callable, x: Tensor, times: Tensor, method: str = "euler") -> Iterator[Tensor]:
    """Yield x at times[1], times[2], ... from x at times[0].

    `velocity(t, x)` gets a scalar tensor and the state. "euler" is ours; any other method is torchdiffeq's of that
    name ("midpoint", "rk4", "dopri5", ...), which takes each interval of the grid as one step or, if it is adaptive,
    as one solve.
    """
    if method != "euler":
        from torchdiffeq import odeint

    for t0, t1 in zip(times[:-1], times[1:], strict=True):
        if method == "euler":
            x = x + (t1 - t0) * velocity(t0, x)
        else:
            x = odeint(velocity, x, torch.stack((t0, t1)), method=method)[-1]
        yield x
