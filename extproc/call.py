"""``Call``: one request's run through the shell, from Envoy's first message to the end.

Reads Envoy's messages, asks the core, sends the answers in order. However the stream ends
(response over, client gone, Envoy gone, a defect here), the ticket is finished once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeAlias

import grpc
import msgspec

from extproc.decision.ticket import Decision, Ticket
from extproc.desk import Desk, facts_of, shutting_down
from extproc.errors import InternalFault, Refusal
from extproc.fleet.worker import engine_error
from extproc.replies import ProcessingResponse
from extproc.request.limits import engine_members, output_caps
from extproc.request.profile import RequestProfile
from extproc.request.reader import read_request
from extproc.request.splice import edit_top_level
from extproc.stream import Arrived, ProtocolViolation, RequestStream, ResponseStarted

logger = logging.getLogger("kvgate.requests")

Context: TypeAlias = grpc.aio.ServicerContext


class Call:
    """One stream. ``run`` returns when Envoy or a refusal ends it; ``end`` must follow."""

    __slots__ = (
        "_context",
        "_desk",
        "_engine_error",
        "_identities",
        "_profile",
        "_status",
        "_stream",
        "_ticket",
    )

    def __init__(self, desk: Desk, context: Context) -> None:
        self._desk = desk
        self._context = context
        # The reader that chose the headers must read them, whatever policy came since.
        identities = self._identities = desk.identities
        self._stream = RequestStream(
            desk.policy.requests.max_body_bytes, identities.headers, identities.metadata_paths
        )
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
            del message
            answers: Iterable[ProcessingResponse] = step.answers
            if isinstance(step.event, Arrived):
                answers = await self._arrived(step.event)
            elif isinstance(step.event, ResponseStarted):
                answers = self._response_started(step.event)
            elif step.refusal is not None:
                self._count(step.refusal.code)
            for answer in answers:
                await context.write(answer)
            if stream.replied:
                return

    async def leave(self) -> None:
        """The scheduler stops: an undecided request is refused, others are left to Envoy."""
        if self._ticket is not None and self._ticket.decision is None:
            refusal = shutting_down()
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
        desk.finish(ticket)
        if desk.access_log:
            self._log(ticket, desk.clock())

    async def _arrived(self, event: Arrived) -> list[ProcessingResponse]:
        try:
            return await self._decide(event)
        except Refusal as refusal:
            self._count(refusal.code)
            return self._stream.refuse(refusal)
        except Exception as error:
            logger.error("defect", exc_info=error)
            fault = InternalFault("kvgate could not decide this request.")
            self._count(fault.code)
            return self._stream.refuse(fault)

    async def _decide(self, event: Arrived) -> list[ProcessingResponse]:
        """The answer to Envoy, once it is this request's turn.

        Raises:
            Refusal: it will not run.
        """
        desk = self._desk
        if desk.closing:
            raise shutting_down()
        identity = self._identities.read(event.headers, event.metadata)
        limits = desk.policy.requests
        profile = read_request(event.headers, event.body, limits, identity, event.subset)
        self._profile = profile
        # The request may be held for long; an API key need not.
        event.headers.clear()
        if identity.dry_run:
            estimate = await desk.estimate(profile)
            self._count("dry_run")
            return self._stream.reply(200, msgspec.json.encode(estimate))
        ticket = self._ticket = await desk.arrive(profile)
        # Its keys are made; the decoded prompt, as large as the body, is not in the ticket's.
        self._profile = profile = ticket.profile
        decision = await desk.turn(ticket)
        self._count("allowed")
        return self._stream.answer(decision, _engine_body(event, profile, decision))

    def _response_started(self, event: ResponseStarted) -> list[ProcessingResponse]:
        desk, ticket = self._desk, self._ticket
        if ticket is None or ticket.decision is None:
            raise ProtocolViolation("response_headers before a decision")
        error = engine_error(event.engine_error)
        desk.response_started(
            ticket, event.served_by, event.attempts, status=event.status, error=error
        )
        self._status = event.status
        self._engine_error = event.engine_error
        shown = desk.policy.response_headers
        return self._stream.answer_response(_client_headers(ticket, ticket.decision, shown))

    def _count(self, outcome: str) -> None:
        self._desk.count(outcome, self._profile, self._ticket)

    def _log(self, ticket: Ticket, now: float) -> None:
        facts = {
            **facts_of(ticket),
            "status": self._status or (ticket.refusal.code if ticket.refusal else "gone"),
            "engine_error": self._engine_error or "-",
            "ms": round(1000 * (now - ticket.arrived_at)),
        }
        logger.info("request", extra={"facts": facts})


def _engine_body(event: Arrived, profile: RequestProfile, decision: Decision) -> bytes | None:
    """The body that the worker gets in place of the client's; None changes nothing."""
    body = event.body
    if not body:
        return None
    changes: dict[str, bytes | None] = {}
    if decision.max_output_tokens is not None:
        changes |= output_caps(body, profile.endpoint, decision.max_output_tokens)
    changes |= engine_members(decision.model, decision.cache_salt, decision.engine_priority)
    return edit_top_level(body, changes) if changes else None


def _client_headers(ticket: Ticket, decision: Decision, shown: bool) -> list[tuple[str, str]]:
    if not shown:
        return []
    headers = [
        ("x-kvgate-worker", ticket.served_by or decision.endpoints[0]),
        ("x-kvgate-cached-tokens", str(decision.cached_tokens)),
        ("x-kvgate-queue-ms", str(round(1000 * decision.queue_wait_s))),
        ("x-kvgate-decision-id", decision.id),
    ]
    if decision.lane:
        headers.append(("x-kvgate-lane", decision.lane))
    if decision.degraded:
        headers.append(("x-kvgate-degraded", ", ".join(decision.degraded)))
    return headers
