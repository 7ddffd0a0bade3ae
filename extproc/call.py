"""``Call``: one request's run through the shell, from Envoy's first message to the end.

Reads Envoy's messages, asks the core, sends the answers in order. However the stream ends
(response over, client gone, Envoy gone, a defect here), the ticket is finished once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from extproc.cold_text import ColdText
from extproc.errors import InternalFault, Refusal, ShuttingDown
from extproc.policy import Policy
from extproc.replies import ProcessingResponse
from extproc.request.profile import RequestProfile
from extproc.request.reader import read_request
from extproc.scheduler import Decision, Scheduler, ServedModel, Ticket
from extproc.stream import Arrived, ProtocolViolation, RequestStream, ResponseStarted
from extproc.telemetry.metrics import OTHER_MODEL, Metrics

logger = logging.getLogger("kvgate.requests")

Context: TypeAlias = grpc.aio.ServicerContext
_NO_ENDPOINT = "none"


@dataclass(slots=True)
class Desk:
    """What all calls of a scheduler share. ``clock``: monotonic seconds."""

    scheduler: Scheduler
    policy: Policy
    metrics: Metrics
    cold_text: ColdText
    clock: Callable[[], float]
    access_log: bool = False
    closing: bool = False
    waiters: dict[Ticket, asyncio.Future[None]] = field(default_factory=dict)

    def wake(self, tickets: list[Ticket]) -> None:
        """Tell the calls of these tickets that their wait is over."""
        for ticket in tickets:
            waiter = self.waiters.pop(ticket, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


class Call:
    """One stream. ``run`` returns when Envoy or a refusal ends it; ``end`` must follow."""

    __slots__ = (
        "_context",
        "_desk",
        "_engine_error",
        "_profile",
        "_status",
        "_stream",
        "_ticket",
    )

    def __init__(self, desk: Desk, context: Context) -> None:
        self._desk = desk
        self._context = context
        self._stream = RequestStream(desk.policy.requests.max_body_bytes)
        self._profile: RequestProfile | None = None
        self._ticket: Ticket | None = None
        self._status = 0
        self._engine_error: str | None = None

    async def run(self) -> None:
        """Serve the stream.

        Raises:
            ProtocolViolation: Envoy sent what does not belong here.
        """
        context, stream = self._context, self._stream
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            step = stream.receive(message)
            answers = step.answers
            if isinstance(step.event, Arrived):
                answers = await self._arrived(step.event)
            elif isinstance(step.event, ResponseStarted):
                answers = self._response_started(step.event)
            elif step.refusal is not None:
                self._count(step.refusal.code)
            for answer in answers:
                await context.write(answer)
            if stream.refused:
                return

    async def leave(self) -> None:
        """The scheduler stops: an undecided request is refused, others are left to Envoy."""
        if self._ticket is not None and self._ticket.decision is None:
            refusal = _shutting_down()
            self._count(refusal.code)
            self._ticket.refusal = refusal
            for answer in self._stream.refuse(refusal):
                await self._context.write(answer)

    def end(self) -> None:
        """Give back what the request held."""
        desk, ticket = self._desk, self._ticket
        if ticket is None:
            return
        if ticket.decision is None and ticket.refusal is None:
            self._count("client_gone")
        desk.waiters.pop(ticket, None)
        now = desk.clock()
        desk.wake(desk.scheduler.finish(ticket, now))
        if desk.access_log:
            self._log(ticket, now)

    async def _arrived(self, event: Arrived) -> list[ProcessingResponse]:
        try:
            return self._stream.answer(await self._decide(event))
        except Refusal as refusal:
            self._count(refusal.code)
            return self._stream.refuse(refusal)
        except Exception as error:
            logger.error("defect", exc_info=error)
            fault = InternalFault("kvgate could not decide this request.")
            self._count(fault.code)
            return self._stream.refuse(fault)

    async def _decide(self, event: Arrived) -> Decision:
        """The decision, once it is this request's turn.

        Raises:
            Refusal: it will not run.
        """
        desk = self._desk
        if desk.closing:
            raise _shutting_down()
        began_at = desk.clock()
        profile = read_request(event.headers, event.body, desk.policy.requests)
        self._profile = profile
        served = desk.scheduler.model_for(profile)
        prompts = await desk.cold_text.keys(served.keyer, profile)
        now = desk.clock()
        ticket = self._ticket = desk.scheduler.arrive(served, profile, prompts, now)
        metrics = desk.metrics.of(served.pool.policy.model)
        metrics.decision_s.observe(desk.clock() - began_at)
        while ticket.decision is None:
            if ticket.refusal is not None:
                raise ticket.refusal
            waiter = asyncio.get_running_loop().create_future()
            desk.waiters[ticket] = waiter
            await waiter
        decision = ticket.decision
        self._count("allowed")
        metrics.queue_wait_s.observe(decision.queue_wait_s)
        metrics.prompt_tokens.inc(decision.prompt_tokens)
        metrics.cached_tokens.inc(decision.cached_tokens)
        return decision

    def _response_started(self, event: ResponseStarted) -> list[ProcessingResponse]:
        desk, ticket = self._desk, self._ticket
        if ticket is None or ticket.decision is None:
            raise ProtocolViolation("response_headers before a decision")
        now = desk.clock()
        desk.wake(desk.scheduler.response_started(ticket, event.served_by, event.attempts, now))
        metrics = desk.metrics.of(ticket.served.pool.policy.model)
        metrics.ttft_s.observe(now - ticket.arrived_at)
        metrics.count_response(event.status)
        if event.attempts > 1:
            metrics.retried.inc()
        self._status = event.status
        self._engine_error = event.engine_error
        shown = desk.policy.response_headers
        return self._stream.answer_response(_client_headers(ticket, ticket.decision, shown))

    def _count(self, outcome: str) -> None:
        """Count how admission ended, by as much as is known of the request."""
        served: ServedModel | None = self._ticket.served if self._ticket else None
        model = served.pool.policy.model if served else OTHER_MODEL
        endpoint = self._profile.endpoint.value if self._profile else _NO_ENDPOINT
        self._desk.metrics.of(model).count_request(endpoint, outcome)

    def _log(self, ticket: Ticket, now: float) -> None:
        decision = ticket.decision
        facts = {
            "id": ticket.id,
            "model": ticket.served.pool.policy.model,
            "endpoint": ticket.profile.endpoint.value,
            "worker": ticket.served_by or (decision.endpoints[0] if decision else "-"),
            "cached": decision.cached_tokens if decision else 0,
            "prompt": decision.prompt_tokens if decision else 0,
            "queue_ms": round(1000 * decision.queue_wait_s) if decision else 0,
            "status": self._status or (ticket.refusal.code if ticket.refusal else "gone"),
            "engine_error": self._engine_error or "-",
            "ms": round(1000 * (now - ticket.arrived_at)),
        }
        logger.info("request", extra={"facts": facts})


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("This scheduler is shutting down.", retry_after_s=1.0)


def _client_headers(ticket: Ticket, decision: Decision, shown: bool) -> list[tuple[str, str]]:
    if not shown:
        return []
    return [
        ("x-kvgate-worker", ticket.served_by or decision.endpoints[0]),
        ("x-kvgate-cached-tokens", str(decision.cached_tokens)),
        ("x-kvgate-queue-ms", str(round(1000 * decision.queue_wait_s))),
        ("x-kvgate-decision-id", decision.id),
    ]
