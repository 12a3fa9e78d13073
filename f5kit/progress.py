"""How far a training is: a bar, a curve and sounds in a notebook, lines elsewhere."""

from __future__ import annotations

import base64
import html
import math
import os
import time

from f5kit.show import loss_figure, players


def is_live() -> bool:
    """Whether someone may be watching: in a notebook kernel, unless F5KIT_PROGRESS=plain asks for lines."""
    if os.environ.get("F5KIT_PROGRESS") == "plain":
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class LiveProgress:
    """A trainer callback that shows how far a run is: bar and curve in a notebook, else a line now and then.

    `samples` is a SampleCallback that stands earlier in the list: its newest sounds get players.
    `every_seconds` is the time between two refreshes (default 2 in a notebook, 10 for lines).
    """

    def __init__(self, samples=None, every_seconds: float | None = None, live: bool | None = None):
        self.live, self.samples = is_live() if live is None else live, samples
        self.every_seconds = every_seconds or (2.0 if self.live else 10.0)
        self.events: list[dict] = []
        self.updates = 0  # of the whole run
        self._shown_at = self._curve_at = -math.inf
        self._curve = ""
        self._handles: dict = {}

    def __call__(self, event: dict, trainer) -> None:
        if event["event"] == "start":
            self.updates = trainer.plan.train.updates
            self._started, self._from = time.monotonic(), event["update"]
        self.events.append(event)
        telling = event["event"] in ("start", "evaluate", "skip", "end")
        if telling or time.monotonic() - self._shown_at >= self.every_seconds:
            self._shown_at = time.monotonic()
            self._show("progress", self._picture()) if self.live else print(self.line(), flush=True)
        if event["event"] == "save" and self.live and self.samples:
            at = f"update {event['update']}"
            self._show("sounds", players({f"{at}, {k}": v for k, v in self.samples.latest.items()}).text)

    def line(self) -> str:
        """One line of text: update, loss, held-out loss, speed, minutes left, and what happened last."""
        last = self.events[-1]
        update, parts = last["update"], [f"update {last['update']}/{self.updates}"]
        recent = [e for e in self.events[-400:] if e["event"] == "update"][-20:]
        if recent:
            parts.append(f"loss {sum(e['loss'] for e in recent) / len(recent):.3f}")
            frames, seconds = (sum(e.get(key, 0) for e in recent) for key in ("frames", "seconds"))
            parts += [f"{frames / seconds:,.0f} frames/s"] if seconds else []
        if last["event"] == "evaluate":
            judged = {"raw": last.get("loss_raw"), "EMA": last.get("loss_ema")}
            parts += [f"held out {name} {loss:.4f}" for name, loss in judged.items() if loss is not None]
        elif last["event"] == "skip":
            parts.append(f"skipped a batch: {last['reason']}")
        left = (self.updates - update) * (time.monotonic() - self._started) / max(1, update - self._from)
        if last["event"] != "end" and update > self._from:
            parts.append(f"{left / 60:.1f} min left")
        return ", ".join(parts)

    def _picture(self) -> str:
        if time.monotonic() - self._curve_at > 5 * self.every_seconds or self.events[-1]["event"] == "end":
            png = loss_figure(self.events, self.updates)._repr_png_()
            self._curve = f'<br><img src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            self._curve_at = time.monotonic()
        update = self.events[-1]["update"]
        bar = f'<progress max="{self.updates}" value="{update}" style="width:60%"></progress>'
        return f"{bar}<br>{html.escape(self.line())}{self._curve}"

    def _show(self, place: str, text: str) -> None:
        """Put HTML into a display of its own, which later calls for the same place replace."""
        from IPython.display import HTML, display

        if place in self._handles:
            self._handles[place].update(HTML(text))
        else:
            self._handles[place] = display(HTML(text), display_id=True)
