"""Which letters say which phonemes: the best monotonic alignment, found from the texts and phonemes alone.

Each letter says nothing, one phoneme or two. How likely each phoneme is for a letter, and how many it says, start from
where letters and phonemes stand in their clips, and are then counted on the best alignments, three times over (as in
letter-to-sound training: Black, Lenzo & Pagel, 1998).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

ROUNDS, SAID = 3, (0, 1, 2)
_NEVER = 1e-5


class Alignment:
    """Learned from (text, phonemes) pairs; aligns any such pair."""

    def __init__(self, pairs: Sequence[tuple[str, Sequence[str]]]):
        self._phones, self._counts = defaultdict(Counter), defaultdict(Counter)
        for text, phones in pairs:
            for j, phone in enumerate(phones):
                near = int(j / len(phones) * len(text))
                self._phones_near(text[max(near - 2, 0) : near + 3], phone)
        for _ in range(ROUNDS):
            said = [self.align(text, phones) for text, phones in pairs]
            self._phones, self._counts = defaultdict(Counter), defaultdict(Counter)
            for (text, phones), counts in zip(pairs, said, strict=True):
                rest = iter(phones)
                for letter, count in zip(text.lower(), counts, strict=True):
                    self._counts[letter][count] += 1
                    self._phones[letter].update(next(rest) for _ in range(count))

    def _phones_near(self, letters: str, phone: str) -> None:
        for letter in letters.lower():
            self._phones[letter][phone] += 1

    def _cost(self, counter: Counter, key) -> float:
        return -math.log(max(counter[key] / max(counter.total(), 1), _NEVER))

    def align(self, text: str, phones: Sequence[str]) -> list[int]:
        """How many of the phonemes each letter says, in order (Viterbi)."""
        best, back = [0.0] + [math.inf] * len(phones), []
        for letter in text.lower():
            counts = self._counts[letter]
            of_count = [self._cost(counts, k) if counts else 0.0 for k in SAID]
            of_phone = [self._cost(self._phones[letter], phone) for phone in phones]
            new, chosen = [], []
            for j in range(len(phones) + 1):
                ways = [(best[j - k] + of_count[k] + sum(of_phone[j - k : j]), k) for k in SAID if k <= j]
                cost, k = min(ways)
                new.append(cost)
                chosen.append(k)
            best, back = new, [*back, chosen]
        said, j = [], len(phones)
        for chosen in reversed(back):
            said.append(chosen[j])
            j -= chosen[j]
        return said[::-1]
