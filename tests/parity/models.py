"""The same model twice, upstream's and f5kit's, and inputs for both.

    b  items    n  mel frames    d  mel bins    nt  text tokens
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from f5kit.audio import import_torchaudio
from f5kit.cfm import CFM, Draws
from f5kit.config import ModelConfig
from f5kit.data import Batch, collate

sys.path.insert(0, str(Path(__file__).parents[1]))
from structures import VOCAB, letters  # noqa: E402

import_torchaudio()  # f5_tts imports it, and beside a CPU build of torch a plain import fails
from f5_tts.model import CFM as UpstreamCFM  # noqa: E402
from f5_tts.model import DiT, MMDiT, UNetT  # noqa: E402

UPSTREAM = {"dit": DiT, "unett": UNetT, "mmdit": MMDiT}
# f5kit's names of what upstream's backbones are built from, with upstream's own name where it differs
_ALL = {k: k for k in "dim depth heads dim_head ff_mult text_mask_padding qk_norm dropout".split()}
_TEXT_BESIDE_MEL = _ALL | {k: k for k in ("text_dim", "conv_layers", "pe_attn_head")}
ARGUMENTS = {
    "dit": _TEXT_BESIDE_MEL
    | {"long_skip_connection": "long_skip_connection", "average_upsampling": "text_embedding_average_upsampling"},
    "unett": _TEXT_BESIDE_MEL | {"skip_connect_type": "skip_connect_type"},
    "mmdit": _ALL,
}


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


def upstream_model(config: ModelConfig) -> UpstreamCFM:
    """Upstream's model of a config."""
    values = {theirs: getattr(config, ours) for ours, theirs in ARGUMENTS[config.backbone].items()}
    bins = config.mel.n_mels
    backbone = UPSTREAM[config.backbone](**values, mel_dim=bins, text_num_embeds=config.vocab_size)
    return UpstreamCFM(backbone, mel_spec_kwargs=dict(n_mel_channels=bins))


def f5kit_model(config: ModelConfig) -> CFM:
    """f5kit's model of a config."""
    return CFM(config, letters(config))


def exact_in_fp64(model: UpstreamCFM) -> UpstreamCFM:
    """Upstream's model in fp64, with nothing in it that rounds to fp32.

    Upstream reads torch "2.13" as 2.1 and takes its own norm, which rounds to fp32 inside. This is its own switch for
    torch's, so that a difference in fp64 is one of arithmetic and not of rounding.
    """
    for module in model.double().modules():
        if hasattr(module, "native_rms_norm"):
            module.native_rms_norm = True
    return model


@torch.no_grad()
def randomise(model: UpstreamCFM) -> None:
    """Fill what starts at 0 or 1, so that no path is switched off, and bring the velocity to unit scale."""
    backbone = model.transformer
    for name, parameter in backbone.named_parameters():
        if ("norm" in name and ".linear." in name) or name.startswith("proj_out."):
            parameter.normal_(0, 0.5 if name.endswith("bias") else 3 / backbone.dim**0.5)
        elif ".grn." in name:
            parameter.normal_(0, 0.5)
        elif "q_norm" in name or "k_norm" in name or name.endswith(".g"):
            parameter.normal_(1, 0.3)
    x = torch.randn(1, 50, model.num_channels, dtype=next(model.parameters()).dtype)
    scale = backbone(x, torch.randn_like(x), torch.randint(VOCAB, (1, 20)), x.new_tensor([0.5])).std()
    backbone.proj_out.weight /= scale
    backbone.proj_out.bias /= scale


def make_models(config: ModelConfig, dtype: torch.dtype) -> tuple[UpstreamCFM, CFM]:
    """Both models with the same fresh weights, in training mode (dropout is 0)."""
    theirs = upstream_model(config).to(dtype)
    randomise(theirs)
    if dtype == torch.float64:
        theirs = exact_in_fp64(theirs)
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


def upstream_noise(item: Item, n: int) -> Tensor:
    """What upstream's sampler starts from under the item's seed, for n frames."""
    torch.manual_seed(item.seed)
    return torch.randn(n, item.mel.shape[1], dtype=item.mel.dtype)


def make_item(
    rng: random.Random, dtype: torch.dtype, drops: tuple[bool, bool], frames=(32, 96), bins=100, long_text=False
) -> Item:
    """A clip of random length, with a seed under which upstream makes the wanted drops (audio, text)."""
    n = rng.randint(*frames)
    nt = rng.randint(n + 1, n + 30) if long_text else rng.randint(4, n // 2)
    mel = torch.randn(n, bins, dtype=dtype, generator=torch.Generator().manual_seed(rng.getrandbits(40)))
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


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    """The loss's gradient for each parameter, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def their_velocity(model: UpstreamCFM, item: Item) -> Tensor:
    """Upstream's backbone at one point of the flow, n d."""
    cond = item.mel.masked_fill(item.span[:, None], 0.0)[None]
    text = torch.tensor([item.text])
    drops = dict(drop_audio_cond=item.drop_audio, drop_text=item.drop_text)
    return model.transformer(x=item.noise[None], cond=cond, text=text, time=item.time[None], **drops)[0]


def our_velocity(model: CFM, batch: Batch, draws: Draws) -> Tensor:
    """The same of a padded batch, b n d."""
    n = batch.mel.shape[1]
    cond = batch.mel.masked_fill((draws.span | draws.drop_audio[:, None])[..., None], 0.0)
    text = model.transformer.embed_text(batch.text, n, batch.mask, draws.drop_text)
    return model.transformer(draws.noise, cond, text, draws.time, batch.mask)


def their_loss(model: UpstreamCFM, item: Item) -> Tensor:
    """Upstream's own training forward: it draws for itself, so its randomness is set to the item's."""
    torch.manual_seed(item.seed)
    random.seed(item.seed)
    return model(item.mel[None], torch.tensor([item.text]))[0]


def their_mean_loss(model: UpstreamCFM, items: list[Item]) -> Tensor:
    """The mean over all missing frames of the items, each run alone."""
    return sum(their_loss(model, i) * i.span.sum() for i in items) / sum(i.span.sum() for i in items)
