"""F11, the other half: while copies go to a Hub that is silent or broken, the training loses at most one second in 100.

What is measured is the time that the training thread spends in the callback, as a share of the training: on a machine
with other work the difference of two runs' times would be noise.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from hub_server import serve  # noqa: E402

from f5kit.backup import Backup  # noqa: E402
from f5kit.host import detect_host  # noqa: E402
from f5kit.plan import plan_run  # noqa: E402
from f5kit.trainer import Trainer  # noqa: E402

TOKEN = "hf_" + "delayToken" * 4
UPDATES, SAVES = 60, 3


@pytest.mark.parametrize("kind", ["stall", "reset", 500])
def test_a_broken_hub_delays_nothing(kind, dataset, monkeypatch, tmp_path, report):
    with serve(TOKEN) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for place in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
            monkeypatch.setattr(place, hub.endpoint, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        fault = hub.fail("/commit/", kind, times=10**6)
        plan = plan_run("tiny", dataset, detect_host("cpu"), updates=UPDATES, update_frames=2400, micro_frames=2400)
        copies = Backup("hub:you/runs")
        monkeypatch.setattr(copies, "wait", lambda timeout=None: True)  # the end of the run waits on purpose
        plan = replace(plan, train=replace(plan.train, save_every=UPDATES // SAVES))
        trainer = Trainer(plan, dataset, tmp_path / "my_voice", [copies])
        started = time.monotonic()
        trainer.fit()
        seconds = time.monotonic() - started
        saves = sum(event["event"] == "save" for event in trainer.run.events())
        assert saves >= SAVES and (fault.met or copies._busy)
        assert copies.blocked <= 0.01 * seconds, f"{copies.blocked:.3f} s of {seconds:.1f} s"
        delay = f"{copies.blocked / seconds:.2%}"
        report("F11", injected=saves, survived=saves, while_training=kind, delay=delay)
