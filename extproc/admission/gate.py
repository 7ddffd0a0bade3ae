"""``Gate``: whether a request could run now, but for its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from extproc.admission.counters import Block
from extproc.admission.demand import Demand
from extproc.admission.lane import Verdict
from extproc.admission.pool_state import PoolState

HasRoom: TypeAlias = Callable[[Demand], bool]
"""Whether some worker could start a request now."""


class Gate:
    """Quota first, then room on a worker. One for each look at a queue."""

    __slots__ = ("_has_room", "_now", "_pool")

    def __init__(self, pool: PoolState, has_room: HasRoom, now: float) -> None:
        self._pool = pool
        self._has_room = has_room
        self._now = now

    def check(self, demand: Demand) -> Verdict:
        """Whether it could run now; notes on the demand what it lacks."""
        cost_tokens = demand.cost_tokens
        demand.parked_at = None
        for counter in demand.counters:
            block = Block.COUNT if counter.claimed else counter.block(cost_tokens, self._now)
            if block is not None:
                demand.blocked_by = counter.reason
                if block is Block.SIZE:
                    return Verdict.LATER
                if counter.rule.for_all:
                    return Verdict.NOBODY
                if counter.waits_for_an_end and not counter.claimed:
                    demand.parked_at = counter
                return Verdict.NO
        if not self._has_room(demand):
            demand.blocked_by = f"capacity:{demand.pool}"
            return Verdict.NO
        return Verdict.RUN

    def claim(self, demand: Demand) -> None:
        """Keep what it lacks from others."""
        for counter in demand.counters:
            if not counter.claimed and counter.block(demand.cost_tokens, self._now):
                counter.claimed = True
                self._pool.claims.append(counter)
