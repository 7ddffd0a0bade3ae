"""``PoolState``: what admission keeps of one pool, and how long its requests will wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.admission.counters import Counter
from extproc.admission.demand import Demand
from extproc.admission.fair_queue import FairQueue
from extproc.admission.returns import Returns
from extproc.policy import PoolPolicy

SHORTEST_RETRY_S = 0.25
LONGEST_RETRY_S = 60.0
_BLIND_RETRY_S = 1.0
"""When nothing was seen yet from which a wait could be told."""


@dataclass(slots=True)
class PoolState:
    """What admission keeps of one pool."""

    policy: PoolPolicy
    queue: FairQueue
    running: int = 0
    running_tokens: int = 0
    mean_hold_s: float | None = None
    waiting_bytes: int = 0
    claims: list[Counter] = field(default_factory=list)
    returns: Returns = field(default_factory=Returns)
    unpaid: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    """By lane and tenant: work of leases that run without having had to wait for a turn."""

    def drop_claims(self) -> None:
        """Nobody is kept room until the next look at the queue."""
        for counter in self.claims:
            counter.claimed = False
        self.claims.clear()

    def oldest_wait_s(self, now: float) -> float:
        """How long the request that waits longest has waited; 0 when nobody waits."""
        lanes = [lane for lane in self.queue.lanes.values() if lane.waiting]
        firsts = [next(iter(lane.waiting.values())) for lane in lanes]
        return now - min((demand.arrived_at for demand in firsts), default=now)

    def expected_wait_s(
        self, demand: Demand, now: float, returning_within_s: float = 0.0
    ) -> float | None:
        """How long a request that comes now is likely to wait; None when nothing tells.

        The longest of what its lane's and its rules' measured drain rates say.

        Args:
            returning_within_s: requests that were told to come back so soon go before it.
        """
        lane, returns = self.queue.lanes[demand.lane], self.returns
        cost_tokens = demand.cost_tokens
        back = returns.tokens_due(demand.lane, returning_within_s, now)
        own = back / returns.tokens(demand.lane) if back else 0.0
        own *= returns.tokens_of(demand.lane, demand.tenant)
        ahead = lane.work_ahead(demand.tenant, demand.weight, cost_tokens, own, back)
        rate = lane.drain.per_s(now) or self._rate_of_service()
        wait_s = max(
            (counter.wait_s(cost_tokens, now, own) for counter in demand.counters), default=0.0
        )
        if rate:
            return max(wait_s, ahead / rate)
        return wait_s or None

    def pressing_wait_s(self, now: float) -> float:
        """Expected wait of what waits in the lanes of the highest priority; 0 for nothing."""
        waits = [0.0]
        for lane in self.queue.lanes.values():
            if lane.waiting and lane.policy.priority == self.queue.top_priority:
                rate = lane.drain.per_s(now) or self._rate_of_service()
                oldest = next(iter(lane.waiting.values()))
                waits.append(max(now - oldest.arrived_at, lane.tokens / rate if rate else 0.0))
        return max(waits)

    def retry_after_s(self, demand: Demand, now: float) -> float:
        """When a client that comes back has waited as long as it would have had to here."""
        expected_s = self.expected_wait_s(demand, now, LONGEST_RETRY_S)
        if expected_s is None:
            return _BLIND_RETRY_S
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, expected_s))

    def _rate_of_service(self) -> float | None:
        """Work a second by Little's law, for a queue that has not drained yet."""
        if not self.mean_hold_s or not self.running_tokens:
            return None
        return self.running_tokens / self.mean_hold_s
