"""Choosing among a run's weights: points between base and checkpoint, and whether text was learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from f5kit.cfm import held_out_loss
from f5kit.checkpoint import RunFolder, load_model
from f5kit.data import Dataset
from f5kit.errors import UserError
from f5kit.evaluate import choose_candidate, compare_checkpoints, interpolate, text_advantage
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory) -> RunFolder:
    """Two updates of the tiny model, with a learning rate that moves it."""
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=2, update_frames=1_500, learning_rate=1e-2)
    return Trainer(plan, dataset, tmp_path_factory.mktemp("runs") / "run").fit()


def weights_of(model) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_points_between_lie_on_the_line(run):
    base, last = load_model("tiny"), run.checkpoints()[-1].path
    start, end = weights_of(base), weights_of(load_model(last, weights="raw"))
    assert not torch.equal(start, end)
    for share in (0.0, 0.25, 1.0):
        between = weights_of(interpolate(base, load_model(last, weights="raw"), share))
        torch.testing.assert_close(between, start + share * (end - start), atol=1e-6, rtol=1e-6)
    assert torch.equal(weights_of(base), start)
    with pytest.raises(UserError, match="differ in shape"):
        interpolate(load_model("starter"), base, 0.5)


def test_a_point_between_can_become_the_voice(run, dataset):
    candidates = compare_checkpoints(
        run, dataset, ["A word.", "Another."], newest=1, between=(0.5,), reference=dataset.train[1].id, steps=1,
        vocoder="griffin-lim",
    )  # fmt: skip
    last = run.checkpoints()[-1].name
    assert [c.name for c in candidates] == ["base", f"{last} raw", f"{last} ema", f"{last} ema_050"]
    assert all(len(c.said) == 2 and c.speech is c.said[0] and c.loss > 0 for c in candidates)
    assert [c.share for c in candidates] == [1, 1, 1, 0.5]
    halfway = candidates[-1]
    choose_candidate(run, halfway, "for the test")
    expected = interpolate(load_model("tiny"), load_model(run.checkpoint().path, weights="ema"), 0.5)
    assert torch.equal(weights_of(load_model(run.path)), weights_of(expected))
    assert (run.best["weights"], run.best["loss"]) == ("ema_050", halfway.loss)
    assert run.checkpoint().damage() is None and run.latest().name == last  # what was added disturbs nothing
    with pytest.raises(UserError, match="no checkpoint of the run"):
        choose_candidate(run, candidates[0], "the base")


def test_weights_that_are_not_there(run):
    with pytest.raises(UserError, match="weights is 'ema_020'"):
        load_model(run.checkpoints()[-1].path, weights="ema_020")


@pytest.fixture(scope="module")
def four_held_out(dataset) -> Dataset:
    clips = [replace(clip, split="heldout" if i < 4 else "train") for i, clip in enumerate(dataset.clips)]
    return Dataset(dataset.folder, dataset.info, clips, dataset.manifest_hash)


def test_a_model_that_reads_no_text_has_no_advantage_by_it(four_held_out):
    found = text_advantage(load_model("tiny"), four_held_out, repeats=2)  # its last layer is zero as yet
    assert (found.mean, found.low, found.high, found.clips) == (0, 0, 0, 4)


def test_the_advantage_is_that_of_pairs(four_held_out, awake):
    model = awake(load_model("tiny"))
    found = text_advantage(model, four_held_out, repeats=1)
    clips = sorted(four_held_out.heldout, key=lambda clip: len(clip.text))
    texts = [clip.text for clip in clips]
    differences = []
    for i, other in enumerate([*texts[1:], texts[-2]]):
        pair = [
            held_out_loss(model, [four_held_out.batch([replace(clips[i], text=t)], model.tokenizer, positions=[i])], 1)
            for t in (texts[i], other)
        ]
        differences.append(pair[1] - pair[0])
    assert found.mean == pytest.approx(sum(differences) / 4) and found.mean != 0
    assert min(differences) - 1e-9 <= found.low <= found.mean <= found.high <= max(differences) + 1e-9
    assert found == text_advantage(model, four_held_out, repeats=1)
    with pytest.raises(UserError, match="two or more"):
        text_advantage(model, four_held_out, clips=1)
