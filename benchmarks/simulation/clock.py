"""Virtual time: calls in order of when they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Runs calls at their times; ``now`` is seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Run a call at a time, not before now; calls of one time run in order of asking."""
        heapq.heappush(self._calls, (max(when, self.now), next(self._order), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run a call so many seconds from now."""
        self.at(self.now + seconds, call)

    def run(self, done: Callable[[], bool]) -> None:
        """Run calls until there are none or ``done`` says so."""
        while self._calls and not done():
            self.now, _, call = heapq.heappop(self._calls)
            call()
