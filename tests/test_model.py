"""The model: an item is the same alone and in any batch, and the loss is what the paper says."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from f5kit.cfm import CFM, draw, held_out_draws, held_out_loss
from f5kit.checkpoint import fresh_model
from f5kit.config import PRESETS
from f5kit.data import collate
from f5kit.errors import UserError
from f5kit.layers import attend
from f5kit.text import Tokenizer, english_vocab

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = PRESETS["tiny"]
VARIANTS = {
    "v1": dict(average_upsampling=False, qk_norm=None),
    "v0": dict(average_upsampling=False, qk_norm=None, text_mask_padding=False, pe_attn_head=1),
    "own": {},
    "lengths of letters": dict(letter_lengths=True),
    "long skip": dict(long_skip_connection=True),
    "no text blocks": dict(average_upsampling=False, conv_layers=0),
    "E2": dict(
        backbone="unett",
        average_upsampling=False,
        qk_norm=None,
        text_mask_padding=False,
        conv_layers=0,
        pe_attn_head=1,
    ),
    "E2 text blocks": dict(backbone="unett", average_upsampling=False, depth=4, skip_connect_type="add"),
    "MMDiT": dict(backbone="mmdit", average_upsampling=False, text_dim=64, conv_layers=0),
}
LENGTHS = (61, 200, 117, 90)
TEXTS = ("Hello there.", "A somewhat longer sentence, with 2 commas, and more of it.", "Yes?", "Middling text here.")


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def model(request, awake):
    return awake(fresh_model(TINY.replace(**request.param), Tokenizer(english_vocab())))


def make_batch(model, items=range(4), step=3):
    g = torch.Generator().manual_seed(1)
    mels = [torch.randn(n, 100, generator=g) * 2 - 3 for n in LENGTHS]
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    return collate([mels[i] for i in items], [tokens[i] for i in items], [f"clip{i}" for i in items], step, items)


def gradients(model, batches):
    model.zero_grad()
    losses = [model(batch, draw(batch, 0)) for batch in batches]
    sum(losses).backward()
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_loss_and_gradients_are_the_same_alone_and_in_a_batch(model):
    together, alone = make_batch(model), [make_batch(model, [i]) for i in range(4)]
    (loss,), batch_gradients = gradients(model, [together])
    losses, single_gradients = gradients(model, alone)
    assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-5)
    for name, gradient in single_gradients.items():
        error = (batch_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-5, f"{name} differs by {error:.1e}"


def test_what_lies_behind_an_items_end_changes_nothing(model):
    batch = make_batch(model)
    draws = draw(batch, 0)
    poisoned = replace(batch, mel=torch.where(batch.mask[..., None], batch.mel, torch.tensor(99.0)))
    noisy = replace(draws, noise=torch.where(batch.mask[..., None], draws.noise, torch.tensor(99.0)))
    assert model(poisoned, noisy).item() == pytest.approx(model(batch, draws).item(), rel=1e-6)


def test_samples_are_the_same_alone_and_in_a_batch(model):
    batch = make_batch(model)
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    settings = dict(steps=5, cfg_strength=2.0)
    owns = (50, 40, 30, 20)
    *_, together = model.sample(batch.mel[:, :50], tokens, LENGTHS, cond_lens=owns, seeds=[5, 6, 7, 8], **settings)
    for i, own in enumerate(owns):
        *_, alone = model.sample(batch.mel[i : i + 1, :own], [tokens[i]], [LENGTHS[i]], seeds=[5 + i], **settings)
        assert (together[i, : LENGTHS[i]] - alone[0]).abs().max() < 1e-4
        assert torch.equal(alone[0, :own], batch.mel[i, :own]), "the reference must come out untouched"


def test_a_mel_scale_in_the_config_moves_with_the_mel():
    """Scaling the mels and telling the config leaves the loss as it was: only cfm.py knows of the scale."""
    tokenizer = Tokenizer(english_vocab())
    plain = fresh_model(TINY.replace(mel_mean=0.0, mel_std=1.0), tokenizer)
    scaled = CFM(TINY.replace(mel_mean=-5.0, mel_std=2.0), tokenizer)
    scaled.load_state_dict(plain.state_dict())
    batch = make_batch(plain)
    raw = replace(batch, mel=torch.where(batch.mask[..., None], batch.mel * 2 - 5, 0.0))
    assert scaled(raw, draw(raw, 0)).item() == pytest.approx(plain(batch, draw(batch, 0)).item(), rel=1e-5)


def test_randomness_belongs_to_the_clip():
    model = fresh_model(TINY, Tokenizer(english_vocab()))
    whole, part = make_batch(model), make_batch(model, [2, 0])
    a, b = draw(whole, 7), draw(part, 7)
    assert torch.equal(a.noise[2, :117], b.noise[0, :117])
    assert torch.equal(a.time[[2, 0]], b.time)
    assert torch.equal(a.span[0, :61], b.span[1, :61])
    assert not torch.equal(a.time, draw(whole, 8).time)
    assert not torch.equal(a.time, draw(replace(whole, step=4), 7).time)


def test_draws_have_the_published_distributions():
    model = fresh_model(TINY, Tokenizer(english_vocab()))
    batch = collate([torch.zeros(100, 100)] * 50, [[1]] * 50, ["x"] * 50, 0, range(50))
    draws = [draw(replace(batch, step=s), 0) for s in range(40)]
    share = torch.cat([d.span.float().mean(1) for d in draws])
    assert share.min() >= 0.69
    assert share.mean().item() == pytest.approx(0.85, abs=0.01)
    assert torch.cat([d.drop_text for d in draws]).float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert torch.cat([d.drop_audio for d in draws]).float().mean().item() == pytest.approx(0.44, abs=0.03)
    assert torch.cat([d.time for d in draws]).mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.cat([d.noise for d in draws]).std().item() == pytest.approx(1, abs=0.01)
    del model


def test_the_best_predictor_that_knows_only_averages_has_loss_half_pi_sigma():
    """For x1 ~ N(m, s^2) and x0 ~ N(0, 1), the variance of x1 - x0 given x_t is s^2 / ((1 - t)^2 + t^2 s^2).

    From cov(x1 - x0, x_t) = t s^2 - (1 - t) and var(x_t) = (1 - t)^2 + t^2 s^2:
    s^2 + 1 - cov^2 / var = s^2 ((1 - t) + t)^2 / var. Its integral over t is s [arctan(t s / (1 - t))] = (pi / 2) s.
    Checked here by giving that predictor samples of everything.
    """
    g = torch.Generator().manual_seed(0)
    t = (torch.arange(400_000) + 0.5) / 400_000
    for sigma in (0.4, 1.0, 2.5):
        x0, x1 = torch.randn(len(t), generator=g), 3 + sigma * torch.randn(len(t), generator=g)
        x_t = (1 - t) * x0 + t * x1
        gain = (t * sigma**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * sigma**2)
        best = 3 + gain * (x_t - 3 * t)
        assert (x1 - x0 - best).square().mean().item() == pytest.approx(math.pi / 2 * sigma, rel=0.02)


def test_held_out_loss_is_fixed_and_leaves_no_trace(model):
    batches = [make_batch(model, [0, 3]), make_batch(model, [1, 2])]
    model.train()
    state = torch.random.get_rng_state()
    first = held_out_loss(model, batches)
    assert first == held_out_loss(model, batches)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    times = torch.cat([held_out_draws(batches[0], 4, r).time for r in range(4)])
    assert times.tolist() == [(i + 0.5) / 8 for i in range(8)], "evenly spread over [0, 1)"


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(model, kind):
    batch = make_batch(model)
    _, plain = gradients(model, [batch])
    model.transformer.recompute = kind
    _, recomputed = gradients(model, [batch])
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_selective_checkpointing_repeats_no_matrix_product(model):
    batch, flops = make_batch(model), {}
    for kind in ("none", "selective", "full"):
        model.transformer.recompute = kind
        with FlopCounterMode(display=False) as counter:
            gradients(model, [batch])
        flops[kind] = counter.get_total_flops()
    assert flops["none"] == flops["selective"] < flops["full"]


def test_an_edited_span_is_made_anew_and_the_rest_stands(model):
    batch = make_batch(model)
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    keep = torch.ones(4, 200, dtype=torch.bool)
    keep[:, 20:50] = False
    *_, edited = model.sample(batch.mel, tokens, LENGTHS, cond_lens=LENGTHS, edit_mask=keep, steps=3)
    assert edited.shape == (4, 201, 100), "a result is at least one frame longer than its reference"
    for i, n in enumerate(LENGTHS):
        own = keep[i, :n]
        assert torch.equal(edited[i, :n][own], batch.mel[i, :n][own])
        assert not (edited[i, :n][~own] == batch.mel[i, :n][~own]).any()
        mel, mask = batch.mel[i : i + 1, :n], keep[i : i + 1, :n]
        *_, alone = model.sample(mel, [tokens[i]], [n], edit_mask=mask, steps=3)
        assert (edited[i, : n + 1] - alone[0]).abs().max() < 1e-4
    with pytest.raises(UserError, match=r"\(4, 7\) and the reference \(4, 200\)"):
        next(model.sample(batch.mel, tokens, LENGTHS, edit_mask=keep[:, :7]))


def test_without_a_reference_the_model_is_given_no_mel(model):
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    *_, together = model.sample(None, tokens, LENGTHS, steps=3, seeds=[1, 2, 3, 4])
    silent = (torch.zeros(1, 1, 100) + model.config.mel_mean).expand(4, 5, -1)  # 0 on the model's own scale
    *_, zeroed = model.sample(silent, tokens, LENGTHS, steps=3, seeds=[1, 2, 3, 4])
    for i, n in enumerate(LENGTHS):
        *_, alone = model.sample(None, [tokens[i]], [n], steps=3, seeds=1 + i)
        assert (together[i, :n] - alone[0]).abs().max() < 1e-4
        assert (together[i, 5:n] - zeroed[i, 5:n]).abs().max() < 1e-4


def test_rotary_angles_stay_exact_in_half_precision():
    model = fresh_model(TINY, Tokenizer(english_vocab())).half()
    rope = model.transformer.rotary_embed(4096)
    reference = torch.arange(4096).double()[:, None] / 10_000 ** (torch.arange(0, 32, 2).double() / 32)
    assert rope.dtype == torch.complex64
    assert (rope.real - reference.cos()).abs().max() < 1e-3
    assert (rope.imag - reference.sin()).abs().max() < 1e-3


def test_attention_in_bf16_on_a_cpu_is_that_of_fp32_over_an_items_own_frames():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 90, 3, 32, generator=g).bfloat16().transpose(1, 2) for _ in range(3))  # b h n d
    mask = torch.arange(90) < torch.tensor([90, 61])[:, None]
    exact = attend(q.float(), k.float(), v.float(), mask)
    with torch.no_grad():
        half = attend(q, k, v, mask)
        behind = ~mask[:, None, :, None]
        again = attend(q, k.masked_fill(behind, 3.0), v.masked_fill(behind, 7.0), mask)
        whole = attend(q, k, v, None)
    assert half.dtype == torch.bfloat16 and half.shape == q.shape
    assert (half - exact).norm() < 0.01 * exact.norm()
    assert torch.equal(again, half)
    assert torch.equal(whole[0], half[0]) and not torch.equal(whole[1], half[1])


def test_a_vocabulary_of_another_size_is_refused():
    with pytest.raises(UserError, match="95 tokens and the vocabulary has 3"):
        CFM(TINY, Tokenizer([" ", "a", "b"]))


PUBLISHED_SIZE = {
    "F5TTS_v1_Base": 337_096_804,
    "F5TTS_Base": 337_096_804,
    "F5TTS_v1_Small": 159_228_772,
    "F5TTS_Small": 159_228_772,
    "E2TTS_Base": 333_470_444,
    "E2TTS_Small": 157_161_708,
}


@pytest.mark.parametrize("name", PUBLISHED_SIZE)
def test_published_presets_have_the_published_size(name):
    from f5kit.plan import count_parameters

    assert count_parameters(PRESETS[name]) == PUBLISHED_SIZE[name]


def test_settings_a_backbone_would_ignore_are_refused():
    mmdit = dict(backbone="mmdit", average_upsampling=False, text_dim=64, conv_layers=0)
    with pytest.raises(UserError, match="average_upsampling with the backbone 'unett', and only dit"):
        TINY.replace(backbone="unett")
    with pytest.raises(UserError, match="depth is 3; unett"):
        TINY.replace(backbone="unett", average_upsampling=False, depth=3)
    with pytest.raises(UserError, match="text_dim 32, .* set them to 64, 0 and None"):
        TINY.replace(**{**mmdit, "text_dim": 32})
    with pytest.raises(UserError, match="skip_connect_type is 'mul'"):
        TINY.replace(skip_connect_type="mul")


def test_only_an_e2_model_pays_for_importing_x_transformers():
    code = """
import sys, torch
from f5kit.cfm import build_backbone
from f5kit.config import PRESETS
with torch.device("meta"):
    build_backbone(PRESETS["F5TTS_v1_Small"])
    print("x_transformers" in sys.modules)
    build_backbone(PRESETS["E2TTS_Small"])
    print("x_transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_starter_stays_below_eight_million_parameters():
    from f5kit.plan import count_parameters

    assert count_parameters(PRESETS["starter"]) <= 8_000_000
