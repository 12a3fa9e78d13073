"""f5kit against what upstream computed: the files of tests/golden/, which tests/parity/make_golden.py makes.

Upstream ran each of three clips alone; f5kit has them here in one padded batch. Both in fp64, with the same weights
made from their names. The tables of frequencies are fp32 in both, and processors round the power function differently
in its last digit: between an AMD EPYC, which made the files, and an Intel Xeon with AVX-512 that alone makes 9e-6 of a
velocity's scale, and a little more of a gradient's. On one machine, `make parity` holds both to 1e-14.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structures import fill, letters, slug, structures
from torch.nn.utils.rnn import pad_sequence

from f5kit.cfm import CFM, Draws
from f5kit.data import collate

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parent / "golden"
TABLES = 3e-5  # what another processor's tables of frequencies may change
INPUTS = load_file(GOLDEN / "inputs.safetensors")
ITEMS = range(3)
STRUCTURES = structures(n_mels=20)


def inputs(name: str) -> list[torch.Tensor]:
    return [INPUTS[f"{i}.{name}"] for i in ITEMS]


LENGTHS = [len(mel) for mel in inputs("mel")]
TEXTS = [text.tolist() for text in inputs("text")]


@pytest.fixture(scope="module", params=STRUCTURES)
def golden(request):
    """(model, upstream's results)"""
    config = STRUCTURES[request.param]
    return fill(CFM(config, letters(config))), load_file(GOLDEN / f"{slug(request.param)}.safetensors")


def padded_batch():
    batch = collate(inputs("mel"), TEXTS, ["a", "b", "c"], 0, ITEMS)
    noise, span = (pad_sequence(inputs(name), batch_first=True) for name in ("noise", "span"))
    time, drop_audio, drop_text = (torch.stack(inputs(name)) for name in ("time", "drop_audio", "drop_text"))
    return batch, Draws(noise, time, span, drop_audio, drop_text)


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    difference = (ours - theirs).abs().max() / theirs.double().square().mean().sqrt()
    assert difference < bound, f"differs by {difference:.1e} of its scale"


def test_velocity(golden):
    model, theirs = golden
    batch, draws = padded_batch()
    cond = batch.mel.masked_fill((draws.span | draws.drop_audio[:, None])[..., None], 0.0)
    with torch.no_grad():
        text = model.transformer.embed_text(batch.text, batch.mel.shape[1], batch.mask, draws.drop_text)
        velocity = model.transformer(draws.noise, cond, text, draws.time, batch.mask)
    close(velocity[batch.mask], theirs["velocity"], TABLES)


def test_loss_and_gradients(golden):
    model, theirs = golden
    batch, draws = padded_batch()
    model.zero_grad()
    count = draws.span.sum(1) * batch.mel.shape[-1]
    loss = model(batch, draws) / count.sum()
    loss.backward()
    close(loss.detach(), (theirs["loss"] * count).sum() / count.sum(), TABLES)
    slopes = [p.grad.flatten() for _, p in sorted(model.named_parameters())]
    norms = torch.stack([g.norm() for g in slopes])
    sums = torch.stack([(g * torch.linspace(-1, 1, len(g), dtype=g.dtype)).sum() for g in slopes])
    scale = theirs["gradient.norm"].clamp(min=1e-30)
    assert ((norms - theirs["gradient.norm"]).abs() / scale).max() < TABLES
    assert ((sums - theirs["gradient.slope"]).abs() / scale).max() < TABLES, "equal norms, other elements"


@pytest.mark.parametrize("steps", [7, 16, 32])
def test_guided_samples(golden, steps):
    model, theirs = golden
    thirds = [n // 3 for n in LENGTHS]
    prompts = [mel[:own] for mel, own in zip(inputs("mel"), thirds, strict=True)]
    noise = [start[:n] for start, n in zip(inputs("start"), LENGTHS, strict=True)]
    *_, result = model.sample(
        pad_sequence(prompts, batch_first=True),
        TEXTS,
        LENGTHS,
        cond_lens=thirds,
        noise=pad_sequence(noise, batch_first=True),
        steps=steps,
        cfg_strength=2.0,
        sway=-1.0,
    )
    made = [out[own:n] for out, own, n in zip(result, thirds, LENGTHS, strict=True)]
    close(torch.cat(made), theirs[f"sample.{steps}"], TABLES)
