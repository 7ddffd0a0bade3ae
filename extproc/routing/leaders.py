"""What narrows the choice of a leader: staying, holders of hot prefixes, new workers.

Each function takes the workers that may lead and gives those that should, never none.
"""

from __future__ import annotations

import random

import numpy as np

from extproc.fleet.table import Bools, Floats, Ints, WorkerTable, some
from extproc.policy import AffinityPolicy, ReplicaPolicy, WarmupPolicy
from extproc.routing.history import Placement

_HOLDS_SHARE = 0.9
"""Part of the longest match that makes a worker one of the prefix's holders."""


def staying(
    allowed: Bools,
    column: int,
    placed: Placement,
    load: Floats,
    policy: AffinityPolicy,
    now: float,
) -> Bools:
    """The conversation's last worker alone, for a while and below a load."""
    stays = (
        column >= 0
        and now - placed.placed_at < policy.sticky_s
        and load[column] <= policy.sticky_max_load
        and bool(allowed[column])
    )
    if not stays:
        return allowed
    alone = np.zeros(len(allowed), dtype=bool)
    alone[column] = True
    return alone


def holders_of(cached: Floats, best: float, present: Bools) -> Bools:
    """Workers that have about as much of the prefix as anybody."""
    holders: Bools = present & (cached >= _HOLDS_SHARE * best)
    return holders


def keeping_to_holders(
    allowed: Bools,
    holders: Bools,
    loaded: Bools,
    order: Floats,
    policy: ReplicaPolicy,
) -> Bools:
    """A hot prefix's first ``max_holders`` holders that have room and are not too loaded.

    With fewer holders than that, and once all of them are loaded, anybody may become one.

    Args:
        loaded: workers with so much to do that the prefix had better spread.
        order: decides which holders stay when there are too many, lowest first; the same
            for every request of the prefix.
    """
    columns = np.flatnonzero(holders)
    if len(columns) < policy.max_holders:
        return allowed
    kept = columns[np.argsort(order[columns])][: policy.max_holders]
    narrowed = np.zeros(len(allowed), dtype=bool)
    narrowed[kept] = allowed[kept] & ~loaded[kept]
    return narrowed if some(narrowed) else allowed


def newcomers(table: WorkerTable, usable: Bools, policy: WarmupPolicy, now: float) -> Bools | None:
    """Workers that are new among older ones; None if all are alike."""
    new: Bools = usable & (now - table.joined_at < policy.duration_s)
    return new if some(new) and some(usable & ~new) else None


def exploring(
    allowed: Bools,
    new: Bools,
    running: Floats | Ints,
    usable: Bools,
    policy: WarmupPolicy,
    rng: random.Random,
) -> Bools:
    """New workers alone, for a share of the prompts that nobody has a good part of."""
    if rng.random() >= policy.share:
        return allowed
    bound = policy.max_load * max(1.0, float(running[usable].mean()))
    narrowed: Bools = allowed & new & (running < bound)
    return narrowed if some(narrowed) else allowed


def discounted(load: Ints, new: Bools, age_s: Floats, policy: WarmupPolicy) -> Floats:
    """Load with what new workers are forgiven, fading over their time as new."""
    left = np.clip(1.0 - age_s / policy.duration_s, 0.0, 1.0)
    lighter: Floats = load * (1.0 - policy.load_discount * left * new)
    return lighter
