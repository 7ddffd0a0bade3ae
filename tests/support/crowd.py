"""Tenants that send requests to a scheduler under simulated time."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from extproc.decision.ticket import Ticket
from extproc.errors import Refusal
from extproc.fleet.worker import LoadReport, WorkerState
from extproc.policy import Policy
from extproc.request.identity import Identity
from extproc.request.profile import Endpoint, RequestProfile
from extproc.scheduler import Scheduler
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import MODEL, join, keyer, policy, pool_policy

AMPLE = {"max_concurrency": 100_000, "max_queue": 100_000, "max_queue_time_s": 10_000.0}


def request(
    tenant: str = "t", lane: str = "online", *, output: int = 10, **identity: Any
) -> RequestProfile:
    """A request that generates ``output`` tokens; its body may be changed on the way."""
    return RequestProfile(
        Endpoint.CHAT,
        model=identity.pop("model", MODEL),
        max_output_tokens=output,
        body_bytes=identity.pop("body_bytes", 100),
        editable=True,
        fingerprint=identity.pop("fingerprint", 0),
        identity=Identity(tenant=tenant, lane=lane, **identity),
    )


class Crowd:
    """One pool's workers serve what is admitted, each request for ``service_s(tokens)``.

    Attributes:
        admitted: tokens admitted by tenant and lane.
        refusals: codes.
        waits: by lane.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        slots: int = 8,
        service_s: Callable[[int], float] = lambda tokens: 0.05 + tokens / 4_000,
        pool: dict[str, Any] | None = None,
        **policy_changes: Any,
    ) -> None:
        whole: Policy = policy(pool_policy(admission=AMPLE | (pool or {})), **policy_changes)
        self.scheduler = Scheduler(whole, {MODEL: keyer()}, random.Random(1), now=0.0)
        self.served = self.scheduler.models[MODEL]
        self.workers = [join(self.served.pool, number, slots=slots) for number in range(workers)]
        self.now = 0.0
        self.admitted: Counter[tuple[str, str]] = Counter()
        self.started: list[Ticket] = []
        self.refused: list[Ticket] = []
        self.waiting: dict[Ticket, None] = {}
        self._service_s = service_s
        self._running: list[tuple[float, int, Ticket]] = []
        self._count = 0

    def send(self, profile: RequestProfile, tokens: int) -> Ticket:
        """A request of so many uncached tokens arrives.

        Raises:
            Refusal: at the door.
        """
        ticket = self.scheduler.arrive(self.served, profile, (PromptKeys(tokens),), self.now)
        if ticket.decision is None:
            self.waiting[ticket] = None
        else:
            self._run(ticket)
        return ticket

    def try_send(self, profile: RequestProfile, tokens: int) -> Refusal | Ticket:
        try:
            return self.send(profile, tokens)
        except Refusal as refusal:
            return refusal

    def run_until(self, end_s: float, feed: Callable[[], None] = lambda: None) -> None:
        """Let time pass: requests end, workers report, who waited has its turn."""
        step_s = 0.05
        while self.now < end_s:
            next_end = self._running[0][0] if self._running else math.inf
            if next_end <= self.now + step_s:
                self.now, _, ticket = heapq.heappop(self._running)
                self._woken(self.scheduler.finish(ticket, self.now))
            else:
                self.now += step_s
            if int(self.now * 2) != int((self.now - step_s) * 2):
                self.report()
            self._woken(self.scheduler.tick(self.now))
            feed()

    def report(self) -> None:
        for worker in self.workers:
            load = LoadReport(WorkerState.READY)
            self._woken(self.scheduler.report(self.served, worker, load, self.now))

    def leave(self, ticket: Ticket) -> None:
        self.waiting.pop(ticket, None)
        self._woken(self.scheduler.finish(ticket, self.now))

    def queued(self, tenant: str, lane: str = "online") -> int:
        return sum(
            ticket.profile.identity.tenant == tenant and ticket.profile.identity.lane == lane
            for ticket in self.waiting
        )

    def keep_waiting(self, *kinds: tuple[str, str, int, int]) -> Callable[[], None]:
        """Keep so many requests of (tenant, lane, tokens, how many) in the queue."""

        def feed() -> None:
            for tenant, lane, tokens, many in kinds:
                for _ in range(many - self.queued(tenant, lane)):
                    self.send(request(tenant, lane), tokens)

        return feed

    def shares(self, names: Sequence[tuple[str, str]]) -> list[float]:
        total = sum(self.admitted[name] for name in names)
        return [self.admitted[name] / total for name in names]

    def _woken(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.waiting.pop(ticket, None)
            if ticket.decision is not None:
                self._run(ticket)
            else:
                self.refused.append(ticket)

    def _run(self, ticket: Ticket) -> None:
        assert ticket.lease is not None
        identity = ticket.profile.identity
        tokens = ticket.lease.cost_tokens
        self.admitted[identity.tenant, identity.lane] += tokens
        self.started.append(ticket)
        self._count += 1
        heapq.heappush(self._running, (self.now + self._service_s(tokens), self._count, ticket))
