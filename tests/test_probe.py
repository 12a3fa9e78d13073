"""Weights without a config: which readings fit by their shapes, and which one is right by its loss."""

from __future__ import annotations

import math

import pytest
import torch

from f5kit.audio import log_mel, read_audio
from f5kit.cfm import CFM, draw
from f5kit.checkpoint import describe_model, fresh_model, load_model, readings
from f5kit.config import PRESETS, MelConfig
from f5kit.data import batches, collate
from f5kit.errors import UserError
from f5kit.probe import Probe, _judge, probe_configs
from f5kit.readings import fitting_configs
from f5kit.text import Tokenizer, english_vocab
from f5kit.weights import to_published, write_tensors

SIZES = dict(dim=64, depth=2, heads=2, dim_head=32, text_dim=32, conv_layers=1, vocab_size=95)


def hidden(model, folder):
    """The published layout, without a word on what it means."""
    folder.mkdir()
    write_tensors(folder / "model_1.safetensors", to_published(model.state_dict()))
    model.tokenizer.save(folder / "vocab.txt")
    return folder


def small(family, **changes):
    return PRESETS[f"{family}_Base"].replace(name=f"{family}_64x2", **{**SIZES, **changes})


def shapes_of(config):
    with torch.device("meta"):
        model = CFM(config, Tokenizer([" ", *(chr(0x4E00 + i) for i in range(config.vocab_size - 1))]))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# ---- what fits


@pytest.mark.parametrize("size", ["Base", "Small"])
def test_published_shapes_have_their_presets_names(size):
    fits = fitting_configs(shapes_of(PRESETS[f"F5TTS_v1_{size}"]))
    assert list(fits) == [f"F5TTS_v1_{size}", f"F5TTS_{size}", f"F5TTS_{size}_bigvgan"]
    assert fits[f"F5TTS_v1_{size}"] == PRESETS[f"F5TTS_v1_{size}"]
    assert fits[f"F5TTS_{size}"] == PRESETS[f"F5TTS_{size}"]
    assert fits[f"F5TTS_{size}_bigvgan"].mel == MelConfig("bigvgan")


def test_an_extended_vocabulary_keeps_the_name():
    fits = fitting_configs(shapes_of(PRESETS["F5TTS_v1_Small"].replace(vocab_size=2600)))
    assert fits["F5TTS_Small"] == PRESETS["F5TTS_Small"].replace(vocab_size=2600)


def test_shapes_tell_every_size():
    config = small("F5TTS_v1", heads=3, ff_mult=3, conv_layers=2, qk_norm="rms_norm", long_skip_connection=True)
    assert fitting_configs(shapes_of(config))["F5TTS_v1_64x2"] == config
    assert fitting_configs({"transformer.proj_out.weight": (100, 64)}) == {}
    assert fitting_configs({}) == {}


def test_e2_shapes_have_one_reading():
    dim, depth = 1024, 24
    shapes = {f"transformer.layers.{i}.2.to_q.weight": (dim, dim) for i in range(depth)}
    shapes |= {"transformer.layers.0.4.ff.0.0.weight": (4 * dim, dim), "transformer.proj_out.weight": (100, dim)}
    shapes |= {"transformer.text_embed.text_embed.weight": (2546, 100), "transformer.rotary_embed.inv_freq": (32,)}
    assert fitting_configs(shapes) == {"E2TTS_Base": PRESETS["E2TTS_Base"]}


def test_a_missing_config_is_asked_for_with_the_names_that_fit(tmp_path, awake):
    folder = hidden(awake(fresh_model(small("F5TTS"), Tokenizer(english_vocab()))), tmp_path / "m")
    told = "its shapes fit F5TTS_v1_64x2, F5TTS_64x2 and F5TTS_64x2_bigvgan, and f5kit.probe.probe_configs finds"
    for asked in (load_model, describe_model, lambda f: load_model(f / "model_1.safetensors")):
        with pytest.raises(UserError, match=told):
            asked(folder)
    for name, config in readings(folder).items():
        assert load_model(folder, config=name).config == config
    with pytest.raises(UserError, match="no config 'F5TTS_v2'; its shapes fit F5TTS_v1_64x2"):
        load_model(folder, config="F5TTS_v2")
    (folder / "model_1.safetensors").unlink()
    write_tensors(folder / "other.safetensors", {"a": torch.zeros(2)})
    with pytest.raises(UserError, match="its shapes are those of no published model"):
        load_model(folder)
    with pytest.raises(UserError, match="has the shapes of no published model"):
        probe_configs(folder, [(torch.zeros(24_000), "Hello.")])


