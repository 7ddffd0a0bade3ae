"""``Desk``: the core with the waiting around it, shared by Envoy's streams and the API.

The core decides at once; what takes time is tokenising long new text and the wait for a
turn. A ticket exists from ``arrive`` on, and whoever got it calls ``finish`` once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from extproc.cold_text import ColdText
from extproc.decision.estimate import Estimate
from extproc.decision.ticket import Decision, ServeInstead, Ticket
from extproc.errors import Refusal, ShuttingDown
from extproc.fleet.worker import EngineError
from extproc.policy import Policy
from extproc.request.identity import IdentityReader
from extproc.request.profile import RequestProfile
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import OTHER_MODEL, Metrics

_NO_ENDPOINT = "none"


@dataclass(slots=True)
class Desk:
    """What all requests of a scheduler share. ``clock``: monotonic seconds."""

    scheduler: Scheduler
    metrics: Metrics
    cold_text: ColdText
    clock: Callable[[], float]
    access_log: bool = False
    closing: bool = False
    waiters: dict[Ticket, asyncio.Future[None]] = field(default_factory=dict)
    identities: IdentityReader = field(init=False)

    def __post_init__(self) -> None:
        self.read_identities()

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.scheduler.policy

    def read_identities(self) -> None:
        """Tell who asks by the policy in force."""
        policy = self.policy
        lanes = [lane.name for lane in policy.admission.lanes]
        self.identities = IdentityReader(
            policy.identity, policy.tenants, lanes, policy.tenant_classes
        )

    def adopt(self, policy: Policy) -> None:
        """Go on under another policy.

        Raises:
            PolicyError: it needs a restart; nothing was changed.
        """
        self.wake(self.scheduler.reload(policy, self.clock()))
        self.read_identities()

    async def arrive(self, profile: RequestProfile, *, renewable: bool = False) -> Ticket:
        """A ticket, decided or waiting; a degrade ladder may have led to another model.

        Raises:
            Refusal: the request will not run.
        """
        if self.closing:
            raise shutting_down()
        began_at = self.clock()
        scheduler = self.scheduler
        steps: tuple[str, ...] = ()
        served = scheduler.model_for(profile)
        while True:
            isolated = served.trust.isolate(profile)
            prompts = await self.cold_text.keys(served.keyer, isolated)
            now = self.clock()
            try:
                ticket = scheduler.arrive(
                    served,
                    replace(isolated, prompts=()),
                    prompts,
                    now,
                    arrived_at=began_at,
                    steps=steps,
                    renewable=renewable,
                )
                break
            except ServeInstead as instead:
                profile, steps = replace(profile, model=instead.model), instead.steps
                served = scheduler.model_for(profile)
        self.metrics.of(served.name).decision_s.observe(self.clock() - began_at)
        return ticket

    async def turn(self, ticket: Ticket) -> Decision:
        """The decision, once it is this request's turn.

        Raises:
            Refusal: it waited in vain.
        """
        while ticket.decision is None:
            if ticket.refusal is not None:
                raise ticket.refusal
            waiter = self.waiters[ticket] = asyncio.get_running_loop().create_future()
            await waiter
        decision = ticket.decision
        metrics = self.metrics.of(ticket.served.name)
        metrics.queue_wait_s.observe(decision.queue_wait_s)
        metrics.prompt_tokens.inc(decision.prompt_tokens)
        metrics.cached_tokens.inc(decision.cached_tokens)
        if ticket.shadow is not None:
            metrics.count_shadow(ticket.shadow)
        if ticket.watched_pick is not None:
            metrics.count_watched(ticket.watched_pick == decision.endpoints[0])
        for step in decision.degraded:
            metrics.count_degraded(step.partition("=")[0])
        return decision

    async def select(self, profile: RequestProfile) -> Decision:
        """Workers for a request that is admitted elsewhere.

        Raises:
            Refusal: no pool or no worker could serve it.
        """
        if self.closing:
            raise shutting_down()
        served = self.scheduler.model_for(profile)
        profile = served.trust.isolate(profile)
        prompts = await self.cold_text.keys(served.keyer, profile)
        return self.scheduler.select(served, profile, prompts, self.clock())

    async def estimate(self, profile: RequestProfile) -> Estimate:
        """What would be decided now.

        Raises:
            Refusal: no pool or no worker could serve it.
        """
        served = self.scheduler.model_for(profile)
        profile = served.trust.isolate(profile)
        prompts = await self.cold_text.keys(served.keyer, profile)
        return self.scheduler.estimate(served, profile, prompts, self.clock())

    def response_started(
        self,
        ticket: Ticket,
        served_by: str | None,
        attempts: int,
        *,
        status: int,
        error: EngineError | None = None,
        at: float | None = None,
    ) -> None:
        """Response headers came, ``at`` if that was before now."""
        now = self.clock()
        self.wake(
            self.scheduler.response_started(
                ticket, served_by, attempts, now, status=status, error=error, at=at
            )
        )
        metrics = self.metrics.of(ticket.served.name)
        metrics.ttft_s.observe((now if at is None else at) - ticket.arrived_at)
        metrics.count_response(status)
        if attempts > 1:
            metrics.retried.inc()

    def finish(self, ticket: Ticket) -> None:
        """The request is over, however it ended."""
        self.waiters.pop(ticket, None)
        self.wake(self.scheduler.finish(ticket, self.clock()))

    def refuse_waiting(self) -> None:
        """Whoever still waits for a turn is told that the scheduler stops."""
        waiting = list(self.waiters)
        for ticket in waiting:
            ticket.refusal = shutting_down()
        self.wake(waiting)

    def count(
        self, outcome: str, profile: RequestProfile | None, ticket: Ticket | None = None
    ) -> None:
        """Count how a request's admission ended, by as much as is known of the request."""
        model = ticket.served.name if ticket else self._model_of(profile)
        endpoint = profile.endpoint.value if profile else _NO_ENDPOINT
        self.metrics.of(model).count_request(endpoint, outcome)

    def _model_of(self, profile: RequestProfile | None) -> str:
        try:
            return OTHER_MODEL if profile is None else self.scheduler.model_for(profile).name
        except Refusal:
            return OTHER_MODEL

    def wake(self, tickets: list[Ticket]) -> None:
        """Tell the holders of these tickets that their wait is over."""
        for ticket in tickets:
            waiter = self.waiters.pop(ticket, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


def facts_of(ticket: Ticket) -> dict[str, Any]:
    """What logs say of a request: nothing that its client wrote."""
    decision = ticket.decision
    return {
        "id": ticket.id,
        "model": ticket.served.name,
        "endpoint": ticket.profile.endpoint.value,
        "worker": ticket.served_by or (decision.endpoints[0] if decision else "-"),
        "cached": decision.cached_tokens if decision else 0,
        "prompt": decision.prompt_tokens if decision else 0,
        "queue_ms": round(1000 * decision.queue_wait_s) if decision else 0,
        "tenant": ticket.profile.identity.tenant,
        "lane": decision.lane if decision else ticket.profile.identity.lane,
        "degraded": ", ".join(ticket.steps) or "-",
        "shadow": ticket.shadow or "-",
        "watched_pick": ticket.watched_pick or "-",
        "reason": (ticket.refusal.reason if ticket.refusal else None) or "-",
    }


def shutting_down() -> ShuttingDown:
    """What new requests are told while the scheduler drains."""
    return ShuttingDown("This scheduler is shutting down.", retry_after_s=1.0)
