"""A cost term that is tried here and not in the product: what a request would push out.

A worker that computes ``u`` blocks anew with ``f`` free ones evicts ``u - f``. What that loses
is the share of evicted blocks that were asked for again while they would still have been
there, had the cache been twice as large. Agents could tell both numbers with each report.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from benchmarks.routing.requests import BLOCK_TOKENS
from extproc.fleet.pool import Pool
from extproc.fleet.table import Floats
from extproc.policy import Term
from extproc.routing.router import Router
from extproc.routing.terms import Candidates

_FADING = 0.998
"""What counts of a block evicted or asked for again when the next one comes."""


class Regret:
    """Evicted blocks of one worker, remembered for as many evictions as it has blocks.

    Attributes:
        share: of its evicted blocks that were asked for again, 0 to 1.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self.share = 0.0

    def take(self, asked: Sequence[int], evicted: Sequence[int]) -> None:
        """The blocks of a prompt that were not cached, and those that it pushed out."""
        for key in asked:
            if key in self._evicted:
                del self._evicted[key]
                self.share = min(1.0, self.share + 1.0 - _FADING)
        for key in evicted:
            self._evicted[key] = None
            self.share *= _FADING
        while len(self._evicted) > self._blocks:
            self._evicted.popitem(last=False)


class DisplacingRouter(Router):
    """The product's router with one term more, in tokens of prefill work.

    Args:
        pool: all its workers are there.

    Attributes:
        free_blocks, regret: by column, as agents would report them.
    """

    def __init__(self, pool: Pool, rng: random.Random, weight: float) -> None:
        super().__init__(pool, rng)
        self._weight = weight
        width = len(pool.table)
        self.free_blocks: Floats = np.zeros(width)
        self.regret: Floats = np.zeros(width)

    def _terms(self, request: Candidates) -> dict[Term, Floats]:
        terms = super()._terms(request)
        uncached = request.prompt_tokens - request.cached
        displaced = np.maximum(0.0, uncached - BLOCK_TOKENS * self.free_blocks)
        terms["uncached"] = terms["uncached"] + self._weight * self.regret * displaced
        return terms
