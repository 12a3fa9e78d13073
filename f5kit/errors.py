"""The one exception of the kit that speaks to its user."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend, said in one sentence: the value, the place, the remedy.

    IPython shows the sentence alone, without a traceback, because the remedy lies outside the code.
    Everything else that goes wrong is a fault of the program and keeps its traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: the lines to print in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]
