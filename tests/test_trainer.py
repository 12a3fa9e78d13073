"""The loop: a stopped run goes on as if it had never stopped, and how an update is cut changes nothing."""

from dataclasses import replace

import pytest
import torch

from f5kit.checkpoint import RunFolder, export_model, load_model
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.trainer import Trainer


@pytest.fixture
def plan(dataset):
    return plan_run("tiny", dataset, detect_host("cpu"), updates=9, update_frames=1_500)


class Stopped(Exception):
    pass


def stop_after(update):
    def callback(event, trainer):
        if event["event"] == "save" and event["update"] >= update:
            raise Stopped

    return callback


def losses(run):
    """Loss by step; of a step that was trained twice, the last."""
    return {e["step"]: (e["loss"], e["grad_norm"], e["lr"]) for e in run.events() if e["event"] == "update"}


def with_train(plan, **changes):
    return replace(plan, train=replace(plan.train, **changes))


@pytest.fixture(params=["adamw", "adamw8bit"])
def every_update(plan, request):
    """The plan with a checkpoint at each update."""
    return with_train(plan, save_every=1, evaluate_every=3, optimizer=request.param, keep_checkpoints=20)


def test_resumed_equals_uninterrupted_to_the_last_bit(every_update, dataset, tmp_path):
    whole = Trainer(every_update, dataset, tmp_path / "whole").fit()
    assert len(losses(whole)) == 9
    expected = load_model(whole.checkpoints()[-1].path, weights="ema").state_dict()
    for stop in range(1, 9):
        folder = tmp_path / f"stopped_{stop}"
        with pytest.raises(Stopped):
            Trainer(every_update, dataset, folder, [stop_after(stop)]).fit()
        run = Trainer(every_update, dataset, folder).fit()
        assert [e["resumed"] for e in run.events() if e["event"] == "start"] == [False, True]
        assert losses(run) == losses(whole)
        resumed = load_model(run.checkpoints()[-1].path, weights="ema").state_dict()
        assert all(torch.equal(expected[k], v) for k, v in resumed.items())


def test_checkpoints_say_how_long_a_piece_their_weights_have_heard(dataset, tmp_path):
    model, seconds = load_model("tiny"), sorted(clip.seconds for clip in dataset.train)
    for heard, longest in ((12.0, 12.0), (1.0, max(s for s in seconds if seconds.index(s) < 0.95 * len(seconds)))):
        model.config = model.config.replace(longest_chunk=heard)
        base = export_model(model, tmp_path / f"base_{heard}")
        once = plan_run(str(base), dataset, detect_host("cpu"), updates=1, update_frames=1_500)
        run = Trainer(once, dataset, tmp_path / f"run_{heard}").fit()
        assert load_model(run.path).config.longest_chunk == longest


def test_a_finished_run_is_not_trained_again(plan, dataset, tmp_path):
    run = Trainer(plan, dataset, tmp_path / "run").fit()
    before = run.checkpoints()[-1].state
    again = Trainer(plan, dataset, tmp_path / "run").fit()
    assert again.checkpoints()[-1].state == before
    assert len(losses(again)) == 9