# ---- which is right


@pytest.fixture(scope="module", autouse=True)
def one_thread(two_threads):
    """Models this small only wait for each other's threads."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """Folders of a v0 and a v1 model, trained on the dataset's own clips for some seconds each."""
    folders = {}
    for family in ("F5TTS", "F5TTS_v1"):
        model = fresh_model(small(family), Tokenizer(english_vocab())).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        clips = dataset.train
        for step, members in batches([clip.frames for clip in clips], 1_000, 0):
            if step == 60:
                break
            batch = dataset.batch([clips[i] for i in members], model.tokenizer, step)
            draws = draw(batch, 0)
            (model(batch, draws) / (draws.span.sum() * 100)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        folders[family] = hidden(model.eval(), tmp_path_factory.mktemp("hidden") / family)
    return folders


@pytest.mark.parametrize("family", ["F5TTS", "F5TTS_v1"])
def test_the_reading_a_model_was_trained_with_is_named(trained, dataset, family):
    probe = probe_configs(trained[family], dataset)
    assert probe.name == f"{family}_64x2" and probe.config == small(family)
    assert probe.certain and probe.margin > 0.005 and set(probe.losses) == set(readings(trained[family]))
    assert list(probe.losses.values()) == sorted(probe.losses.values())
    assert str(probe).startswith(f"{family}_64x2 it is: the next loss is")
    assert probe_configs(trained[family], dataset).losses == probe.losses
    assert load_model(trained[family], config=probe.config).config == probe.config


def test_pairs_of_sounds_and_words_do_too(trained, dataset):
    pairs = [(dataset.path(clip), clip.text) for clip in dataset.train]
    probe = probe_configs(trained["F5TTS"], pairs, clips=4, repeats=4)
    assert probe.name == "F5TTS_64x2" and probe.clips == 4
    sounds = [(read_audio(path), text) for path, text in pairs]
    assert probe_configs(trained["F5TTS"], sounds, clips=4, repeats=4).losses == probe.losses
    with pytest.raises(UserError, match="there is no clip to judge"):
        probe_configs(trained["F5TTS"], [])


def test_each_reading_hears_its_own_mel(trained, dataset):
    clip = dataset.train[0]
    audio = read_audio(dataset.path(clip))
    probe = probe_configs(trained["F5TTS"], [(audio, clip.text)], repeats=2)
    assert math.isfinite(probe.losses["F5TTS_64x2_bigvgan"])
    from f5kit.cfm import held_out_loss

    model = load_model(trained["F5TTS"], config="F5TTS_64x2_bigvgan")
    batch = collate([log_mel(audio, MelConfig("bigvgan"))], [model.tokenizer.encode(clip.text)], ["0"], 0, [0])
    assert held_out_loss(model, [batch], 2) == probe.losses["F5TTS_64x2_bigvgan"]
    assert not probe.certain  # one clip proves nothing


def test_a_draw_is_called_a_draw():
    fits = {"a": small("F5TTS"), "b": small("F5TTS_v1")}
    probe = _judge(fits, {"a": [1.0, 1.2, 0.9], "b": [1.01, 1.18, 0.93]})
    assert probe.name == "a" and not probe.certain and "more clips must decide" in str(probe)
    clear = _judge(fits, {"a": [1.0, 1.2, 0.9], "b": [0.9, 1.1, 0.81]})
    assert clear.name == "b" and clear.certain and clear.margin == pytest.approx(0.29 / 2.81, rel=1e-5)
    broken = _judge(fits, {"a": [float("nan")] * 3, "b": [3.0] * 3})
    assert broken.name == "b" and broken.certain
    alone = _judge({"a": fits["a"]}, {"a": [1.0]})
    assert alone.certain and "only published reading" in str(alone) and isinstance(alone, Probe)
