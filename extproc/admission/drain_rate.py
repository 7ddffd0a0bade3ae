"""``DrainRate``: how fast a pool finishes requests, for expected waits."""

from __future__ import annotations

import math

_MEMORY_S = 10.0
"""Older releases fade with this time constant."""


class DrainRate:
    """Exponentially fading rate of releases.

    Each release adds ``1/T`` and everything decays by ``exp(-dt/T)``, so a steady flow of
    r a second settles at r.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._at: float | None = None

    def release(self, now: float) -> None:
        """One request finished at ``now`` (seconds)."""
        self._rate = self.per_s(now) + 1.0 / _MEMORY_S
        self._at = now

    def per_s(self, now: float) -> float:
        """Releases a second."""
        if self._at is None:
            return 0.0
        return self._rate * math.exp(-max(0.0, now - self._at) / _MEMORY_S)

    def wait_s(self, ahead: int, now: float, *, longest_s: float) -> float:
        """Expected wait behind ``ahead`` requests; ``longest_s`` when nothing drains."""
        rate = self.per_s(now)
        return min(longest_s, ahead / rate) if rate > 0 else longest_s
