"""Make tests/golden/ from the f5-tts package: what upstream computes of each structure, for tests/test_golden.py.

    .venv-parity/bin/python tests/parity/make_golden.py

Everything is computed in fp64 and seeded: the inputs by the number below, the weights by their names. Losses and
gradients stay fp64; velocities and samples are kept in fp32, of the frames that were made alone.
"""

from __future__ import annotations

import random
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from compare import GUIDANCE, STEPS, SWAY
from models import (
    Item,
    exact_in_fp64,
    f5kit_model,
    gradients,
    make_item,
    their_loss,
    their_mean_loss,
    their_velocity,
    upstream_model,
    upstream_noise,
)
from safetensors.torch import save_file
from structures import fill, slug, structures
from torch import Tensor

SEED = 20260
BINS = 20
FRAMES = (14, 22)
GOLDEN = Path(__file__).parents[1] / "golden"


def make_inputs() -> list[Item]:
    """Three clips: nothing withheld, the mel withheld, mel and text withheld."""
    rng = random.Random(SEED)
    drops = ((False, False), (True, False), (True, True))
    return [make_item(rng, torch.float64, drop, FRAMES, BINS) for drop in drops]


def inputs_file(items: list[Item]) -> dict[str, Tensor]:
    """The items' fields by item and name."""
    found = {}
    for i, item in enumerate(items):
        for name in ("mel", "text", "noise", "time", "span", "drop_audio", "drop_text"):
            found[f"{i}.{name}"] = torch.as_tensor(getattr(item, name))
        found[f"{i}.start"] = upstream_noise(item, len(item.mel))  # where the sampler starts
    return found


def results(config, items: list[Item]) -> dict[str, Tensor]:
    """What upstream computes of the items, each alone."""
    weights = fill(f5kit_model(config)).state_dict()
    model = exact_in_fp64(upstream_model(config))
    model.load_state_dict(weights, strict=True)
    model.train()
    found = {"loss": torch.stack([their_loss(model, item).detach() for item in items])}
    slopes = gradients(model, their_mean_loss(model, items))
    slopes = [slopes[name] for name in sorted(slopes)]
    found["gradient.norm"] = torch.stack([g.norm() for g in slopes])
    found["gradient.slope"] = torch.stack([(g.flatten() * ramp(g)).sum() for g in slopes])
    with torch.no_grad():
        found["velocity"] = torch.cat([their_velocity(model, item) for item in items]).float()
    for steps in STEPS:
        made = []
        for item in items:
            n = len(item.mel)
            out, _ = model.sample(
                item.mel[None, : n // 3],
                torch.tensor([item.text]),
                n,
                steps=steps,
                cfg_strength=GUIDANCE,
                sway_sampling_coef=SWAY,
                seed=item.seed,
            )
            made.append(out[0, n // 3 :])
        found[f"sample.{steps}"] = torch.cat(made).float()
    return found


def ramp(g: Tensor) -> Tensor:
    """Weights from -1 to 1: with them a gradient's sum knows the sign and the place of each element."""
    return torch.linspace(-1, 1, g.numel(), dtype=g.dtype)


def main() -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.safetensors"):
        old.unlink()
    metadata = {"f5-tts": version("f5-tts"), "torch": torch.__version__, "seed": str(SEED)}
    items = make_inputs()
    save_file(inputs_file(items), GOLDEN / "inputs.safetensors", metadata)
    for name, config in structures(BINS).items():
        save_file(results(config, items), GOLDEN / f"{slug(name)}.safetensors", metadata)
        print(name, flush=True)
    print(f"{sum(f.stat().st_size for f in GOLDEN.iterdir()):,} bytes in {GOLDEN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
