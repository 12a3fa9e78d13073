"""The plan: it says what it decided and why, and refuses what can't be."""

import re
from dataclasses import replace

import pytest

from f5kit import memory
from f5kit.cards import CARDS, card_of, named_host
from f5kit.config import PRESETS
from f5kit.errors import UserError
from f5kit.host import Decision, Host, detect_host
from f5kit.plan import plan_run
from f5kit.preflight import described_voice


def card(name, gb, precision="fp16", disk=100.0):
    return Host("colab", "cuda", name, gb, 12.7, disk, 2, Decision(precision, "for the test"), "3.13", "2.11")


T4, A100 = card("Tesla T4", 14.74), card("NVIDIA A100-SXM4-40GB", 39.39, "bf16")


def test_a_full_card_gets_small_optimizer_states_and_a_large_one_does_not():
    voice = described_voice(60, "published", seconds=20.0)
    small, t4, a100 = (plan_run("F5TTS_v1_Base", voice, host) for host in (card("RTX 3060", 7.75), T4, A100))
    assert (small.train.optimizer, t4.train.optimizer, a100.train.optimizer) == ("adamw8bit", "adamw", "adamw")
    assert (t4.train.precision, a100.train.precision) == ("fp16", "bf16")
    assert t4.predicted_peak_gb <= 14.74 * 0.92 and small.predicted_peak_gb <= 7.75 * 0.92
    assert a100.seconds_per_update < t4.seconds_per_update < small.seconds_per_update
    assert t4.fits and a100.fits and t4.measured_peak_gb is None


def test_a_small_card_recomputes_activations(dataset):
    plan = plan_run("F5TTS_v1_Base", dataset, card("RTX 3060", 6.5))
    assert plan.train.checkpointing in ("selective", "full")
    assert plan.predicted_peak_gb <= 6.5 * 0.92


def test_checkpointing_is_taken_as_given(dataset):
    plans = [plan_run("F5TTS_v1_Base", dataset, A100, update_frames=4_000, checkpointing=kind)
             for kind in ("full", "selective", "none")]  # fmt: skip
    assert [plan.train.checkpointing for plan in plans] == ["full", "selective", "none"]
    assert plans[0].predicted_peak_gb < plans[1].predicted_peak_gb < plans[2].predicted_peak_gb
    with pytest.raises(UserError, match="checkpointing is 'half'; choose one of auto, none, selective, full"):
        plan_run("F5TTS_v1_Base", dataset, A100, checkpointing="half")


def test_what_does_not_fit_is_said_before_the_run(dataset):
    with pytest.raises(UserError, match=r"longest clip has .* frames and about 0 fit on Tiny card"):
        plan_run("F5TTS_v1_Base", dataset, card("Tiny card", 3.0))
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
    assert "counted" in plan.reasons["memory"] and "estimated" in plan.reasons["speed"]
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


@pytest.mark.parametrize("name", CARDS)
def test_a_named_card_is_planned_for_without_having_it(name):
    host = named_host(name)
    plan = plan_run("F5TTS_v1_Base", described_voice(30, "published", seconds=10.0), host)
    assert plan.fits and plan.predicted_peak_gb <= host.memory_gb * 0.92
    assert plan.measured_peak_gb is None and "counted" in plan.reasons["memory"]
    assert plan.frames_per_second == pytest.approx(plan.train.update_frames / plan.seconds_per_update)
    assert card_of(host)[0] == CARDS[name]


def test_named_cards_are_told():
    with pytest.raises(UserError, match="no card 'RTX 9000' in the table; choose one of T4, P100"):
        named_host("RTX 9000")
    assert card_of(card("NVIDIA A100-PCIE-40GB", 39.4))[0].memory_gb == CARDS["A100-40"].memory_gb
    assert "taken as fast as a T4" in card_of(card("NVIDIA GB10", 100.0))[1]


