"""From costs to an ordered list of columns."""

from __future__ import annotations

import random

import numpy as np

from extproc.fleet.table import Bools, Floats


def pick(cost: Floats, allowed: Bools, count: int, rng: random.Random) -> list[int]:
    """Up to ``count`` allowed columns, cheapest first; ties in random order."""
    columns = np.flatnonzero(allowed)
    if not len(columns):
        return []
    costs = cost[columns]
    best = float(costs.min())
    ties = np.flatnonzero(costs == best)
    first = int(ties[rng.randrange(len(ties))]) if len(ties) > 1 else int(ties[0])
    if count == 1 or len(columns) == 1:
        return [int(columns[first])]
    costs[first] = -np.inf  # the chosen one leads whatever the order of its equals
    # The rest starts at a random column: later places are not always the same equals'.
    turn = rng.randrange(len(columns))
    order = np.argsort(np.concatenate((costs[turn:], costs[:turn])), kind="stable")[:count]
    return [int(columns[(place + turn) % len(columns)]) for place in order]
