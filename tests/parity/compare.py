"""f5kit's models against the f5-tts package, live: fresh random weights, equal inputs, each difference.

    make parity                                  in an environment of its own
    python tests/parity/compare.py --seed 7      the run that printed seed 7

Upstream runs each item alone, because its padded batches differ from its single items; f5kit runs it alone
and in padded batches of 4. Differences are relative: the largest over the scale of the quantity, and for
gradients the norm of the difference over the norm, tensor by tensor. Exits 1 when a difference is above its
bound, and writes nothing.

    b  items    n  mel frames    d  mel bins    nt  text tokens
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from importlib.metadata import version
from importlib.resources import files

import torch
import yaml
from models import (
    ARGUMENTS,
    Item,
    as_batch,
    f5kit_model,
    gradients,
    make_item,
    make_models,
    our_velocity,
    their_mean_loss,
    their_velocity,
    upstream_model,
    upstream_noise,
)
from structures import structures
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from f5kit.config import PRESETS, ModelConfig

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
TYPE = {torch.float32: "fp32", torch.float64: "fp64"}
STEPS = (7, 16, 32)
GUIDANCE, SWAY = 2.0, -1.0
MMDIT = ModelConfig("MMDiT", "mmdit", dim=512, depth=16, heads=16, ff_mult=2, text_dim=512, conv_layers=0)
PARAMETERS = {
    "F5TTS_v1_Base": 337_096_804,
    "F5TTS_Base": 337_096_804,
    "F5TTS_v1_Small": 159_228_772,
    "F5TTS_Small": 159_228_772,
    "E2TTS_Base": 333_470_444,
    "E2TTS_Small": 157_161_708,
    "MMDiT": 152_025_700,
}


class Table:
    """Prints each comparison as it is made and counts those above their bound."""

    def __init__(self):
        self.rows = self.broken = 0
        print(f"{'case':<24} {'type':<5} {'quantity':<38} {'difference':>10}  {'bound':>7}  ok")

    def add(self, case: str, dtype: str, quantity: str, difference: float, bound: float) -> None:
        ok = difference <= bound  # false for NaN as well
        self.rows += 1
        self.broken += not ok
        word = "yes" if ok else "NO"
        print(f"{case:<24} {dtype:<5} {quantity:<38} {difference:>10.1e}  {bound:>7.0e}  {word}", flush=True)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the scale (root mean square) of theirs."""
    return ((ours - theirs).abs().max() / theirs.square().mean().sqrt()).item()


def largest(differences) -> float:
    """The largest of some numbers, NaN if there is one (the built-in max may pass over it)."""
    return torch.tensor(list(differences), dtype=torch.float64).max().item()


