"""``Picker``: from costs to an ordered list of columns."""

from __future__ import annotations

import random

import numpy as np

from extproc.fleet.table import Bools, Floats

_TABLE_SIZE = 8_192
JITTER_TOKENS = 0.5
"""Costs that differ by less than this are equal."""


class Picker:
    """Orders columns by cost; equals come in random order.

    Each pick adds a random stretch of a table of random numbers, which breaks ties in all
    places at once for the price of one addition.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._jitter = self._table(_TABLE_SIZE)

    def pick(self, cost: Floats, first: Bools, others: Bools, count: int) -> list[int]:
        """Up to ``count`` distinct columns, the leader out of ``first``, then ``others``.

        The cheapest come first. Empty when ``first`` allows none.
        """
        jittered = cost + self._stretch(len(cost))
        leader = int(np.where(first, jittered, np.inf).argmin())
        if not first[leader]:
            return []
        jittered[~others] = np.inf
        jittered[leader] = -np.inf
        order = jittered.argsort()[:count].tolist()
        return [leader, *(column for column in order[1:] if others[column])]

    def _stretch(self, width: int) -> Floats:
        if len(self._jitter) < 2 * width:
            self._jitter = self._table(4 * width)
        start = self._rng.randrange(len(self._jitter) - width + 1)
        return self._jitter[start : start + width]

    def _table(self, size: int) -> Floats:
        return np.array([self._rng.random() for _ in range(size)]) * JITTER_TOKENS
