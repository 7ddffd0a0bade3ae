"""``Drain``: from serving to drained, by command or for good.

A drain by command stays until it is undone; one by SIGTERM ends with the agent. It is over
when nothing has run for ``SETTLE_S`` (a request sent before the schedulers heard of the
drain may still be on its way) or at the deadline.
"""

from __future__ import annotations

import math
from enum import Enum

SETTLE_S = 0.5


class Draining(Enum):
    """How far it is."""

    NOT = "not"
    UNDER_WAY = "under_way"
    DONE = "done"


class Drain:
    """One worker's drain. Pure: time is handed in."""

    def __init__(self) -> None:
        self.for_good = False
        """The agent leaves afterwards; cannot be undone."""
        self.state = Draining.NOT
        self.cut = False
        """The deadline came before the last request ended."""
        self._deadline_s = math.inf
        self._quiet_since_s: float | None = None

    def begin(self, seconds: float, now_s: float, *, for_good: bool = False) -> None:
        """Take nothing new and be drained after ``seconds`` at most.

        Only the first of several deadlines can be brought forward by a later one.
        """
        self.for_good = self.for_good or for_good
        deadline_s = now_s + max(0.0, seconds)
        if self.state is Draining.NOT:
            self.state = Draining.UNDER_WAY
            self._deadline_s, self._quiet_since_s, self.cut = deadline_s, None, False
        self._deadline_s = min(self._deadline_s, deadline_s)

    def resume(self) -> None:
        """Serve again."""
        if not self.for_good:
            self.state = Draining.NOT

    def observe(self, in_flight: float | None, now_s: float) -> None:
        """Tell how many requests run on the engine now; None = unknown."""
        if self.state is not Draining.UNDER_WAY:
            return
        if in_flight != 0:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        quiet = self._quiet_since_s is not None and now_s - self._quiet_since_s >= SETTLE_S
        if quiet or now_s >= self._deadline_s:
            self.cut = not quiet
            self.state = Draining.DONE