def worst_gradient(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor; one that is 0 (MMDiT's last text queries) must be 0 in both."""
    return largest((ours[k] - g).norm() / g.norm().clamp(min=1e-30) for k, g in theirs.items())


def compare_training(table: Table, case: str, models, items: list[Item], what: str) -> None:
    """Velocity, loss and gradients: upstream once per item, f5kit all in one batch."""
    theirs, ours = models
    dtype = items[0].mel.dtype
    name, bound = TYPE[dtype], BOUND[dtype]
    batch, draws = as_batch(items)
    with torch.no_grad():
        velocity = our_velocity(ours, batch, draws)
        pairs = [(v[: len(i.mel)], their_velocity(theirs, i)) for v, i in zip(velocity, items, strict=True)]
    table.add(case, name, f"{what}: velocity", largest(relative(*pair) for pair in pairs), bound)

    our_loss = ours(batch, draws) / (draws.span.sum() * batch.mel.shape[-1])
    their_mean = their_mean_loss(theirs, items)
    table.add(case, name, f"{what}: loss", relative(our_loss.detach(), their_mean.detach()), bound)
    worst = worst_gradient(gradients(ours, our_loss), gradients(theirs, their_mean))
    table.add(case, name, f"{what}: gradients", worst, bound)


def compare_samples(table: Table, case: str, models, items: list[Item], what: str, steps: int, kind: str) -> None:
    """Guided samples: upstream once per item, f5kit all in one batch.

    Kinds: "reference" continues a third of each item; "edited" makes the middle third anew; "no reference" has the text
    alone, which is compared behind the third that upstream leaves blank then; "midpoint" is another solver.
    """
    theirs, ours = models
    edited, alone = kind == "edited", kind == "no reference"
    lengths = [len(i.mel) for i in items]
    prompts = [i.mel if edited else i.mel[: len(i.mel) // 3] for i in items]
    keep = [torch.ones(len(p), dtype=torch.bool) for p in prompts]
    for k, n in zip(keep, lengths, strict=True):
        k[n // 3 : n - n // 3] = not edited
    ends = [n + edited for n in lengths]  # a sample is at least one frame longer than its reference
    options = dict(steps=steps, cfg_strength=GUIDANCE)
    method = "midpoint" if kind == "midpoint" else "euler"
    *_, result = ours.sample(
        None if alone else pad_sequence(prompts, batch_first=True),
        [i.text for i in items],
        lengths,
        cond_lens=None if alone else [len(p) for p in prompts],
        edit_mask=pad_sequence(keep, batch_first=True) if edited else None,
        noise=pad_sequence([upstream_noise(i, n) for i, n in zip(items, ends, strict=True)], batch_first=True),
        sway=SWAY,
        method=method,
        **options,
    )
    theirs.odeint_kwargs = dict(method=method)
    found = []
    for item, prompt, kept, n, ours_out in zip(items, prompts, keep, ends, result, strict=True):
        mask = dict(edit_mask=kept[None]) if edited else dict(no_ref_audio=alone)
        text = torch.tensor([item.text])
        out, _ = theirs.sample(prompt[None], text, n, seed=item.seed, sway_sampling_coef=SWAY, **mask, **options)
        made = torch.ones(n, dtype=torch.bool)
        made[: len(kept)] = ~kept
        found.append(relative(ours_out[:n][made], out[0, made]))
    table.add(case, TYPE[items[0].mel.dtype], f"{what}: {kind}, {steps} steps", largest(found), BOUND[out.dtype])


def compare_case(table: Table, config: ModelConfig, dtype: torch.dtype, rng: random.Random) -> None:
    case, models = config.name, make_models(config, dtype)
    nothing, audio, both = (False, False), (True, False), (True, True)
    for what, drops in (("alone", nothing), ("alone, no mel", audio), ("alone, no mel or text", both)):
        compare_training(table, case, models, [make_item(rng, dtype, drops)], what)
    compare_training(table, case, models, [make_item(rng, dtype, nothing, long_text=True)], "text too long")
    four = [make_item(rng, dtype, drops) for drops in (nothing, nothing, audio, both)]
    compare_training(table, case, models, four, "batch of 4")
    for what, items in (("alone", four[:1]), ("batch of 4", four)):
        for steps in STEPS:
            compare_samples(table, case, models, items, what, steps, "reference")
        for kind in ("edited", "no reference", "midpoint"):
            compare_samples(table, case, models, items, what, STEPS[0], kind)


def compare_preset(table: Table, name: str) -> None:
    """A published preset on the meta device: the config upstream ships, names, shapes, number of weights."""
    config = PRESETS.get(name, MMDIT)
    if name in PRESETS:
        shipped = files("f5_tts").joinpath(f"configs/{name}.yaml").read_text(encoding="utf-8")
        model = yaml.safe_load(shipped)["model"]
        arguments = ARGUMENTS[config.backbone].items()
        known = {theirs: getattr(config, ours) for ours, theirs in arguments if ours != "dropout"}
        differing = {k: v for k, v in model["arch"].items() if k in known and known[k] != v}
        differing |= {} if model["backbone"].lower() == config.backbone else {"backbone": model["backbone"]}
        table.add(name, "-", f"config fields that differ {differing or ''}", len(differing), 0)
    with torch.device("meta"):
        theirs, ours = upstream_model(config), f5kit_model(config)
    shapes = [{k: tuple(v.shape) for k, v in model.state_dict().items()} for model in (ours, theirs)]
    unequal = set(shapes[0].items()) ^ set(shapes[1].items())
    table.add(name, "-", f"{len(shapes[1])} names and shapes", len(unequal), 0)
    count = sum(p.numel() for p in ours.parameters())
    table.add(name, "-", f"{count:,} parameters", abs(count - PARAMETERS[name]), 0)


@torch.no_grad()
def deliberate_differences(rng: random.Random) -> None:
    """Where f5kit differs on purpose, with both numbers (a third one, spaces inside words, is in compare_text.py)."""
    theirs, ours = make_models(structures()["F5TTS_v1_Base"], torch.float32)
    items = [make_item(rng, torch.float32, (False, False)) for _ in range(4)]
    batch, draws = as_batch(items)
    cond = batch.mel.masked_fill(draws.span[..., None], 0.0)
    padded = theirs.transformer(x=draws.noise, cond=cond, text=batch.text, time=draws.time, mask=batch.mask)
    strays = []
    for velocities in (padded, our_velocity(ours, batch, draws)):
        pairs = zip(velocities, items, strict=True)
        strays.append(largest(relative(v[: len(i.mel)], their_velocity(theirs, i)) for v, i in pairs))
    print("deliberate: an item in a padded batch against the same item alone")
    print(f"  upstream {strays[0]:.1e}, f5kit {strays[1]:.1e}")

    n, dim = 2049, ours.config.dim_head
    exact = (n - 1) / 10_000 ** (torch.arange(0, dim, 2).double() / dim)  # radians at frame 2048
    half, _ = theirs.half().transformer.rotary_embed.forward_from_seq_len(n)
    their_error = (half.double().reshape(n, -1)[-1, ::2] - exact).abs().max()
    our_error = (ours.half().transformer.rotary_embed(n)[-1].real.double() - exact.cos()).abs().max()
    print("deliberate: rotary angles of a model in fp16, at frame 2048")
    print(f"  upstream errs by {their_error:.1e} radian, f5kit by {our_error:.1e} in their cosine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--case", help="compare the structures alone whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"f5-tts {version('f5-tts')}, torch {torch.__version__}, seed {arguments.seed}")
    rng = random.Random(arguments.seed)
    table = Table()
    for name in PARAMETERS:
        compare_preset(table, name)
    for case, config in structures().items():
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(rng.getrandbits(31))
            if not arguments.case or arguments.case in case:
                compare_case(table, config, dtype, rng)
    deliberate_differences(rng)
    print(f"{table.rows} comparisons, {table.broken} above their bound")
    return 1 if table.broken else 0


if __name__ == "__main__":
    sys.exit(main())
