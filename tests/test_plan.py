"""The plan: it says what it decided and why, and refuses what can't be."""

from dataclasses import replace

import pytest

from f5kit.errors import UserError
from f5kit.host import Decision, Host
from f5kit.plan import plan_run


def card(name, gb, precision="fp16", disk=100.0):
    return Host("colab", "cuda", name, gb, 12.7, disk, 2, Decision(precision, "for the test"), "3.13", "2.11")


T4, A100 = card("Tesla T4", 14.74), card("NVIDIA A100-SXM4-40GB", 39.39, "bf16")


def test_a_t4_gets_small_optimizer_states_and_a_large_card_does_not(dataset):
    t4, a100 = (plan_run("F5TTS_v1_Base", dataset, host) for host in (T4, A100))
    assert (t4.train.optimizer, a100.train.optimizer) == ("adamw8bit", "adamw")
    assert (t4.train.precision, a100.train.precision) == ("fp16", "bf16")
    assert t4.predicted_peak_gb <= 14.74 * 0.92
    assert a100.seconds_per_update < t4.seconds_per_update
    assert t4.fits and a100.fits


def test_a_small_card_recomputes_activations(dataset):
    plan = plan_run("F5TTS_v1_Base", dataset, card("RTX 3060", 6.5))
    assert plan.train.checkpointing == "full"
    assert plan.predicted_peak_gb <= 6.5 * 0.92


def test_checkpointing_is_taken_as_given(dataset):
    plans = [plan_run("F5TTS_v1_Base", dataset, A100, micro_frames=4_000, checkpointing=kind)
             for kind in ("full", "selective", "none")]  # fmt: skip
    assert [plan.train.checkpointing for plan in plans] == ["full", "selective", "none"]
    assert plans[0].predicted_peak_gb < plans[1].predicted_peak_gb < plans[2].predicted_peak_gb
    with pytest.raises(UserError, match="checkpointing is 'half'; choose one of auto, none, selective, full"):
        plan_run("F5TTS_v1_Base", dataset, A100, checkpointing="half")


def test_what_does_not_fit_is_said_before_the_run(dataset):
    with pytest.raises(UserError, match=r"longest clip has .* frames and about 0 fit on Tiny card"):
        plan_run("F5TTS_v1_Base", dataset, card("Tiny card", 4.0))
    assert not plan_run("F5TTS_v1_Base", dataset, card("Tesla T4", 14.74, disk=3.0)).fits


def test_updates_come_from_what_is_known(dataset):
    given = plan_run("tiny", dataset, T4, updates=77)
    assert given.train.updates == 77
    budget = plan_run("F5TTS_v1_Base", dataset, T4, minutes=10)
    assert budget.train.updates * budget.seconds_per_update == pytest.approx(600, rel=0.1)
    assert plan_run("tiny", dataset, T4).train.updates >= 100
    assert given.train.warmup_updates <= 0.1 * 77


def test_every_choice_shows_its_reason(dataset):
    plan = plan_run("F5TTS_v1_Base", dataset, T4)
    unexplained = {name for name, _, reason in plan.rows() if not reason} - {"model", "device", "fits"}
    assert not unexplained
    assert "not tuned" in plan.reasons["updates"]
    assert "estimated" in plan.reasons["memory"]
    assert "<table>" in plan._repr_html_()
    assert plan.plot_schedule().axes


def test_settings_that_do_not_exist_are_refused(dataset):
    with pytest.raises(UserError, match="choose one of auto, adamw, adamw8bit"):
        plan_run("tiny", dataset, T4, optimizer="lion")
    with pytest.raises(UserError, match="fp16.*needs a CUDA device"):
        plan_run("tiny", dataset, replace(T4, device="cpu"), precision="fp16")


def test_the_micro_batch_holds_the_longest_clip(dataset):
    longest = max(clip.frames for clip in dataset.train)
    plan = plan_run("tiny", dataset, T4, update_frames=10, micro_frames=10)
    assert plan.train.micro_frames == longest
