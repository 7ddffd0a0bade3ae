"""``AdmissionController``: whether a request runs now, waits, or is refused, over all pools.

Quota is taken here, over every matching rule at once; whether a worker has room is asked
of the caller as the second step, so it is always clear which of the two a request waits
for. After every call the scheduler asks ``next_waiting`` until nobody can run, so nobody
waits while quota, capacity and turn allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from extproc.admission.counters import Counter, give_back, take
from extproc.admission.demand import Demand, Lease
from extproc.admission.door import check_size, check_wait, latest_start
from extproc.admission.expiry import Expiries
from extproc.admission.fair_queue import FairQueue
from extproc.admission.gate import Gate, HasRoom
from extproc.admission.lane import Verdict
from extproc.admission.pool_state import PoolState
from extproc.admission.pressure import Pressure
from extproc.admission.quotas import QuotaBook, Rule
from extproc.errors import Contended, QueueFull, QueueTimeout, Refusal, WouldWait
from extproc.policy import AdmissionPolicy, DegradeStep, PoolPolicy


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be said: ``allow``, ``wait``, or a refusal's code, and the numbers of it."""

    verdict: str
    reason: str
    expected_wait_s: float | None
    retry_after_s: float | None


class AdmissionController:
    """Leases and queues of every pool.

    Attributes:
        lanes: by name, as the policy has them.
        granted: leases given out, ever.
        expired_count, left_count, evicted_count: requests whose wait ended without a lease.
    """

    def __init__(self, policy: AdmissionPolicy, pools: Iterable[PoolPolicy], now: float) -> None:
        self.policy = policy
        self.granted = 0
        self.expired_count = 0
        self.left_count = 0
        self.evicted_count = 0
        self._evicted: list[tuple[Demand, Contended]] = []
        self._sequence = 0
        self._expiries = Expiries()
        self._leases: dict[str, Lease] = {}
        self.pools: dict[str, PoolState] = {}
        self._build(policy, list(pools), now)

    # -- arrivals ---------------------------------------------------------------------

    def admit(self, demand: Demand, has_room: HasRoom, now: float) -> Lease | None:
        """A lease now, or None: the request waits.

        Raises:
            Contended, QuotaTooSmall: it can neither run nor wait.
        """
        pool = self.pools[demand.pool]
        self._prepare(demand, now)
        check_size(demand)
        place = pool.returns.take_up(demand.tenant, demand.fingerprint, now)
        if place is not None:
            demand.sequence = place.sequence
            demand.comebacks = place.comebacks + 1
        elder = self._elder(demand)
        if elder is not None:
            demand.blocked_by = elder.blocked_by
        elif Gate(pool, has_room, now).check(demand) is Verdict.RUN:
            pool.returns.settle(demand.tenant, demand.fingerprint)
            unpaid = pool.unpaid.setdefault((demand.lane, demand.tenant), {})
            unpaid[demand.id] = demand.cost_tokens
            return self._grant(demand, now)
        try:
            check_wait(pool, demand, now)
        except QueueFull:
            if not self._evict_for(demand, now):
                raise
            check_wait(pool, demand, now)
        pool.returns.settle(demand.tenant, demand.fingerprint)
        self._enqueue(demand, now)
        return None

    def promise(self, demand: Demand, refusal: Refusal, lane: str, now: float) -> None:
        """Keep the place of a refused request until it comes back as the refusal tells it.

        Args:
            lane: in which it asked, whatever its ladder tried since.
        """
        wait_s = refusal.retry_after_s
        if wait_s is None or not isinstance(refusal, Contended) or isinstance(refusal, WouldWait):
            return
        self._number(demand)
        returns = self.pools[demand.pool].returns
        refusal.retry_after_s = returns.promise(demand, lane, wait_s, now)

    def force(self, demand: Demand, now: float) -> Lease:
        """Run whatever the limits say: admission only watches."""
        self._prepare(demand, now)
        return self._grant(demand, now)

    def bypass(self, demand: Demand, now: float) -> Lease:
        """Run it and count it nowhere: admission is off."""
        demand.counters = ()
        return self._grant(demand, now)

    def withdraw(self, demand: Demand, now: float) -> bool:
        """Take it out of the queue as if it had never asked; False if it does not wait."""
        if demand.waiting:
            self._dequeue(demand, now)
            return True
        return False

    def preview(self, demand: Demand, has_room: HasRoom, now: float) -> Preview:
        """What :meth:`admit` would say now, changing nothing."""
        pool = self.pools[demand.pool]
        self._prepare(demand, now)
        expected_s = pool.expected_wait_s(demand, now)
        try:
            check_size(demand)
            elder = self._elder(demand)
            if elder is not None:
                demand.blocked_by = elder.blocked_by
            elif Gate(pool, has_room, now).check(demand) is Verdict.RUN:
                return Preview("allow", "", 0.0, None)
            check_wait(pool, demand, now)
        except Refusal as refusal:
            return Preview(refusal.code, refusal.reason or "", expected_s, refusal.retry_after_s)
        return Preview("wait", demand.blocked_by, expected_s, None)

    def next_waiting(self, pool_name: str, has_room: HasRoom, now: float) -> Lease | None:
        """A lease for whoever is next in a pool's queue, or None when nobody can run."""
        pool = self.pools[pool_name]
        pool.drop_claims()
        demand = pool.queue.candidate(Gate(pool, has_room, now))
        if demand is None:
            return None
        pool.queue.run(demand, now)
        self._count_waiting(demand, -1, now)
        for counter in demand.counters:
            counter.drain.add(demand.cost_tokens, now)
        return self._grant(demand, now)

    def degrade_steps(self, demand: Demand, refusal: Refusal) -> tuple[DegradeStep, ...]:
        """What may be tried instead of a refusal: the ladder of the rule that refuses, or of
        the first matching rule that has one."""
        rules = [counter.rule for counter in demand.counters]
        rules.sort(key=lambda rule: refusal.reason != f"quota:{rule.name}")
        return next((rule.policy.degrade for rule in rules if rule.policy.degrade), ())

    # -- ends -------------------------------------------------------------------------

    def release(self, lease: Lease, now: float) -> None:
        """Give a lease back; a second call does nothing."""
        if lease.released:
            return
        lease.released = True
        pool = self.pools[lease.demand.pool]
        del self._leases[lease.id]
        pool.running -= 1
        pool.running_tokens -= lease.cost_tokens
        held_s = now - lease.granted_at
        pool.mean_hold_s = (
            held_s
            if pool.mean_hold_s is None
            else pool.mean_hold_s + 0.1 * (held_s - pool.mean_hold_s)
        )
        give_back(lease.holdings)
        key = (lease.demand.lane, lease.demand.tenant)
        unpaid = pool.unpaid.get(key)
        if unpaid is not None:
            unpaid.pop(lease.id, None)
            if not unpaid:
                del pool.unpaid[key]

    def settle(self, lease: Lease, actual_tokens: int) -> None:
        """The work that a request really was, told before or after its end: rates and its
        tenant's turn are corrected."""
        excess_tokens = actual_tokens - lease.cost_tokens
        for holding in lease.holdings:
            if holding.counter.token_rate is not None:
                holding.counter.token_rate.correct(excess_tokens)
        lane = self.pools[lease.demand.pool].queue.lanes.get(lease.demand.lane)
        if lane is not None:  # a reload may have dropped it since the request ended
            lane.charge(lease.demand.tenant, excess_tokens)

    def leave(self, demand: Demand, now: float) -> bool:
        """The client is gone; False if it was not waiting."""
        if not demand.waiting:
            return False
        self._dequeue(demand, now)
        self.left_count += 1
        return True

    def expired(self, now: float) -> Iterator[tuple[Demand, Contended]]:
        """Take out requests whose waiting makes no sense any more; those evicted come first."""
        while self._evicted:
            yield self._evicted.pop(0)
        for demand in self._expiries.due(now):
            blocked_by = demand.blocked_by
            self._dequeue(demand, now)
            self.expired_count += 1
            refusal = QueueTimeout(
                f"No room within {now - demand.arrived_at:.3g} s.",
                retry_after_s=self.pools[demand.pool].retry_after_s(demand, now),
                reason=blocked_by,
            )
            self.promise(demand, refusal, demand.lane, now)
            yield demand, refusal

    def has_expired(self, now: float) -> bool:
        """Whether :meth:`expired` has somebody to take out."""
        return bool(self._evicted) or self._expiries.has_due(now)

    def abandon(self, pool_name: str, now: float) -> list[Demand]:
        """Empty a pool's queue: nobody is left who could serve it."""
        waiting = list(self.pools[pool_name].queue)
        for demand in waiting:
            self._dequeue(demand, now)
        return waiting

    # -- time and change --------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Promotions, pressure, and forgetting what is idle."""
        for name, pool in self.pools.items():
            pool.queue.promote(now)
            pool.returns.expire(now)
            if self._pressure[name].update(pool.pressing_wait_s(now), now):
                self._tighten(name)
        for _, rule in self._book.all_rules():
            rule.sweep(now)
        self._expiries.forget_ended(self.waiting)

    def reload(self, policy: AdmissionPolicy, pools: Iterable[PoolPolicy], now: float) -> None:
        """Go on under other rules: what runs and waits is counted by the new ones.

        A limit below what runs binds from the next admission on. Requests wait on in their
        order; rates remember how much of them was used.
        """
        former, old_pools = self._book, self.pools
        waiting = sorted(
            (demand for pool in old_pools.values() for demand in pool.queue),
            key=lambda demand: demand.sequence,
        )
        self._expiries = Expiries()
        self._build(policy, list(pools), now)
        self._book.adopt_rates(former, now)
        for name, pool in self.pools.items():
            pool.mean_hold_s = old_pools[name].mean_hold_s
            pool.returns = old_pools[name].returns
        for lease in self._leases.values():
            self._count_again(lease, now)
        for demand in waiting:
            demand.waiting = False
            entered_at = demand.entered_at
            self._prepare(demand, now)
            self._enqueue(demand, now)
            demand.entered_at = entered_at

    # -- what is ----------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Leases held, over all pools."""
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        return sum([len(pool.queue) for pool in self.pools.values()])

    @property
    def leases(self) -> Iterable[Lease]:
        """Leases held."""
        return self._leases.values()

    def claimed(self) -> set[Counter]:
        """Counters that are kept for requests whose turn it is."""
        return {counter for pool in self.pools.values() for counter in pool.claims}

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """Every rule with its pool; empty for those over all pools."""
        return self._book.all_rules()

    # -- inside -----------------------------------------------------------------------

    def _build(self, policy: AdmissionPolicy, pools: list[PoolPolicy], now: float) -> None:
        self.policy = policy
        self.lanes = {lane.name: lane for lane in policy.lanes}
        self._book = QuotaBook(policy.rules, pools)
        self._pressure = {pool.model: Pressure(policy.pressure, now) for pool in pools}
        self.pools = {
            pool.model: PoolState(pool, FairQueue(policy.lanes, policy.quantum_tokens))
            for pool in pools
        }

    def _prepare(self, demand: Demand, now: float) -> None:
        if demand.lane not in self.pools[demand.pool].queue.lanes:
            demand.lane = self.policy.lanes[0].name
        demand.origin = demand.lane
        demand.counters = self._book.counters_of(demand, now)

    def _elder(self, demand: Demand) -> Demand | None:
        """The first that waits of its tenant, lane and kind: it must not be passed."""
        flow = self.pools[demand.pool].queue.lanes[demand.lane].flows.get(demand.tenant)
        if flow is None:
            return None
        kinds = [flow.kinds[kind] for kind in demand.elder_kinds if kind in flow.kinds]
        return next(iter(kinds[0].values())) if kinds else None

    def _evict_for(self, demand: Demand, now: float) -> bool:
        """Make a place in a full queue: the youngest of the lowest lane below gives it up.

        Else a lane that can wait would fill the queue that a lane which cannot shares.
        """
        pool = self.pools[demand.pool]
        returned = demand.returned
        full = [each for each in demand.counters if each.queue_is_full(returned=returned)]
        for victim in pool.queue.youngest_below(demand.lane):
            if all(counter in victim.counters for counter in full):
                self._dequeue(victim, now)
                self.evicted_count += 1
                refusal = QueueFull(
                    "The queue is full, and a request of a higher lane came.",
                    retry_after_s=pool.retry_after_s(victim, now),
                    reason=full[0].reason if full else f"capacity:{demand.pool}",
                )
                self.promise(victim, refusal, victim.lane, now)
                self._evicted.append((victim, refusal))
                return True
        return False

    def _enqueue(self, demand: Demand, now: float) -> None:
        self._number(demand)
        limits = [counter.rule.policy.max_queue_time_s for counter in demand.counters]
        limits.append(demand.max_queue_time_s)
        longest_s = min(limit for limit in (math.inf, *limits) if limit is not None)
        demand.expires_at = min(demand.arrived_at + longest_s, latest_start(demand))
        demand.waiting = True
        pool = self.pools[demand.pool]
        pool.queue.add(demand, now)
        paid = pool.unpaid.pop((demand.lane, demand.tenant), None)
        if paid:
            # Who filled the workers before anybody had to wait has had its first turns.
            pool.queue.lanes[demand.lane].charge(demand.tenant, sum(paid.values()))
        self._count_waiting(demand, 1, now)
        self._expiries.add(demand)

    def _number(self, demand: Demand) -> None:
        if not demand.sequence:
            self._sequence += 1
            demand.sequence = self._sequence

    def _dequeue(self, demand: Demand, now: float) -> None:
        pool = self.pools[demand.pool]
        pool.queue.remove(demand, now)
        pool.drop_claims()
        self._count_waiting(demand, -1, now)

    def _count_waiting(self, demand: Demand, change: int, now: float) -> None:
        demand.waiting = change > 0
        self.pools[demand.pool].waiting_bytes += change * demand.body_bytes
        for counter in demand.counters:
            counter.waiting += change
            counter.waiting_tokens += change * demand.cost_tokens
            if counter.waiting:
                counter.drain.resume(now)
            else:
                counter.drain.pause(now)

    def _grant(self, demand: Demand, now: float) -> Lease:
        demand.blocked_by = ""
        cost_tokens = demand.cost_tokens
        lease = Lease(demand, now, take(demand.counters, cost_tokens, now), cost_tokens)
        pool = self.pools[demand.pool]
        pool.running += 1
        pool.running_tokens += cost_tokens
        self._leases[lease.id] = lease
        self.granted += 1
        return lease

    def _count_again(self, lease: Lease, now: float) -> None:
        """Hold under the rules of now what was granted under former ones."""
        demand = lease.demand
        self._prepare(demand, now)
        levels = [
            (bucket, bucket.level)
            for counter in demand.counters
            for bucket in (counter.request_rate, counter.token_rate)
            if bucket is not None
        ]
        lease.holdings = take(demand.counters, lease.cost_tokens, now)
        for bucket, level in levels:
            bucket.level = level
        pool = self.pools[demand.pool]
        pool.running += 1
        pool.running_tokens += lease.cost_tokens

    def _tighten(self, pool_name: str) -> None:
        """Rules of one pool feel that pool's pressure, others the highest of all."""
        for _, rule in self._book.all_rules():
            floor = rule.policy.tighten_to
            if floor is None:
                continue
            models = rule.policy.match.models or tuple(self._pressure)
            level = min(self._pressure[model].level for model in models)
            rule.tighten(floor + (1.0 - floor) * level)