def test_micro_batch_size_changes_memory_only(plan, dataset, tmp_path):
    runs = [
        Trainer(with_train(plan, micro_frames=micro), dataset, tmp_path / str(micro)).fit()
        for micro in (1_500, 700, 1)
    ]
    for other in runs[1:]:
        for step, (loss, norm, _) in losses(runs[0]).items():
            assert losses(other)[step][0] == pytest.approx(loss, rel=1e-4)
            assert losses(other)[step][1] == pytest.approx(norm, rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing(plan, dataset, tmp_path, monkeypatch):
    seen = {}

    def remember(event, trainer):
        weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        if event["event"] == "skip":
            seen["skip"] = event
            before, ema, update = seen["last"]
            assert all(torch.equal(before[n], p) for n, p in weights.items())
            assert all(torch.equal(ema[n], p) for n, p in trainer.ema.weights.items())
            assert trainer.update == update
        seen["last"] = (weights, {n: p.clone() for n, p in trainer.ema.weights.items()}, trainer.update)

    from f5kit.data import Dataset

    mel = Dataset.mel
    bad = dataset.train[2]

    def with_one_bad_clip(self, clip):
        return mel(self, clip) * (float("inf") if clip.id == bad.id else 1)

    monkeypatch.setattr(Dataset, "mel", with_one_bad_clip)
    run = Trainer(with_train(plan, updates=4), dataset, tmp_path / "run", [remember]).fit()
    assert bad.id in seen["skip"]["clips"]
    assert run.checkpoints()[-1].update == 4
    state = load_model(run.checkpoints()[-1].path, weights="raw").state_dict()
    assert all(t.isfinite().all() for t in state.values())


def test_another_plan_in_the_same_folder_is_refused(plan, dataset, tmp_path):
    Trainer(with_train(plan, updates=2), dataset, tmp_path / "run").fit()
    with pytest.raises(UserError, match=r"seed 0 -> 1.*another run folder"):
        Trainer(with_train(plan, updates=2, seed=1), dataset, tmp_path / "run").fit()
    with pytest.raises(UserError, match=r"updates 2 -> 4.*change=True"):
        Trainer(with_train(plan, updates=4), dataset, tmp_path / "run").fit()
    run = Trainer(with_train(plan, updates=4), dataset, tmp_path / "run", change=True).fit()
    assert run.checkpoints()[-1].update == 4, "more updates are a longer run of the same kind"


def test_a_damaged_checkpoint_is_passed_over(plan, dataset, tmp_path, capsys):
    plan = with_train(plan, updates=4, save_every=2)
    run = Trainer(plan, dataset, tmp_path / "run").fit()
    newest = run.checkpoints()[-1]
    file = newest.path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run.latest().update == 2
    assert "does not match its sha256" in capsys.readouterr().out
    again = Trainer(plan, dataset, tmp_path / "run").fit()
    assert again.latest().update == 4


def test_a_crash_while_saving_leaves_the_older_checkpoint(plan, dataset, tmp_path, monkeypatch):
    plan = with_train(plan, updates=4, save_every=2)
    run = Trainer(with_train(plan, updates=2), dataset, tmp_path / "run").fit()
    import f5kit.runs as runs

    def dies(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(runs, "write_meaning", dies)
    with pytest.raises(ZeroDivisionError):
        Trainer(plan, dataset, tmp_path / "run", change=True).fit()
    assert [c.name for c in run.checkpoints()] == ["update_000002"]
    assert run.latest().damage() is None


def test_rotation_keeps_the_newest_and_the_best(plan, dataset, tmp_path):
    run = Trainer(with_train(plan, save_every=1, keep_checkpoints=2), dataset, tmp_path / "run").fit()
    kept = {c.update for c in run.checkpoints()}
    assert {8, 9} <= kept
    assert len(kept) <= 3
    assert run.best["checkpoint"] in {c.name for c in run.checkpoints()}


def test_a_run_that_brings_nothing_more_ends(plan, dataset, tmp_path):
    plan = with_train(plan, updates=60, learning_rate=1e-12, evaluate_every=1, patience=3, save_every=100)
    run = Trainer(plan, dataset, tmp_path / "run").fit()
    reached, losses_seen = run.latest().update, {}
    for event in run.events():
        if event["event"] == "evaluate":
            losses_seen[event["update"]] = min(event["loss_raw"], event["loss_ema"])
    assert reached - min(losses_seen, key=losses_seen.get) == 3 and reached < 60
    assert run.events()[-1]["reason"] == "the held-out loss stopped falling"
    again = Trainer(plan, dataset, tmp_path / "run").fit()
    assert again.latest().update == reached, "it is not begun again"


def test_a_resumed_run_keeps_what_was_derived(plan, dataset, tmp_path, capsys):
    """On another machine the plan would derive other settings: the run goes on with its own, unless told to change."""
    run = Trainer(with_train(plan, updates=3), dataset, tmp_path / "run").fit()
    other = replace(with_train(plan, updates=5, optimizer="adamw8bit"), derived=("updates", "optimizer"))
    assert Trainer(other, dataset, run.path).fit().latest().update == 3
    assert "goes on as it was planned" in capsys.readouterr().out
    changed = Trainer(other, dataset, run.path, change=True).fit()
    assert changed.latest().update == 5 and changed.latest().state["optimizer"] == "adamw8bit"
    rates = {e["update"]: e["lr"] for e in changed.events() if e["event"] == "update"}
    assert rates[4] > rates[3] / 10, "the schedule is rebuilt for five updates, not at its old end"


def test_checkpoints_at_multiples_are_kept(plan, dataset, tmp_path):
    run = Trainer(with_train(plan, save_every=1, keep_checkpoints=1, keep_every=4), dataset, tmp_path / "run").fit()
    assert {4, 8, 9} <= {c.update for c in run.checkpoints()}
    assert len(run.checkpoints()) <= 4


def test_the_share_of_the_start_is_told(plan, dataset, tmp_path):
    run = Trainer(plan, dataset, tmp_path / "run").fit()
    shares = [e["ema_start_share"] for e in run.events() if e["event"] == "evaluate"]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True) and shares[-1] < 0.1


def test_events_survive_a_torn_line(tmp_path):
    run = RunFolder(tmp_path)
    run.record({"event": "start"})
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "upd')
    assert run.events() == [{"event": "start"}]
    run.record({"event": "end"})
    assert run.events() == [{"event": "start"}, {"event": "end"}], "what follows a torn line is not torn with it"
