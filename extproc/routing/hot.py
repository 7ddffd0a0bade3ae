"""``HotPrefixes``: how often each prefix is asked for, for the most recently used ones."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

_MEMORY_S = 30.0
"""Older requests fade with this time constant."""


class HotPrefixes:
    """Exponentially fading request rates by block key, a second."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._rates: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def note(self, key: int, now: float) -> None:
        """A request whose cached part ends in this block."""
        self._rates[key] = self.per_s(key, now) + 1.0 / _MEMORY_S, now
        self._rates.move_to_end(key)
        if len(self._rates) > self._max_entries:
            self._rates.popitem(last=False)

    def per_s(self, key: int, now: float) -> float:
        """Requests a second that asked for a prefix lately."""
        rate, at = self._rates.get(key, (0.0, now))
        return rate * math.exp(-max(0.0, now - at) / _MEMORY_S)

    def top(self, count: int, now: float) -> list[tuple[int, float]]:
        """The most asked for: block key and requests a second."""
        rates = ((key, self.per_s(key, now)) for key in self._rates)
        return heapq.nlargest(count, rates, key=lambda pair: pair[1])
