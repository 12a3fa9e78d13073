"""Two voices compared without knowing which is which."""

from __future__ import annotations

import html
import math
import random

from f5kit.errors import UserError
from f5kit.show import players


class BlindAB:
    """Compare two voices without knowing which is which.

    `pairs` holds dicts of two sounds by name, the same names in each. Pairs and sides are shuffled by `seed`.
    `vote` is what the buttons do; `summary` names the voices at the end.
    """

    def __init__(self, pairs: list[dict], seed: int = 0):
        import ipywidgets as w

        names = [tuple(sorted(pair)) for pair in pairs]
        if not pairs or len(set(names)) != 1 or len(names[0]) != 2:
            raise UserError(f"blind_ab needs pairs of the same two names; these have {sorted(set(names))}")
        dice = random.Random(seed)
        self.names, self.pairs = names[0], dice.sample(pairs, len(pairs))
        self.sides = [dice.sample(self.names, 2) for _ in pairs]
        self.votes: list[str | None] = []  # the preferred name, None for no difference
        self.status, self.sounds = w.HTML(), w.HTML()
        self.buttons = [w.Button(description=text) for text in ("First", "Second", "No difference")]
        for choice, button in enumerate(self.buttons):
            button.on_click(lambda _button, choice=choice: self.vote(choice))
        self.box = w.VBox([self.status, self.sounds, w.HBox(self.buttons)])
        self._show()

    def vote(self, choice: int) -> None:
        """Prefer the first (0) or second (1) sound of the pair on show, or neither (2)."""
        if len(self.votes) == len(self.pairs):
            return
        self.votes.append([*self.sides[len(self.votes)], None][choice])
        self._show()

    def summary(self) -> str:
        """How often each was preferred, and how often chance alone would prefer one side as clearly."""
        counts = {name: self.votes.count(name) for name in self.names}
        n, most = sum(counts.values()), max(counts.values())
        by_chance = sum(math.comb(n, k) for k in range(n + 1) if max(k, n - k) >= most) / 2**n
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        none = self.votes.count(None)
        return f"{told}, no difference {none}; chance alone is as clear in {by_chance:.0%} of such tests"

    def _show(self) -> None:
        done = len(self.votes)
        if done == len(self.pairs):
            self.status.value, self.sounds.value = html.escape(self.summary()), ""
        else:
            self.status.value = f"Pair {done + 1} of {len(self.pairs)}: which do you prefer?"
            sounds = [self.pairs[done][name] for name in self.sides[done]]
            self.sounds.value = players(dict(zip(("First", "Second"), sounds, strict=True))).text
        for button in self.buttons:
            button.disabled = done == len(self.pairs)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)
