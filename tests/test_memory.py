"""The memory that a plan counts on is what training takes: counted on the meta device, measured on real tensors."""

import weakref

import pytest
import torch

from f5kit.cfm import draw
from f5kit.checkpoint import fresh_model
from f5kit.config import PRESETS, TrainConfig
from f5kit.data import collate
from f5kit.lora import add_adapters
from f5kit.memory import GIB, MemoryModel, count_parameters, counted, footprint, simulate
from f5kit.text import Tokenizer
from f5kit.trial import try_update
from f5kit.tuning import autocast

pytestmark = pytest.mark.usefixtures("one_thread")

MEDIUM = PRESETS["F5TTS_v1_Small"].replace(name="medium", dim=256, depth=2, heads=4, text_dim=128, vocab_size=200)
CONFIGS = {
    "dit": MEDIUM,
    "dit v0": MEDIUM.replace(text_mask_padding=False, pe_attn_head=1),
    "dit by letters": PRESETS["tiny"].replace(letter_lengths=True, dim=128),
    "unett": MEDIUM.replace(backbone="unett", ff_mult=4, text_dim=100, conv_layers=0, text_mask_padding=False),
    "mmdit": MEDIUM.replace(backbone="mmdit", text_dim=256, conv_layers=0),
}
LENGTHS, TOKENS = (300, 299, 280), 40


def real_batch(config):
    g = torch.Generator().manual_seed(0)
    mels = [torch.randn(n, 100, generator=g) for n in LENGTHS]
    texts = [torch.randint(config.vocab_size, (TOKENS - i,), generator=g).tolist() for i in range(len(LENGTHS))]
    batch = collate(mels, texts, ["a"] * 3, 0, range(3))
    draws = draw(batch, 0)
    draws.span[:] = batch.mask  # every frame is asked for, as the count assumes
    return batch, draws


def real_model(config, checkpointing, lora_rank=0):
    model = fresh_model(config, Tokenizer([" ", *(f"#{i}" for i in range(1, config.vocab_size))])).train()
    model.transformer.recompute = checkpointing
    return add_adapters(model, lora_rank) if lora_rank else model


def kept_by_hooks(model, batch, draws, precision):
    """Bytes of distinct storages that autograd keeps, the parameters' own not counted."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(torch.device("cpu"), precision):
        loss = model(batch, draws)
    return sum(kept.values()), loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_activations_are_those_that_autograd_keeps(config, checkpointing, precision):
    """What the saved-tensor hooks see of a real pass, within 3 %. Selective recomputing keeps its share where hooks
    can't see it: there, and for the peak of both passes, all tensors that are alive are counted."""
    expected = simulate(config, device="cpu", precision=precision, checkpointing=checkpointing, items=3,
                        frames=max(LENGTHS), tokens=TOKENS)  # fmt: skip
    batch, draws = real_batch(config)
    inputs = sum(t.nbytes for v in (batch, draws) for t in vars(v).values() if torch.is_tensor(t))
    model = real_model(config, checkpointing)
    if checkpointing != "selective":
        kept, loss = kept_by_hooks(model, batch, draws, precision)
        assert kept == pytest.approx(expected.saved, rel=0.03)
        del loss
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with counted() as alive:
        known = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        alive._known.update(t.untyped_storage() for t in known)
        with autocast(torch.device("cpu"), precision):
            loss = model(batch, draws)
        assert alive.now == pytest.approx(expected.saved, rel=0.03)
        assert alive.peak + inputs == pytest.approx(expected.forward, rel=0.03)
        alive.peak = 0
        loss.backward()
    assert alive.peak == pytest.approx(expected.backward, rel=0.03)
