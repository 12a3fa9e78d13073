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
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files

import torch
import yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from f5kit.audio import import_torchaudio
from f5kit.cfm import CFM, Draws
from f5kit.config import PRESETS, ModelConfig
from f5kit.data import Batch, collate
from f5kit.text import Tokenizer

import_torchaudio()  # f5_tts imports it, and beside a CPU build of torch a plain import fails
from f5_tts.model import CFM as UpstreamCFM  # noqa: E402
from f5_tts.model import DiT as UpstreamDiT  # noqa: E402

VOCAB = 60
SMALL = dict(backbone="dit", dim=64, depth=3, heads=2, dim_head=16, ff_mult=2, text_dim=32, conv_layers=2)
V0 = dict(text_mask_padding=False, pe_attn_head=1)
CASES = {
    "v0": V0,
    "v0 qk_norm": {**V0, "qk_norm": "rms_norm"},
    "v1": {},
    "v1 qk_norm": {"qk_norm": "rms_norm"},
    "v1 average_upsampling": {"average_upsampling": True},
    "v1 long_skip_connection": {"long_skip_connection": True},
}
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
STEPS = (7, 16, 32)
GUIDANCE, SWAY = 2.0, -1.0
PARAMETERS = {
    "F5TTS_v1_Base": 337_096_804,
    "F5TTS_Base": 337_096_804,
    "F5TTS_v1_Small": 159_228_772,
    "F5TTS_Small": 159_228_772,
}
# f5kit's names of what upstream's backbone is built from, with upstream's own name where it differs
ARGUMENTS = {
    name: name
    for name in "dim depth heads dim_head ff_mult text_dim conv_layers text_mask_padding pe_attn_head "
    "qk_norm dropout long_skip_connection".split()
} | {"average_upsampling": "text_embedding_average_upsampling"}
TYPE = {torch.float32: "fp32", torch.float64: "fp64"}


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
        print(f"{case:<24} {dtype:<5} {quantity:<38} {difference:>10.1e}  {bound:>7.0e}  {word}")


@dataclass
class Item:
    """One clip with everything that is drawn for it."""

    mel: Tensor
    """n d"""
    text: list[int]
    noise: Tensor
    """n d"""
    time: Tensor
    """scalar"""
    span: Tensor
    """n"""
    drop_audio: bool
    drop_text: bool
    seed: int
    """Upstream's training forward under this seed draws exactly the fields above."""


# --- models and inputs ------------------------------------------------------------------------------


def upstream_model(config: ModelConfig) -> UpstreamCFM:
    """Upstream's model of a config."""
    values = {theirs: getattr(config, ours) for ours, theirs in ARGUMENTS.items()}
    return UpstreamCFM(UpstreamDiT(**values, mel_dim=config.mel.n_mels, text_num_embeds=config.vocab_size))


def f5kit_model(config: ModelConfig) -> CFM:
    """f5kit's model of a config, with a vocabulary of as many letters as it asks for."""
    return CFM(config, Tokenizer([" ", *(chr(0x4E00 + i) for i in range(config.vocab_size - 1))]))


@torch.no_grad()
def randomise(model: UpstreamCFM) -> None:
    """Fill what starts at 0 or 1, so that no path is switched off, and bring the velocity to unit scale."""
    dit = model.transformer
    for name, parameter in dit.named_parameters():
        if ".attn_norm.linear." in name or "norm_out.linear." in name or name.startswith("proj_out."):
            parameter.normal_(0, 0.5 if name.endswith("bias") else 3 / dit.dim**0.5)
        elif ".grn." in name:
            parameter.normal_(0, 0.5)
        elif "q_norm" in name or "k_norm" in name:
            parameter.normal_(1, 0.3)
    x = torch.randn(1, 50, 100, dtype=next(model.parameters()).dtype)
    scale = dit(x, torch.randn_like(x), torch.randint(VOCAB, (1, 20)), x.new_tensor([0.5])).std()
    dit.proj_out.weight /= scale
    dit.proj_out.bias /= scale


def make_models(config: ModelConfig, dtype: torch.dtype) -> tuple[UpstreamCFM, CFM]:
    """Both models with the same fresh weights, in training mode (dropout is 0)."""
    theirs = upstream_model(config).to(dtype)
    randomise(theirs)
    if dtype == torch.float64:
        # Upstream reads torch "2.13" as 2.1 and takes its own norm, which rounds to fp32 inside. This is its
        # own switch for torch's, so that a difference in fp64 is one of arithmetic and not of rounding.
        for module in theirs.modules():
            if hasattr(module, "native_rms_norm"):
                module.native_rms_norm = True
    ours = f5kit_model(config).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs.train(), ours.train()


