"""Adapters: they start as nothing, merge into the same model, load on their base alone, and a run of them resumes."""

from dataclasses import replace

import pytest
import torch

from f5kit.cfm import draw
from f5kit.checkpoint import export_model, fresh_model, load_model
from f5kit.config import PRESETS
from f5kit.data import collate
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.lora import adapted_layers, add_adapters, load_adapters, merge_adapters, plain_state, save_adapters
from f5kit.memory import count_parameters
from f5kit.optim import trained_parameters
from f5kit.plan import plan_run
from f5kit.text import Tokenizer, english_vocab
from f5kit.trainer import Trainer
from f5kit.weights import TensorFile

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = PRESETS["tiny"]
BACKBONES = {
    "dit": TINY,
    "unett": TINY.replace(backbone="unett", average_upsampling=False, conv_layers=0),
    "mmdit": TINY.replace(backbone="mmdit", average_upsampling=False, text_dim=64, conv_layers=0),
}
LAYERS = {"dit": 2 * 6, "unett": 2 * 6, "mmdit": 2 * 12 - 3}  # MMDiT's last block reads no text: no output there


@pytest.fixture(params=BACKBONES.values(), ids=BACKBONES.keys())
def base(request, awake):
    return awake(fresh_model(request.param, Tokenizer(english_vocab())))


def batch_of(model):
    g = torch.Generator().manual_seed(1)
    mels = [torch.randn(n, 100, generator=g) for n in (80, 61)]
    return collate(mels, [model.tokenizer.encode(t) for t in ("Hello there.", "Yes?")], "ab", 0, range(2))


def loss_of(model):
    batch = batch_of(model)
    return model(batch, draw(batch, 0))


def shake(model):
    """Adapters as a training leaves them: not zero."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in trained_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.1)
    return model


def test_adapters_start_as_nothing_and_alone_are_trained(base):
    before = loss_of(base).item()
    names = list(base.state_dict())
    add_adapters(base, 4)
    assert loss_of(base).item() == before
    assert len(adapted_layers(base)) == LAYERS[base.config.backbone]
    loss_of(base).backward()
    touched = {name for name, p in base.named_parameters() if p.grad is not None}
    assert touched == {name for name, _ in trained_parameters(base)} and all(".lora_" in name for name in touched)
    assert [name for name in base.state_dict() if ".lora_" not in name] == names, "published names stay"
    assert sum(p.numel() for _, p in trained_parameters(base)) == count_parameters(base.config, 4)


def test_merged_says_the_same(base):
    shake(add_adapters(base, 4))
    told, expected = plain_state(base), loss_of(base).item()
    merge_adapters(base)
    assert not adapted_layers(base) and len(trained_parameters(base)) == len(list(base.parameters()))
    assert loss_of(base).item() == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(told[name], tensor) for name, tensor in base.state_dict().items())


def test_a_file_of_adapters_loads_on_its_base_and_on_no_other(base, tmp_path):
    export_model(base, tmp_path / "base", dtype=torch.float32)
    trained = shake(add_adapters(load_model(tmp_path / "base"), 4))
    file = save_adapters(trained, tmp_path / "adapter.safetensors", dtype=torch.float32)
    loaded = load_model(tmp_path / "base", adapter=file)
    assert loss_of(loaded).item() == pytest.approx(loss_of(trained).item(), rel=1e-6)
    assert "adapter.safetensors" in loaded.origin
    export_model(trained, tmp_path / "merged", dtype=torch.float32)
    assert loss_of(load_model(tmp_path / "merged")).item() == pytest.approx(loss_of(trained).item(), rel=1e-6)
    with pytest.raises(UserError, match="trained on other weights of tiny"):
        load_adapters(shake(load_model(tmp_path / "base")), file)
    with pytest.raises(UserError, match="is no adapter of f5kit"):
        load_adapters(base, tmp_path / "base" / "model.safetensors")


def test_what_makes_no_sense_is_refused(base):
    with pytest.raises(UserError, match="rank is 0: it must be at least 1"):
        add_adapters(base, 0)
    with pytest.raises(UserError, match="no adapters to save"):
        save_adapters(base, "nowhere.safetensors")
    add_adapters(base, 2)
    with pytest.raises(UserError, match="has adapters already"):
        add_adapters(base, 2)


def test_the_file_for_the_published_base_takes_a_few_megabytes():
    assert 2e6 < 2 * count_parameters(PRESETS["F5TTS_v1_Base"], 8) < 8e6


class Stopped(Exception):
    pass


def test_a_run_of_adapters_resumes_to_the_last_bit_and_is_merged_for_everybody(dataset, tmp_path):
    plan = plan_run("starter", dataset, detect_host("cpu"), updates=6, update_frames=1_500, lora_rank=4)
    plan = replace(plan, train=replace(plan.train, save_every=2, evaluate_every=2))

    def stop(event, trainer):
        if event["event"] == "save" and event["update"] == 4:
            raise Stopped

    whole = Trainer(plan, dataset, tmp_path / "whole").fit()
    with pytest.raises(Stopped):
        Trainer(plan, dataset, tmp_path / "stopped", [stop]).fit()
    resumed = Trainer(plan, dataset, tmp_path / "stopped").fit()
    for weights in ("raw", "ema"):
        one, other = (load_model(run.latest().path, weights=weights).state_dict() for run in (whole, resumed))
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    judged = [event for event in whole.events() if event["event"] == "evaluate"]
    assert judged[-1]["loss_raw"] < judged[0]["loss_raw"]
    file = whole.latest().path / "adapter.safetensors"
    assert file.stat().st_size < (whole.latest().path / "model.safetensors").stat().st_size / 10
    assert TensorFile(file).metadata["base"] == "starter"
    merged = load_model(whole.latest().path, weights="raw").state_dict()
    on_base = load_model("starter", adapter=file).state_dict()
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in on_base.items())
    with pytest.raises(UserError, match="lora_rank 4 -> 0"):
        full = replace(plan, train=replace(plan.train, lora_rank=0))
        Trainer(full, dataset, tmp_path / "whole").fit()
