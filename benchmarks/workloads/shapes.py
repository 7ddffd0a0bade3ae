"""Distributions that workloads are made of; every draw takes the random source."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]

_Z90 = 1.2815515655446004
"""90th percentile of the standard normal distribution."""


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log-normal by its median and 90th percentile, cut off at ``most``; any unit."""

    p50: Positive
    p90: Positive
    most: Positive = math.inf

    def __post_init__(self) -> None:
        if not self.p50 <= self.p90 <= self.most:
            raise ValueError(f"needs p50 <= p90 <= most, got {self.p50}, {self.p90}, {self.most}")

    def draw(self, rng: random.Random) -> float:
        """One value."""
        sigma = math.log(self.p90 / self.p50) / _Z90
        return min(self.most, self.p50 * math.exp(rng.gauss(0.0, sigma)))

    def count(self, rng: random.Random) -> int:
        """One whole number, at least 1."""
        return max(1, round(self.draw(rng)))


class Zipf:
    """Ranks 0 to ``count - 1``; rank r has weight ``1 / (r + 1) ** exponent``."""

    def __init__(self, count: int, exponent: float) -> None:
        self._ranks = range(count)
        weights = (1.0 / float(rank + 1) ** exponent for rank in self._ranks)
        self._weights: list[float] = list(accumulate(weights))

    def draw(self, rng: random.Random) -> int:
        """One rank."""
        return rng.choices(self._ranks, cum_weights=self._weights)[0]

    def share(self, rank: int) -> float:
        """Probability of one rank."""
        before = self._weights[rank - 1] if rank else 0.0
        return (self._weights[rank] - before) / self._weights[-1]


def arrivals(
    rng: random.Random, rate_per_s: float, duration_s: float, cv: float = 1.0
) -> Iterator[float]:
    """Times from 0 to ``duration_s``, gaps Gamma with this coefficient of variation.

    ``cv`` 1 is a Poisson process, more is burstier (ServeGen finds 1 to 4 for one client).
    """
    shape = 1.0 / cv**2
    scale_s = 1.0 / (rate_per_s * shape)
    now_s = rng.gammavariate(shape, scale_s)
    while now_s < duration_s:
        yield now_s
        now_s += rng.gammavariate(shape, scale_s)