def upstream_draws(seed: int, mel: Tensor) -> dict:
    """What upstream's CFM.forward draws for one clip (n d) under a seed, drawn again in its order."""
    n = len(mel)
    torch.manual_seed(seed)
    random.seed(seed)
    share = torch.zeros(1).uniform_(0.7, 1.0)
    filled = int((share * n).long())
    start = int(((n - filled) * torch.rand_like(share)).long())
    noise = torch.randn_like(mel[None])[0]
    time = torch.rand(1, dtype=mel.dtype)[0]
    drop_audio = random.random() < 0.3
    drop_text = random.random() < 0.2
    position = torch.arange(n)
    span = (position >= start) & (position < start + filled)
    return dict(noise=noise, time=time, span=span, drop_audio=drop_audio or drop_text, drop_text=drop_text)


def make_item(rng: random.Random, dtype: torch.dtype, drops: tuple[bool, bool], long_text=False) -> Item:
    """A clip of random length, with a seed under which upstream makes the wanted drops (audio, text)."""
    n = rng.randint(32, 96)
    nt = rng.randint(n + 1, n + 30) if long_text else rng.randint(4, n // 2)
    mel = torch.randn(n, 100, dtype=dtype, generator=torch.Generator().manual_seed(rng.getrandbits(40)))
    text = [rng.randrange(VOCAB) for _ in range(nt)]
    while True:
        seed = rng.getrandbits(31)
        draws = upstream_draws(seed, mel)
        if (draws["drop_audio"], draws["drop_text"]) == drops:
            return Item(mel, text, seed=seed, **draws)


def as_batch(items: list[Item]) -> tuple[Batch, Draws]:
    """The items as f5kit's padded batch, with the same draws."""
    places = range(len(items))
    batch = collate([i.mel for i in items], [i.text for i in items], map(str, places), 0, places)
    draws = Draws(
        noise=pad_sequence([i.noise for i in items], batch_first=True),
        time=torch.stack([i.time for i in items]),
        span=pad_sequence([i.span for i in items], batch_first=True),
        drop_audio=torch.tensor([i.drop_audio for i in items]),
        drop_text=torch.tensor([i.drop_text for i in items]),
    )
    return batch, draws


# --- what is compared -------------------------------------------------------------------------------


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the scale (root mean square) of theirs."""
    return ((ours - theirs).abs().max() / theirs.square().mean().sqrt()).item()


def largest(differences) -> float:
    """The largest of some numbers, NaN if there is one (the built-in max may pass over it)."""
    return torch.tensor(list(differences), dtype=torch.float64).max().item()


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def worst_gradient(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return largest((ours[k] - g).norm() / g.norm() for k, g in theirs.items())


def their_velocity(model: UpstreamCFM, item: Item) -> Tensor:
    """The backbone at one point of the flow, n d."""
    cond = item.mel.masked_fill(item.span[:, None], 0.0)[None]
    text = torch.tensor([item.text])
    drops = dict(drop_audio_cond=item.drop_audio, drop_text=item.drop_text)
    return model.transformer(x=item.noise[None], cond=cond, text=text, time=item.time[None], **drops)[0]


def our_velocity(model: CFM, items: list[Item]) -> Tensor:
    """The same of a padded batch, b n d."""
    batch, draws = as_batch(items)
    n = batch.mel.shape[1]
    cond = batch.mel.masked_fill((draws.span | draws.drop_audio[:, None])[..., None], 0.0)
    text = model.transformer.embed_text(batch.text, n, batch.mask, draws.drop_text)
    return model.transformer(draws.noise, cond, text, draws.time, batch.mask)


def their_loss(model: UpstreamCFM, item: Item) -> Tensor:
    """Upstream's own training forward: it draws for itself, so its randomness is set to the item's."""
    torch.manual_seed(item.seed)
    random.seed(item.seed)
    return model(item.mel[None], torch.tensor([item.text]))[0]


def compare_training(table: Table, case: str, models, items: list[Item], what: str) -> None:
    """Velocity, loss and gradients: upstream once per item, f5kit all in one batch."""
    theirs, ours = models
    dtype = items[0].mel.dtype
    name, bound = TYPE[dtype], BOUND[dtype]
    with torch.no_grad():
        velocity = our_velocity(ours, items)
        pairs = [(v[: len(i.mel)], their_velocity(theirs, i)) for v, i in zip(velocity, items, strict=True)]
    table.add(case, name, f"{what}: velocity", largest(relative(*pair) for pair in pairs), bound)

    batch, draws = as_batch(items)
    count = draws.span.sum()
    our_loss = ours(batch, draws) / (count * batch.mel.shape[-1])
    their_mean = sum(their_loss(theirs, i) * i.span.sum() for i in items) / count
    table.add(case, name, f"{what}: loss", relative(our_loss.detach(), their_mean.detach()), bound)
    worst = worst_gradient(gradients(ours, our_loss), gradients(theirs, their_mean))
    table.add(case, name, f"{what}: gradients", worst, bound)


def compare_samples(table: Table, case: str, models, items: list[Item], what: str) -> None:
    """Guided samples that continue a third of each item: upstream once per item, f5kit all in one batch."""
    theirs, ours = models
    dtype = items[0].mel.dtype
    prompts = [i.mel[: len(i.mel) // 3] for i in items]
    for steps in STEPS:
        options = dict(steps=steps, cfg_strength=GUIDANCE)
        *_, result = ours.sample(
            pad_sequence(prompts, batch_first=True),
            [i.text for i in items],
            [len(i.mel) for i in items],
            cond_lens=[len(p) for p in prompts],
            noise=pad_sequence([upstream_noise(i) for i in items], batch_first=True),
            sway=SWAY,
            **options,
        )
        found = []
        for item, prompt, ours_out in zip(items, prompts, result, strict=True):
            text, n = torch.tensor([item.text]), len(item.mel)
            out, _ = theirs.sample(prompt[None], text, n, seed=item.seed, sway_sampling_coef=SWAY, **options)
            found.append(relative(ours_out[len(prompt) : n], out[0, len(prompt) :]))
        table.add(case, TYPE[dtype], f"{what}: sample, {steps} steps", largest(found), BOUND[dtype])


def upstream_noise(item: Item) -> Tensor:
    """What upstream's sampler starts from under the item's seed."""
    torch.manual_seed(item.seed)
    return torch.randn(len(item.mel), 100, dtype=item.mel.dtype)


def compare_case(table: Table, case: str, dtype: torch.dtype, rng: random.Random) -> None:
    config = ModelConfig(case, **SMALL, **CASES[case], vocab_size=VOCAB)
    models = make_models(config, dtype)
    nothing, audio, both = (False, False), (True, False), (True, True)
    for what, drops in (("alone", nothing), ("alone, no mel", audio), ("alone, no mel or text", both)):
        compare_training(table, case, models, [make_item(rng, dtype, drops)], what)
    compare_training(table, case, models, [make_item(rng, dtype, nothing, long_text=True)], "text too long")
    four = [make_item(rng, dtype, drops) for drops in (nothing, nothing, audio, both)]
    compare_training(table, case, models, four, "batch of 4")
    compare_samples(table, case, models, four[:1], "alone")
    compare_samples(table, case, models, four, "batch of 4")


def compare_preset(table: Table, name: str) -> None:
    """A published preset on the meta device: the config upstream ships, names, shapes, number of weights."""
    config = PRESETS[name]
    shipped = files("f5_tts").joinpath(f"configs/{name}.yaml").read_text(encoding="utf-8")
    arch = yaml.safe_load(shipped)["model"]["arch"]
    known = {theirs: getattr(config, ours) for ours, theirs in ARGUMENTS.items() if ours != "dropout"}
    differing = {k: v for k, v in arch.items() if k in known and known[k] != v}
    table.add(name, "-", f"config fields that differ {differing or ''}", len(differing), 0)
    with torch.device("meta"):
        theirs, ours = upstream_model(config), f5kit_model(config)
    shapes = [{k: tuple(v.shape) for k, v in model.state_dict().items()} for model in (ours, theirs)]
    unequal = set(shapes[0].items()) ^ set(shapes[1].items())
    table.add(name, "-", f"{len(shapes[1])} names and shapes", len(unequal), 0)
    count = sum(p.numel() for p in ours.parameters())
    table.add(name, "-", f"{count:,} parameters", abs(count - PARAMETERS[name]), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    seed = parser.parse_args().seed
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"f5-tts {version('f5-tts')}, torch {torch.__version__}, seed {seed}")
    rng = random.Random(seed)
    table = Table()
    for name in PARAMETERS:
        compare_preset(table, name)
    for case in CASES:
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(rng.getrandbits(31))
            compare_case(table, case, dtype, rng)
    print(f"{table.rows} comparisons, {table.broken} above their bound")
    return 1 if table.broken else 0


if __name__ == "__main__":
    sys.exit(main())
