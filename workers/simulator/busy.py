"""``BusyMeter``: share of wall time that a step loop computed, over the last second.

Several readers may ask at any time and get the same answer. Pure: time is handed in.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 1.0


class BusyMeter:
    """Steps one after the other; one may be under way."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._began_s: float | None = None

    def begin(self, now_s: float) -> None:
        """A step begins."""
        self._began_s = now_s

    def end(self, now_s: float) -> None:
        """It is over."""
        if self._began_s is not None:
            self._steps.append((self._began_s, now_s))
            self._began_s = None
            self._forget(now_s)

    def ratio(self, now_s: float) -> float:
        """Busy share of the window that ends now, 0 to 1."""
        self._forget(now_s)
        first_s = now_s - WINDOW_S
        busy_s = sum(ended_s - max(began_s, first_s) for began_s, ended_s in self._steps)
        if self._began_s is not None:
            busy_s += now_s - max(self._began_s, first_s)
        return min(1.0, max(0.0, busy_s / WINDOW_S))

    def _forget(self, now_s: float) -> None:
        while self._steps and self._steps[0][1] <= now_s - WINDOW_S:
            self._steps.popleft()
