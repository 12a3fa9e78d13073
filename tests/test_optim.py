"""Optimizers, schedule and EMA."""

import pytest
import torch
from torch import nn

from f5kit.config import TrainConfig
from f5kit.optim import EMA, build_optimizer, learning_rate, optimizer_tensors, restore_optimizer
from f5kit.weights import read_tensors, write_tensors


def config(**changes):
    values = dict(updates=100, learning_rate=1e-2, warmup_updates=10, update_frames=1, micro_frames=1, ema_horizon=10,
                  evaluate_every=1, save_every=1)  # fmt: skip
    return TrainConfig(**{**values, **changes})


def test_the_schedule_rises_to_its_peak_and_falls_to_nothing():
    rates = [learning_rate(u, config()) for u in range(101)]
    assert max(rates) == rates[10] == pytest.approx(1e-2)
    assert rates[0] > 0
    assert rates[100] == 0
    assert all(a < b for a, b in zip(rates[:10], rates[1:11], strict=True))
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_more_updates_rebuild_the_schedule():
    assert learning_rate(100, config(updates=200)) > 1e-3


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_optimizer_state_goes_through_a_file_and_steps_on_the_same(kind, tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))  # above bitsandbytes' 4096 values: really 8 bits

    def train(net, optimizer, steps, first=0):
        for i in range(first, first + steps):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i))
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()

    whole, resumed = model(), model()
    names = [name for name, _ in whole.named_parameters()]
    a = build_optimizer(whole.parameters(), config(optimizer=kind))
    train(whole, a, 5)
    resumed.load_state_dict(whole.state_dict())
    b = build_optimizer(resumed.parameters(), config(optimizer=kind))
    write_tensors(tmp_path / "optimizer.safetensors", optimizer_tensors(a, names))
    restore_optimizer(b, names, read_tensors(tmp_path / "optimizer.safetensors"))
    train(whole, a, 5, first=5)
    train(resumed, b, 5, first=5)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    if kind == "adamw8bit":
        assert any(t.dtype == torch.uint8 for t in optimizer_tensors(a, names).values())


def test_the_average_forgets_what_it_started_from():
    """After u updates with decays d_k, the share of the start is their product."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    ema = EMA(net, horizon=10)
    nn.init.ones_(net.weight)
    share = 1.0
    for u in range(1, 31):
        ema.follow(net, u)
        share *= ema.decay(u)
    assert 1 - ema.weights["weight"].item() == pytest.approx(share, abs=1e-6)
    assert share < 0.001, "three horizons leave next to nothing"


def test_swapping_twice_puts_everything_back():
    net = nn.Linear(3, 3)
    ema = EMA(net, 10)
    nn.init.ones_(net.weight)
    before = {k: v.clone() for k, v in ema.weights.items()}
    ema.swap(net)
    assert torch.equal(net.weight, before["weight"])
    ema.swap(net)
    assert (net.weight == 1).all()
    assert all(torch.equal(before[k], v) for k, v in ema.weights.items())