def test_compiled_code_is_taken_where_a_trial_shows_that_it_pays(dataset):
    short = plan_run("tiny", dataset, detect_host("cpu"), updates=5, measure=True)
    assert not short.train.compile and "less than 10 minutes" in short.reasons["compiled code"]
    host, how = detect_host("cpu"), {"updates": 10**6, "update_frames": 1_600, "checkpointing": "none"}
    plan = plan_run("tiny", dataset, host, **how, measure=True)
    found = re.search(r"measured: (-?\d+)% of the time saved, \d+ s to compile", plan.reasons["compiled code"])
    saved = int(found.group(1))
    assert saved == 0 or plan.train.compile == (saved > 0)
    guessed = plan_run("tiny", dataset, host, **how)
    assert not guessed.train.compile and guessed.reasons["compiled code"] == "tried on the card alone"


def test_a_named_card_is_answered_from_a_few_shallow_models(monkeypatch):
    """Passes on the meta device are what an answer costs, some seconds in all."""
    depths, simulate = [], memory.simulate

    def counted(config, **how):
        depths.append(config.depth)
        return simulate(config, **how)

    monkeypatch.setattr(memory, "simulate", counted)
    memory.footprint.cache_clear()
    plan_run("F5TTS_v1_Base", described_voice(60, "published", seconds=25.0), named_host("RTX 3060 12GB"))
    assert len(depths) <= 14 and max(depths) <= 4


def test_the_fastest_way_is_picked_and_not_the_biggest_batch():
    voice = described_voice(60, "published", seconds=20.0)
    for name in ("T4", "RTX 3060 12GB", "L4"):
        plan = plan_run("F5TTS_v1_Base", voice, named_host(name), update_frames=19_200)
        biggest = plan_run("F5TTS_v1_Base", voice, named_host(name), update_frames=19_200, checkpointing="full")
        assert plan.seconds_per_update <= biggest.seconds_per_update
        assert biggest.train.micro_frames >= plan.train.micro_frames


def test_adapters_are_planned_with_their_memory(dataset):
    whole, adapters = (plan_run("F5TTS_v1_Base", dataset, T4, lora_rank=rank) for rank in (0, 8))
    assert adapters.predicted_peak_gb < whole.predicted_peak_gb - 4
    assert adapters.disk_gb < whole.disk_gb
    assert (adapters.train.lora_rank, adapters.train.learning_rate) == (8, 1e-4)
    assert "adapters of rank 8" in str(adapters)


def test_a_session_that_is_too_short_is_told(dataset):
    assert plan_run("F5TTS_v1_Base", dataset, T4, updates=10).fits_session
    plan = plan_run("F5TTS_v1_Base", dataset, T4, updates=10, session_minutes=0.01)
    assert plan.fits and not plan.fits_session and "no: it goes on in the next one" in str(plan)


def test_a_trial_corrects_the_plan(dataset):
    """A real update on this machine: the counted memory is right, the time was a guess from a data sheet."""
    host = detect_host("cpu")
    guessed, tried = (plan_run("tiny", dataset, host, updates=5, measure=m) for m in (False, True))
    assert guessed.measured_peak_gb is None
    assert tried.measured_peak_gb == pytest.approx(guessed.predicted_peak_gb, rel=0.05)
    assert tried.reasons["speed"].startswith("measured") and tried.seconds_per_update > 0


def test_a_trial_that_does_not_fit_leads_to_smaller_passes(dataset, monkeypatch):
    """What the allocator loses is unknown before: here a device that holds half of what was thought."""
    import f5kit.plan as plans

    real, sizes = plans.try_update, []

    def scarce(config, train, *args, **kwargs):
        sizes.append(train.micro_frames)
        tried = real(config, train, *args, **kwargs)
        return replace(tried, shortage="out of memory") if len(sizes) == 1 else tried

    monkeypatch.setattr(plans, "try_update", scarce)
    longest = max(clip.frames for clip in dataset.train)
    memory = plans.MemoryModel(PRESETS["tiny"], "cpu", "fp32", longest, 40)
    needed = memory.allocated_gb(1_600, "none", "adamw", accumulates=False)
    host = replace(detect_host("cpu"), memory_gb=(needed * 1.02 + 0.6) / 0.92)
    plan = plan_run("tiny", dataset, host, updates=5, update_frames=1_600, checkpointing="none", measure=True)
    assert sizes[1] < sizes[0] and plan.train.micro_frames <= sizes[0]
    assert plan.measured_peak_gb is not None
