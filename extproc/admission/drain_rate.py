"""``DrainRate``: how fast work leaves a queue, for expected waits."""

from __future__ import annotations

import math

_MEMORY_S = 10.0
"""Older departures fade with this time constant."""
_SHORTEST_S = 0.5
"""A rate is not trusted to be higher than what this long a look would give."""


class DrainRate:
    """Exponentially fading rate of departures, on a clock that runs only while work waits.

    A queue that was empty tells nothing of how fast it can be served, so idle time must
    not make the rate look low. With a departure of size a at t, the rate at now is
    ``sum(a * exp(-(now - t) / T)) / (T * (1 - exp(-(now - start) / T)))``: the second
    factor corrects for the time before the first look.
    """

    __slots__ = ("_at_s", "_busy_s", "_since", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at_s = 0.0
        self._busy_s = 0.0
        self._since: float | None = None

    def resume(self, now: float) -> None:
        """Work begins to wait; again while it does changes nothing."""
        if self._since is None:
            self._since = now

    def pause(self, now: float) -> None:
        """Nothing waits any more."""
        if self._since is not None:
            self._busy_s = self._elapsed_s(now)
            self._since = None

    def add(self, amount: float, now: float) -> None:
        """So much left at ``now`` (seconds)."""
        at_s = self._elapsed_s(now)
        self._sum = self._sum * math.exp((self._at_s - at_s) / _MEMORY_S) + amount
        self._at_s = at_s

    def per_s(self, now: float) -> float | None:
        """Work that leaves in a second of waiting; None before the first departure."""
        if not self._sum:
            return None
        elapsed_s = self._elapsed_s(now)
        faded = self._sum * math.exp((self._at_s - elapsed_s) / _MEMORY_S)
        seen_s = max(elapsed_s, _SHORTEST_S)
        return faded / (_MEMORY_S * -math.expm1(-seen_s / _MEMORY_S))

    def _elapsed_s(self, now: float) -> float:
        if self._since is None:
            return self._busy_s
        return self._busy_s + max(0.0, now - self._since)
