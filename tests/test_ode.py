"""The solver against velocity fields whose paths are known, and the published time grids."""

import math

import pytest
import torch

from f5kit.ode import integrate, time_grid

X0 = torch.tensor([[1.0, -2.0]], dtype=torch.float64)


def solve(velocity, steps=8, method="euler", **grid):
    *_, x = integrate(velocity, X0, time_grid(steps, dtype=torch.float64, **grid), method)
    return x


@pytest.mark.parametrize("method", ["euler", "midpoint", "rk4"])
@pytest.mark.parametrize("sway", [None, -1.0])
def test_a_constant_field_moves_by_its_constant(method, sway):
    assert torch.allclose(solve(lambda t, x: torch.full_like(x, 3.0), method=method, sway=sway), X0 + 3, atol=1e-12)


def test_a_field_linear_in_t_is_exact_at_second_order():
    """dx/dt = 2t: x moves by 1. Midpoint is exact; Euler over n equal steps falls short by exactly 1/n."""
    field = lambda t, x: torch.full_like(x, 2.0) * t  # noqa: E731
    assert torch.allclose(solve(field, method="midpoint"), X0 + 1, atol=1e-12)
    assert torch.allclose(solve(field, steps=8, sway=None), X0 + 1 - 1 / 8, atol=1e-12)


def test_straight_lines_to_data_are_followed_exactly():
    """The flow the model learns: v = x1 - x0, constant on each line. One Euler step is enough."""
    x1 = torch.tensor([[5.0, 7.0]], dtype=torch.float64)
    assert torch.allclose(solve(lambda t, x: x1 - X0, steps=1), x1, atol=1e-12)


def test_exponential_growth_converges_at_the_order_of_the_method():
    def error(steps, method):
        return (solve(lambda t, x: x, steps, method, sway=None, epss=False) - X0 * math.e).abs().max()

    for method, order in (("euler", 1), ("midpoint", 2), ("rk4", 4)):
        assert (error(20, method) / error(40, method)).log2().item() == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("steps", [1, 5, 6, 7, 10, 12, 16, 32, 50])
@pytest.mark.parametrize("sway", [None, -1.0, 0.5])
def test_grids_rise_from_0_to_1(steps, sway):
    t = time_grid(steps, sway)
    assert len(t) == steps + 1
    assert t[0] == 0
    assert t[-1].item() == pytest.approx(1, abs=1e-6)
    assert (t.diff() > 0).all()


def test_sway_follows_its_equation():
    t = torch.linspace(0, 1, 9)
    assert torch.allclose(time_grid(8, -1.0), t - (torch.cos(math.pi / 2 * t) - 1 + t))


def test_seven_steps_are_the_published_pruned_grid():
    assert (time_grid(7, None) * 32).tolist() == [0, 2, 4, 6, 8, 16, 24, 32]
    assert torch.allclose(time_grid(7, None, epss=False), torch.linspace(0, 1, 8))
