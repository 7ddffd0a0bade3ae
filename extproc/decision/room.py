"""``Room``: whether a worker has room for a request, asked many times of one moment."""

from __future__ import annotations

from extproc.admission.demand import Demand
from extproc.fleet.pool import Pool
from extproc.fleet.table import some


class Room:
    """One look at a pool; good until something is booked or reported.

    Room for more work implies room for less, so two numbers a model answer nearly every
    question of a long queue.
    """

    def __init__(self, pool: Pool, now: float) -> None:
        self._pool = pool
        self._now = now
        self._fits: dict[str | None, int] = {}
        self._fails: dict[str | None, int] = {}

    def __call__(self, demand: Demand) -> bool:
        """Whether some worker could start this request now."""
        kv_tokens = demand.uncached_tokens + demand.output_tokens
        name = demand.name
        if demand.waiting and self._now - demand.entered_at > self._patience_s:
            return some(self._pool.has_slot(name))
        if kv_tokens <= self._fits.get(name, -1):
            return True
        if kv_tokens >= self._fails.get(name, kv_tokens + 1):
            return False
        if some(self._pool.has_room(name, kv_tokens)):
            self._fits[name] = kv_tokens
            return True
        self._fails[name] = kv_tokens
        return False

    @property
    def _patience_s(self) -> float:
        return self._pool.policy.admission.kv_patience_s
