"""What ends a training early and yet in order: SIGTERM, SIGINT, and the time that a host allows."""

from __future__ import annotations

import signal
import threading
import time


class Interrupts:
    """Signals and a time limit, noted for the time of a with block and asked for between two steps.

    A second SIGINT (the stop button pressed again) interrupts at once. Only the main thread of a process can note
    signals; elsewhere the time limit alone counts. The clock never runs back, whatever happens to the time of day.
    """

    def __init__(self, max_minutes: float | None = None):
        self.max_seconds = None if max_minutes is None else 60 * max_minutes
        self._signal: int | None = None
        self._former: dict[int, object] = {}
        self._started = time.monotonic()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _note(self, number: int, frame) -> None:
        if number == self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number

    def reason(self, margin: float) -> str | None:
        """Why to stop now, or None. `margin` is how many seconds before the limit there must be left."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self.max_seconds is not None and time.monotonic() - self._started > self.max_seconds - margin:
            return "time"
        return None

    def pass_on(self) -> None:
        """After the run was brought into order, do what the signal asked for."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
