"""``FairQueue``: who of a pool's waiting requests is next.

Lanes come by priority, with a minimum share for those below; within a lane tenants take
turns (``lane``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from extproc.admission.demand import Demand
from extproc.admission.lane import Gate, Lane
from extproc.policy import LanePolicy


class FairQueue:
    """All lanes of one pool, highest priority first."""

    def __init__(self, lanes: Sequence[LanePolicy], quantum_tokens: int) -> None:
        ordered = sorted(lanes, key=lambda lane: lane.priority)
        self.lanes = {lane.name: Lane(lane, quantum_tokens) for lane in ordered}
        self.top_priority = ordered[0].priority
        self._order = list(self.lanes.values())

    def __len__(self) -> int:
        return sum([len(lane.waiting) for lane in self._order])

    def __iter__(self) -> Iterator[Demand]:
        for lane in self._order:
            yield from lane.waiting.values()

    def add(self, demand: Demand, now: float) -> None:
        """Wait in the demand's lane."""
        lane = self.lanes[demand.lane]
        if not lane.waiting:
            # A lane that comes back is even with its peers: idle time saves nothing up.
            peers = [each.served for each in self._order if each.waiting and _peers(each, lane)]
            lane.served = max(lane.served, min(peers, default=0.0))
        lane.add(demand, now)

    def remove(self, demand: Demand, now: float) -> None:
        """It waits no more."""
        self.lanes[demand.lane].remove(demand, now)

    def candidate(self, gate: Gate) -> Demand | None:
        """Who is next, or None when nobody can run."""
        waiting = [lane for lane in self._order if lane.waiting]
        waiting.sort(key=lambda lane: (not lane.due, lane.policy.priority, lane.served))
        for lane in waiting:
            demand = lane.candidate(gate)
            if demand is not None:
                return demand
        return None

    def youngest_below(self, lane_name: str) -> Iterator[Demand]:
        """The last to have come into each lane of a lower priority, lowest lane first."""
        priority = self.lanes[lane_name].policy.priority
        for lane in reversed(self._order):
            if lane.policy.priority > priority and lane.waiting:
                yield lane.waiting[next(reversed(lane.waiting))]

    def run(self, demand: Demand, now: float) -> None:
        """The candidate runs; lanes with a minimum share that go on waiting gain credit."""
        cost_tokens = demand.cost_tokens
        for lane in self._order:
            if lane.waiting and lane.policy.min_share:
                lane.earn(cost_tokens)
        lane = self.lanes[demand.lane]
        lane.credit = max(0.0, lane.credit - cost_tokens)
        lane.run(demand, now)

    def promote(self, now: float) -> None:
        """Requests that waited their lane's time go on in the next higher priority."""
        for lane in reversed(self._order):
            after_s = lane.policy.promote_after_s
            above = self._above(lane)
            while after_s is not None and above is not None and lane.waiting:
                oldest = next(iter(lane.waiting.values()))
                if now - oldest.entered_at < after_s:
                    break
                lane.remove(oldest, now)
                oldest.lane = above.policy.name
                self.add(oldest, now)

    def _above(self, lane: Lane) -> Lane | None:
        higher = [each for each in self._order if each.policy.priority < lane.policy.priority]
        return higher[-1] if higher else None


def _peers(one: Lane, other: Lane) -> bool:
    return one.policy.priority == other.policy.priority
