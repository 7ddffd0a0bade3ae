"""``Picker``: from costs to an ordered list of columns."""

from __future__ import annotations

import math
import random

import numpy as np

from extproc.fleet.table import Bools, Floats
from extproc.policy import PickerMode

_TABLE_SIZE = 8_192
JITTER_TOKENS = 0.5
"""Costs that differ by less than this are equal."""


class Picker:
    """Orders columns by cost; equals come in random order.

    Each pick adds a random stretch of a table of random numbers, which breaks ties in all
    places at once for the price of one addition. With Gumbel noise in the table the same
    addition draws by softmax.

    Args:
        mode: ``argmin`` leads with the cheapest, ``two_choices`` with the cheaper of two
            drawn at random, ``softmax`` with one drawn by ``exp(-cost / temperature)``.
        tie: costs that differ by less are equal.
        temperature: of softmax, in the costs' unit.
    """

    def __init__(
        self,
        rng: random.Random,
        mode: PickerMode = "argmin",
        *,
        tie: float = JITTER_TOKENS,
        temperature: float = 1.0,
    ) -> None:
        self._rng = rng
        self._mode = mode
        self._tie = tie
        self._temperature = temperature
        self._jitter = self._table(_TABLE_SIZE)

    def pick(self, cost: Floats, first: Bools, others: Bools, count: int) -> list[int]:
        """Up to ``count`` distinct columns, the leader out of ``first``, then ``others``.

        The cheapest come first. Empty when ``first`` allows none.
        """
        jittered = cost + self._stretch(len(cost))
        if self._mode == "two_choices":
            first = self._two_of(first)
        leader = int(np.where(first, jittered, np.inf).argmin())
        if not first[leader]:
            return []
        jittered[~others] = np.inf
        jittered[leader] = -np.inf
        order = jittered.argsort()[:count].tolist()
        return [leader, *(column for column in order[1:] if others[column])]

    def _two_of(self, first: Bools) -> Bools:
        columns = np.flatnonzero(first)
        if len(columns) <= 2:
            return first
        two = np.zeros(len(first), dtype=bool)
        two[self._rng.sample(columns.tolist(), 2)] = True
        return two

    def _stretch(self, width: int) -> Floats:
        if len(self._jitter) < 2 * width:
            self._jitter = self._table(4 * width)
        start = self._rng.randrange(len(self._jitter) - width + 1)
        return self._jitter[start : start + width]

    def _table(self, size: int) -> Floats:
        if self._mode == "softmax":
            return self._temperature * np.array([self._gumbel() for _ in range(size)])
        return np.array([self._rng.random() for _ in range(size)]) * self._tie

    def _gumbel(self) -> float:
        """The negative of a standard Gumbel number: the least of cost plus this is softmax."""
        return math.log(-math.log((self._rng.getrandbits(52) + 0.5) / 2.0**52))
