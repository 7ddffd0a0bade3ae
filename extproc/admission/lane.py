"""``Lane``: turns among the tenants that wait in one lane of one pool.

Deficit round robin over tokens of work (Shreedhar and Varghese, SIGCOMM 1995); within a
tenant requests keep their order, except that one whose model, adapter or quota has no room
does not hold up the tenant's others, and that who came back as told goes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import Enum
from itertools import islice
from typing import Protocol

from extproc.admission.demand import Demand
from extproc.admission.drain_rate import DrainRate
from extproc.policy import LanePolicy

_BACK_AT_ONCE = 8


class Verdict(Enum):
    """Whether a waiting request could run now."""

    RUN = "run"
    LATER = "later"
    """It is too large for what is free: when its turn comes, it is kept room."""
    NO = "no"
    """Nothing of its kind can run: others pass it."""
    NOBODY = "nobody"
    """Nothing of this pool can run."""


class Gate(Protocol):
    """What a request needs beside its turn."""

    def check(self, demand: Demand) -> Verdict:
        """Whether it could run now."""

    def claim(self, demand: Demand) -> None:
        """It has its turn and waits for room: what it needs is not given to others."""


class Flow:
    """One tenant's waiting requests in one lane, and the work it may still add this turn."""

    __slots__ = ("deficit", "kinds", "tokens", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.deficit = 0.0
        self.tokens = 0
        self.kinds: dict[tuple[object, ...], OrderedDict[str, Demand]] = {}

    def add(self, demand: Demand) -> None:
        """Wait behind others of its kind."""
        self.kinds.setdefault(demand.kind, OrderedDict())[demand.id] = demand
        self.tokens += demand.cost_tokens

    def remove(self, demand: Demand) -> None:
        """It waits no more."""
        kind = self.kinds[demand.kind]
        del kind[demand.id]
        if not kind:
            del self.kinds[demand.kind]
        self.tokens -= demand.cost_tokens

    def heads(self) -> list[Demand]:
        """The first of each kind, in the order in which they came."""
        heads = [next(iter(kind.values())) for kind in self.kinds.values()]
        if len(heads) > 1:
            heads.sort(key=lambda demand: demand.sequence)
        return heads

    def head(self, gate: Gate) -> tuple[Demand | None, Verdict]:
        """The first to have come among those whose kind can run."""
        for demand in self.heads():
            verdict = gate.check(demand)
            if verdict is Verdict.NOBODY:
                return None, verdict
            if verdict is not Verdict.NO:
                return demand, verdict
        return None, Verdict.NO


class Lane:
    """One lane of one pool.

    Attributes:
        waiting: its requests by the time they entered it.
        flows: tenants with waiting requests.
        tokens: work that waits.
        credit: work that the lane may run before its turn, from its minimum share.
        served: work that it ran for its weight, comparable among lanes of one priority.
    """

    def __init__(self, policy: LanePolicy, quantum_tokens: int) -> None:
        self.policy = policy
        self.waiting: OrderedDict[str, Demand] = OrderedDict()
        self.flows: dict[str, Flow] = {}
        self.tokens = 0
        self.credit = 0.0
        self.served = 0.0
        self.drain = DrainRate()
        self._quantum = quantum_tokens
        self._weights = 0.0
        self._ring: OrderedDict[str, Flow] = OrderedDict()
        """Flows that may run; the first has the turn. Others are parked at what they lack."""
        self._turn_begun = False
        self._holders: set[str] = set()
        self._back: OrderedDict[str, Demand] = OrderedDict()

    def add(self, demand: Demand, now: float) -> None:
        """Wait for the tenant's turn."""
        demand.entered_at = now
        self.waiting[demand.id] = demand
        flow = self.flows.get(demand.tenant)
        if flow is None:
            flow = self.flows[demand.tenant] = Flow(demand.weight)
            self._weights += flow.weight
            self.drain.resume(now)
        if demand.kind not in flow.kinds:
            self._ring[demand.tenant] = flow
        flow.add(demand)
        self.tokens += demand.cost_tokens
        if demand.returned:
            self._back[demand.id] = demand

    def remove(self, demand: Demand, now: float) -> None:
        """It waits no more; a tenant with nothing waiting keeps no claim."""
        del self.waiting[demand.id]
        self._back.pop(demand.id, None)
        flow = self.flows[demand.tenant]
        flow.remove(demand)
        self.tokens -= demand.cost_tokens
        if not flow.kinds:
            self._leave_ring(demand.tenant)
            del self.flows[demand.tenant]
            self._holders.discard(demand.tenant)
            self._weights -= flow.weight
        if not self.flows:
            self._weights = 0.0
            self.credit = 0.0
            self.drain.pause(now)

    def candidate(self, gate: Gate) -> Demand | None:
        """Whose turn it is among those that can run; asking again gives the same answer.

        Who came back as told has waited its turns elsewhere: it goes first, and its tenant's
        next turns pay for that.
        """
        for demand in list(islice(self._back.values(), _BACK_AT_ONCE)):
            verdict = gate.check(demand)
            if verdict is Verdict.RUN:
                return demand
            if verdict is Verdict.NOBODY:
                return None
            if verdict is Verdict.LATER:
                gate.claim(demand)
        return self._by_turns(gate)

    def _by_turns(self, gate: Gate) -> Demand | None:
        for tenant in list(self._holders):
            flow = self.flows[tenant]
            demand, verdict = flow.head(gate)
            if verdict is Verdict.NOBODY:
                return None
            if demand is None:
                self._holders.discard(tenant)
            elif flow.deficit < demand.cost_tokens:
                self._holders.discard(tenant)
                self._pass_on(tenant)
            elif verdict is Verdict.RUN:
                return demand
            else:
                gate.claim(demand)
        return self._go_round(gate)

    def _go_round(self, gate: Gate) -> Demand | None:
        """Turns go round until a tenant has saved up the cost of its request.

        Rounds that would only add up are skipped in one step. Who has its turn and waits
        for room keeps it.
        """
        able: list[tuple[Flow, Demand]] = []
        for _ in range(len(self._ring)):
            tenant, flow = next(iter(self._ring.items()))
            holds = tenant in self._holders
            demand, verdict = (None, Verdict.NO) if holds else flow.head(gate)
            if verdict is Verdict.NOBODY:
                return None
            if demand is None and not holds and self._park(tenant, flow):
                continue
            if demand is not None:
                if not self._turn_begun:
                    flow.deficit += self._quantum * flow.weight
                    self._turn_begun = True
                if flow.deficit < demand.cost_tokens:
                    able.append((flow, demand))
                elif verdict is Verdict.RUN:
                    return demand
                else:
                    self._holders.add(tenant)
                    gate.claim(demand)
            self._pass_on(tenant)
        if not able:
            return None
        rounds = min(
            math.ceil((demand.cost_tokens - flow.deficit) / (self._quantum * flow.weight))
            for flow, demand in able
        )
        for flow, _ in able:
            flow.deficit += (rounds - 1) * self._quantum * flow.weight
        return self._go_round(gate)

    def run(self, demand: Demand, now: float) -> None:
        """The candidate runs."""
        flow = self.flows[demand.tenant]
        flow.deficit -= demand.cost_tokens
        self.served += demand.cost_tokens / self.policy.weight
        self.drain.add(demand.cost_tokens, now)
        self.remove(demand, now)

    def earn(self, admitted_tokens: int) -> None:
        """Others ran so much while this lane waited: part of it is its own."""
        oldest = next(iter(self.waiting.values()))
        cap = 2.0 * max(admitted_tokens, oldest.cost_tokens)
        self.credit = min(cap, self.credit + self.policy.min_share * admitted_tokens)

    def charge(self, tenant: str, excess_tokens: int) -> None:
        """A tenant's request was larger than it said, or smaller: its turn pays for that."""
        flow = self.flows.get(tenant)
        if flow is not None:
            flow.deficit -= excess_tokens

    @property
    def due(self) -> bool:
        """Whether its minimum share has saved up the cost of the request that waited longest."""
        return self.credit >= next(iter(self.waiting.values())).cost_tokens

    def work_ahead(
        self,
        tenant: str,
        weight: float,
        cost_tokens: int,
        own_tokens: float = 0.0,
        all_tokens: float = 0.0,
    ) -> float:
        """Work that runs before a request that comes now has run: the tenant's own, and as
        much for each unit of weight of the others as long as they have it.

        Args:
            own_tokens, all_tokens: of the tenant's and of everybody's requests that do not
                wait here and yet will run before it.
        """
        flow = self.flows.get(tenant)
        own = (flow.tokens if flow is not None else 0) + own_tokens
        weights = self._weights if flow is not None else self._weights + weight
        by_turns = (own + cost_tokens) / weight * weights
        return min(by_turns, self.tokens + all_tokens + cost_tokens)

    def _pass_on(self, tenant: str) -> None:
        """The tenant's turn is over."""
        if tenant == next(iter(self._ring)):
            self._turn_begun = False
        self._ring.move_to_end(tenant)

    def unpark(self, tenant: str) -> None:
        """There may be room for a tenant again."""
        flow = self.flows.get(tenant)
        if flow is not None and tenant not in self._ring:
            self._ring[tenant] = flow

    def _park(self, tenant: str, flow: Flow) -> bool:
        """Look at a flow no more until a counter of its own has room; False if it lacks other
        things too."""
        heads = flow.heads()
        counters = [demand.parked_at for demand in heads if demand.parked_at is not None]
        if len(counters) < len(heads):
            return False
        for counter in counters:
            counter.parked[self, tenant] = None
        self._leave_ring(tenant)
        return True

    def _leave_ring(self, tenant: str) -> None:
        if tenant in self._ring:
            if tenant == next(iter(self._ring)):
                self._turn_begun = False
            del self._ring[tenant]
