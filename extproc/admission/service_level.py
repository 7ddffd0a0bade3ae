"""``ServiceLevel``: how many requests of a pool meet their budgets, fading with age."""

from __future__ import annotations

import math

_MEMORY_S = 60.0


class _Fading:
    """A sum of events that fade with a time constant; divided by it, a rate."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self.total(now) + amount
        self._at = now

    def total(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._at) / _MEMORY_S)


class ServiceLevel:
    """First tokens and ends against TTFT and TPOT budgets, over about the last minute."""

    def __init__(self) -> None:
        self._started = _Fading()
        self._late = _Fading()
        self._good = _Fading()

    def first_token(self, ttft_s: float, budget_s: float | None, now: float) -> None:
        """A request got its first token so long after it arrived."""
        self._started.add(1.0, now)
        if budget_s is not None and ttft_s > budget_s:
            self._late.add(1.0, now)

    def ended_well(self, now: float) -> None:
        """A request ended without an error and within its budgets."""
        self._good.add(1.0, now)

    def violation_rate(self, now: float) -> float:
        """Part of the first tokens that came after their budget, 0 to 1."""
        started = self._started.total(now)
        return self._late.total(now) / started if started > 1e-6 else 0.0

    def goodput_per_s(self, now: float) -> float:
        """Requests a second that met their budgets."""
        return self._good.total(now) / _MEMORY_S
