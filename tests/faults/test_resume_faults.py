"""F4: a run that was stopped after any update goes on as if it had never stopped, to the last bit."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from small import losses, same, trainer, weights

from f5kit.runs import RunFolder
from f5kit.trainer import Trainer


class Watched(Trainer):
    """Notes which clips each forward pass holds, by step."""

    seen: dict[int, list[list[str]]]

    def _accumulate(self, parts, count):
        self.seen[parts[0][0].step] = [batch.clip_ids for batch, _ in parts]
        return super()._accumulate(parts, count)


def fit(room, folder, seen, *callbacks, **config):
    made = trainer(room, folder, *callbacks, kind=Watched, **config)
    made.seen = {}
    try:
        run = made.fit()
    except SystemExit as stopped:
        assert stopped.code == 128 + signal.SIGTERM
        run = made.run
    # What a stopped run did after its last checkpoint counts for nothing; here there is no such step.
    seen.update(made.seen)
    return run


def stop_after(update):
    def callback(event, trainer):
        if event["event"] == "update" and event["update"] == update:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


def epochs(seen: dict[int, list[list[str]]], clips: int) -> list[Counter]:
    """How often each clip was trained on in each epoch, from the steps in order."""
    counted, found = [], Counter()
    for step in sorted(seen):
        found.update(clip for part in seen[step] for clip in part)
        if sum(found.values()) == clips:
            counted.append(found)
            found = Counter()
    return counted


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_stopped_after_every_update(room, tmp_path, report, accumulation, workers):
    frames = 520 if accumulation == 1 else 640
    config = dict(update_frames=frames, micro_frames=520 if accumulation == 1 else 190, workers=workers)
    seen: dict = {}
    first = trainer(room, tmp_path / "probe", updates=1, warmup_updates=0, **config)
    clips = len(first.dataset.train)
    from f5kit.data import epoch_batches

    lengths = [clip.frames for clip in first.dataset.train]
    updates = sum(len(epoch_batches(lengths, frames, 0, epoch)) for epoch in range(3))
    config |= dict(updates=updates, warmup_updates=1)
    whole = fit(room, tmp_path / "whole", seen, **config)
    parts = {len(step) for step in seen.values()}
    assert parts == {1} if accumulation == 1 else max(parts) >= 4 and len(parts) > 1, parts  # with a remainder
    assert len(seen) == updates and epochs(seen, clips) == [Counter({clip: 1 for clip in epochs(seen, clips)[0]})] * 3
    survived, largest = 0, 0.0
    for stop in range(1, updates):
        folder, again = tmp_path / str(stop), {}
        fit(room, folder, again, stop_after(stop), **config)
        assert RunFolder(folder).latest().update == stop == len(again)
        run = fit(room, folder, again, **config)
        expected, found = losses(whole), losses(run)
        assert expected.keys() == found.keys()
        largest = max([largest, *(abs(a - b) for s in expected for a, b in zip(expected[s], found[s], strict=True))])
        once = epochs(again, clips) == epochs(seen, clips)
        survived += once and all(same(weights(run, n), weights(whole, n)) for n in ("model", "ema", "optimizer"))
    report("F4", injected=updates - 1, survived=survived, silent=int(largest > 0), largest_difference=largest,
           accumulation=accumulation, workers=workers)  # fmt: skip


def test_stopped_with_8_bit_adam(room, tmp_path, report):
    config = dict(updates=6, warmup_updates=1, optimizer="adamw8bit")
    whole = trainer(room, tmp_path / "whole", **config).fit()
    fit(room, tmp_path / "run", {}, stop_after(3), **config)
    run = fit(room, tmp_path / "run", {}, **config)
    equal = losses(run) == losses(whole) and same(weights(run, "optimizer"), weights(whole, "optimizer"))
    report("F4", injected=1, survived=int(equal), optimizer="adamw8bit")
