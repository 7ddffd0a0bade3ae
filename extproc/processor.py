"""The ext_proc service: one gRPC stream a request, a thin shell over ``RequestStream``.

Reads Envoy's messages, asks the core, sends the answers in order. However a stream ends
(response over, client gone, Envoy gone, a defect here), its ticket is finished once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from extproc.cold_text import ColdText
from extproc.errors import InternalFault, Refusal, ShuttingDown
from extproc.policy import Policy
from extproc.replies import ProcessingRequest, ProcessingResponse
from extproc.request.reader import read_request
from extproc.scheduler import Scheduler, Ticket
from extproc.stream import Arrived, ProtocolViolation, RequestStream, ResponseStarted
from extproc.telemetry.metrics import OTHER_MODEL, Metrics

logger = logging.getLogger("kvgate.requests")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_Context: TypeAlias = grpc.aio.ServicerContext


class Processor:
    """Serves Envoy's streams.

    Args:
        clock: monotonic seconds.
        access_log: write a line for each finished request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        access_log: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._access_log = access_log
        self._cold_text = ColdText(policy.tokenization, self._count_unkeyed)
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def open_streams(self) -> int:
        """Requests that Envoy has with us."""
        return len(self._streams)

    def handler(self) -> grpc.GenericRpcHandler:
        """What to register with a gRPC server."""
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})

    def wake(self, tickets: list[Ticket]) -> None:
        """Tell the streams of these tickets that their wait is over."""
        for ticket in tickets:
            waiter = self._waiters.pop(ticket, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, wait for open ones, then end their streams in good order.

        Envoy takes a stream that ends without an error as "nothing more to say" and lets
        the response go on.
        """
        self._closing = True
        if self._streams:
            await asyncio.wait(self._streams, timeout=grace_s)
        cut = list(self._streams)
        for task in cut:
            task.cancel()
        if cut:
            logger.warning("streams left to Envoy", extra={"facts": {"streams": len(cut)}})
            await asyncio.wait(cut, timeout=1.0)
        self._cold_text.close()

    async def _process(self, _requests: object, context: _Context) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # a coroutine always runs in a task
        self._streams.add(task)
        call = _Call(self, RequestStream(self._policy.requests.max_body_bytes), context)
        try:
            await call.run()
        except ProtocolViolation as violation:
            self._metrics.protocol_errors.labels("envoy").inc()
            logger.error("protocol violation", extra={"facts": {"what": str(violation)}})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(violation))
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            self._streams.discard(task)
            call.end()

    def _count_unkeyed(self, model: str, reason: str) -> None:
        self._metrics.unkeyed.labels(model, reason).inc()


class _Call:
    """One stream's run through the shell."""

    __slots__ = ("_context", "_processor", "_status", "_stream", "_ticket")

    def __init__(self, processor: Processor, stream: RequestStream, context: _Context) -> None:
        self._processor = processor
        self._stream = stream
        self._context = context
        self._ticket: Ticket | None = None
        self._status = 0

    async def run(self) -> None:
        """Read until Envoy ends the stream or has its refusal."""
        context, stream = self._context, self._stream
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            step = stream.receive(message)
            answers = step.answers
            refused = step.refusal is not None
            if step.refusal is not None:
                self._count(None, "pass", step.refusal.code)
            if isinstance(step.event, Arrived):
                answers, refused = await self._arrived(step.event)
            elif isinstance(step.event, ResponseStarted):
                answers = self._response_started(step.event)
            for answer in answers:
                await context.write(answer)
            if refused:
                return

    def end(self) -> None:
        """Give back what the request held, once."""
        processor, ticket = self._processor, self._ticket
        if ticket is None:
            return
        if ticket.decision is None and ticket.refusal is None:
            self._count(ticket, ticket.profile.endpoint.value, "client_gone")
        processor._waiters.pop(ticket, None)
        now = processor._clock()
        processor.wake(processor._scheduler.finish(ticket, now))
        if processor._access_log:
            self._log(ticket, now)

    async def _arrived(self, event: Arrived) -> tuple[list[ProcessingResponse], bool]:
        """Answers to a whole request, and whether they refuse it."""
        try:
            await self._decide(event)
        except Refusal as refusal:
            self._count(self._ticket, "pass", refusal.code)
            return self._stream.refuse(refusal), True
        except Exception as error:
            logger.error("defect", exc_info=error)
            fault = InternalFault("kvgate could not decide this request.")
            self._count(self._ticket, "pass", fault.code)
            return self._stream.refuse(fault), True
        ticket = self._ticket
        if ticket is None or ticket.decision is None:
            raise AssertionError("decided without a decision")
        return self._stream.answer(ticket.decision), False

    async def _decide(self, event: Arrived) -> None:
        processor = self._processor
        if processor._closing:
            raise ShuttingDown("This scheduler is shutting down.", retry_after_s=1.0)
        arrived_at = processor._clock()
        profile = read_request(event.headers, event.body, processor._policy.requests)
        lane = processor._scheduler.lane_for(profile)
        prompts = await processor._cold_text.keys(lane.keyer, profile)
        now = processor._clock()
        ticket = self._ticket = processor._scheduler.arrive(lane, profile, prompts, now)
        metrics, model = processor._metrics, lane.pool.policy.model
        metrics.decision_s.labels(model).observe(processor._clock() - arrived_at)
        if ticket.decision is None:
            waiter = asyncio.get_running_loop().create_future()
            processor._waiters[ticket] = waiter
            await waiter
        if ticket.refusal is not None:
            raise ticket.refusal
        decision = ticket.decision
        if decision is not None:
            self._count(ticket, profile.endpoint.value, "allowed")
            metrics.queue_wait_s.labels(model).observe(decision.queue_wait_s)
            metrics.prompt_tokens.labels(model).inc(decision.prompt_tokens)
            metrics.cached_tokens.labels(model).inc(decision.cached_tokens)

    def _response_started(self, event: ResponseStarted) -> list[ProcessingResponse]:
        processor, ticket = self._processor, self._ticket
        if ticket is None or ticket.decision is None:
            raise ProtocolViolation("response_headers before a decision")
        now = processor._clock()
        processor._scheduler.response_started(ticket, event.served_by, event.attempts, now)
        metrics, model = processor._metrics, ticket.lane.pool.policy.model
        metrics.ttft_s.labels(model).observe(now - ticket.arrived_at)
        metrics.responses.labels(model, f"{event.status // 100}xx").inc()
        if event.attempts > 1:
            metrics.retried.labels(model).inc()
        self._status = event.status
        headers = _client_headers(ticket) if processor._policy.response_headers else []
        return self._stream.answer_response(headers)

    def _count(self, ticket: Ticket | None, endpoint: str, outcome: str) -> None:
        model = OTHER_MODEL if ticket is None else ticket.lane.pool.policy.model
        if ticket is not None:
            endpoint = ticket.profile.endpoint.value
        self._processor._metrics.requests.labels(model, endpoint, outcome).inc()

    def _log(self, ticket: Ticket, now: float) -> None:
        decision = ticket.decision
        facts = {
            "id": ticket.id,
            "model": ticket.lane.pool.policy.model,
            "endpoint": ticket.profile.endpoint.value,
            "worker": ticket.served_by or (decision.endpoints[0] if decision else "-"),
            "cached": decision.cached_tokens if decision else 0,
            "prompt": decision.prompt_tokens if decision else 0,
            "queue_ms": round(1000 * decision.queue_wait_s) if decision else 0,
            "status": self._status or (ticket.refusal.code if ticket.refusal else "gone"),
            "ms": round(1000 * (now - ticket.arrived_at)),
        }
        logger.info("request", extra={"facts": facts})


def _client_headers(ticket: Ticket) -> list[tuple[str, str]]:
    decision = ticket.decision
    assert decision is not None  # noqa: S101  # only called for decided tickets
    return [
        ("x-kvgate-worker", ticket.served_by or decision.endpoints[0]),
        ("x-kvgate-cached-tokens", str(decision.cached_tokens)),
        ("x-kvgate-queue-ms", str(round(1000 * decision.queue_wait_s))),
        ("x-kvgate-decision-id", decision.id),
    ]
