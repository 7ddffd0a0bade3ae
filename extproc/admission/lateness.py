"""``Lateness``: how much later first tokens come than the prefill alone would take."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

_REMEMBERED = 128
_QUANTILE = 0.95


class Lateness:
    """A high quantile of what predictions missed lately.

    Batching beside other requests, and prefills that an engine has taken before, make first
    tokens late by more than their own prefill; a request that runs at the last moment that
    its prefill allows would miss its budget. These delays have a long tail, which a mean and
    its deviation do not tell.
    """

    def __init__(self) -> None:
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """A first token came ``actual_s`` after its request was sent to a worker."""
        if len(self._by_age) == _REMEMBERED:
            del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]
        error_s = actual_s - predicted_s
        self._by_age.append(error_s)
        insort(self._by_size, error_s)

    @property
    def margin_s(self) -> float:
        """What to add to a prediction so that few first tokens come later; never negative."""
        if not self._by_size:
            return 0.0
        return max(0.0, self._by_size[math.ceil(_QUANTILE * len(self._by_size)) - 1])
