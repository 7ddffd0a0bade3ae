"""The Scheduler API on the control port: what Envoy's streams ask, for other gateways.

A refusal is an answer; gRPC's own statuses are for calls that were not understood. What a
call admits is held until Release, the engine's own word that it ended, or silence.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message
from msgspec.structs import replace

from extproc.api_messages import (
    admitted_message,
    estimate_message,
    refusal_message,
    selected_message,
)
from extproc.decision.ticket import Ticket
from extproc.desk import Desk, facts_of
from extproc.errors import BodyTooLarge, InternalFault, KvgateError, MissingModel, Refusal
from extproc.fleet.health import error_of
from extproc.fleet.worker import Outcome
from extproc.generated.kvgate.v1 import scheduler_pb2 as pb
from extproc.policy import normal_address
from extproc.request.identity import Identity
from extproc.request.profile import Endpoint, Prompt, RequestProfile, TextPrompt, TokenPrompt
from extproc.request.reader import SESSION_HEADER, read_request
from extproc.request.subset import subset_hint
from extproc.stream import wanted_headers, wanted_metadata

logger = logging.getLogger("kvgate.requests")

SERVICE = "kvgate.v1.Scheduler"
_STATUSES = range(100, 600)

_Context: TypeAlias = grpc.aio.ServicerContext
_Work: TypeAlias = Callable[[RequestProfile], Awaitable[dict[str, Message]]]


class Malformed(KvgateError):
    """A call that makes no sense; the message says what is missing."""


class SchedulerService:
    """Serves gateways that call in place of Envoy's streams."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def handler(self) -> grpc.GenericRpcHandler:
        """What to register with a gRPC server."""
        methods = {
            "Admit": _method(self._asked(self._admit, pb.AdmitResponse), pb.InferenceRequest),
            "SelectWorker": _method(
                self._asked(self._select, pb.SelectWorkerResponse), pb.InferenceRequest
            ),
            "Estimate": _method(
                self._asked(self._estimate, pb.EstimateResponse), pb.InferenceRequest
            ),
            "Release": _method(self._release, pb.ReleaseRequest),
            "Renew": _method(self._renew, pb.RenewRequest),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _asked(self, work: _Work, response: type[Any]) -> Callable[..., Awaitable[Any]]:
        """A method that answers for a request with what ``work`` gives, or with a refusal."""

        async def method(request: pb.InferenceRequest, context: _Context) -> Any:
            desk, profile = self._desk, None
            try:
                profile = self._profile(request)
                return response(**await work(profile))
            except Malformed as problem:
                await _abort(context, problem)
            except Refusal as refusal:
                desk.count(refusal.code, profile)
                return response(refusal=refusal_message(refusal))
            except asyncio.CancelledError:
                desk.count("client_gone", profile)
                raise
            except Exception as error:
                logger.error("defect", exc_info=error)
                fault = InternalFault("kvgate could not decide this request.")
                desk.count(fault.code, profile)
                return response(refusal=refusal_message(fault))

        return method

    async def _admit(self, profile: RequestProfile) -> dict[str, Message]:
        if profile.identity.dry_run:
            return await self._estimate(profile)
        desk = self._desk
        ticket = await desk.arrive(profile, renewable=True)
        try:
            decision = await desk.turn(ticket)
        except BaseException:
            desk.finish(ticket)
            self._log(ticket)
            raise
        if ticket.lease is None:
            desk.finish(ticket)
        desk.count("allowed", profile, ticket)
        self._log(ticket)
        return {"admitted": admitted_message(decision, holds=ticket.lease is not None)}

    async def _select(self, profile: RequestProfile) -> dict[str, Message]:
        decision = await self._desk.select(profile)
        self._desk.count("selected", profile)
        return {"selected": selected_message(decision)}

    async def _estimate(self, profile: RequestProfile) -> dict[str, Message]:
        estimate = await self._desk.estimate(profile)
        self._desk.count("dry_run", profile)
        return {"estimate": estimate_message(estimate)}

    async def _release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        ticket = self._held(request.lease)
        if ticket is None:
            return pb.ReleaseResponse(released=False)
        await self._take(ticket, request.progress, context)
        desk, now = self._desk, self._desk.clock()
        if request.progress.status:
            outcome = _outcome(ticket, request.progress, now)
            desk.wake(desk.scheduler.told_end(ticket, outcome, now))
        desk.finish(ticket)
        return pb.ReleaseResponse(released=True)

    async def _renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewResponse:
        ticket = self._held(request.lease)
        if ticket is None:
            return pb.RenewResponse(held=False)
        await self._take(ticket, request.progress, context)
        return pb.RenewResponse(held=self._desk.scheduler.renew(ticket.id, self._desk.clock()))

    def _held(self, lease: str) -> Ticket | None:
        """A running request of this API; what came through Envoy is not for callers to end."""
        ticket = self._desk.scheduler.ticket(lease)
        if ticket is None or not ticket.renewable or ticket.decision is None:
            return None
        return ticket

    async def _take(self, ticket: Ticket, progress: pb.Progress, context: _Context) -> None:
        """The first word of an answer ends the prefill."""
        try:
            _check(progress)
            served_by = normal_address(progress.endpoint) if progress.endpoint else None
        except (Malformed, ValueError) as problem:
            await _abort(context, problem)
        if not progress.status or ticket.started_at is not None:
            return
        desk, decision = self._desk, ticket.decision
        endpoints = decision.endpoints if decision else ()
        attempts = 1 + endpoints.index(served_by) if served_by in endpoints else 1
        at = None
        if progress.HasField("ttft_s") and ticket.lease is not None:
            at = min(desk.clock(), ticket.lease.granted_at + progress.ttft_s)
        desk.response_started(ticket, served_by, attempts, status=progress.status, at=at)

    def _profile(self, request: pb.InferenceRequest) -> RequestProfile:
        """Profile of a request.

        Raises:
            Malformed: it is none.
            Refusal: its client must change it.
        """
        desk = self._desk
        kind = request.WhichOneof("content")
        if kind is None:
            raise Malformed("neither body nor prompt")
        identities, limits = desk.identities, desk.policy.requests
        headers = wanted_headers(request.headers, identities.headers)
        metadata = wanted_metadata(request.metadata, identities.metadata_paths)
        identity = identities.read(headers, metadata)
        subset = subset_hint(request.metadata)
        if kind == "prompt":
            session = headers.get(SESSION_HEADER, "")
            profile = _prompt_profile(request.prompt, identity)
            return replace(profile, session=session, subset=subset)
        if not request.path.startswith("/"):
            raise Malformed("path does not start with a slash")
        if len(request.body) > limits.max_body_bytes:
            raise BodyTooLarge(f"The request body is over {limits.max_body_bytes} bytes.")
        headers |= {":path": request.path, ":method": "POST"}
        return read_request(headers, request.body, limits, identity, subset)

    def _log(self, ticket: Ticket) -> None:
        if self._desk.access_log:
            refused = ticket.refusal.code if ticket.refusal else "gone"
            facts = {**facts_of(ticket), "status": "admitted" if ticket.decision else refused}
            logger.info("admit", extra={"facts": facts})


def _method(
    function: Callable[..., Awaitable[Any]], request: type[Message]
) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        function,
        request_deserializer=request.FromString,
        response_serializer=lambda response: response.SerializeToString(),
    )


async def _abort(context: _Context, problem: Exception) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
    raise AssertionError("abort returned")


def _prompt_profile(prompt: pb.Prompt, identity: Identity) -> RequestProfile:
    kind = prompt.WhichOneof("content")
    if kind is None:
        raise Malformed("prompt without text or tokens")
    if not prompt.model:
        raise MissingModel("The prompt must name a 'model'.", param="model")
    given: Prompt = TextPrompt(prompt.text)
    if kind == "tokens":
        given = TokenPrompt(list(prompt.tokens.ids))
    capped = prompt.HasField("max_output_tokens")
    return RequestProfile(
        Endpoint.COMPLETIONS,
        model=prompt.model,
        prompts=(given,),
        max_output_tokens=prompt.max_output_tokens if capped else None,
        cache_salt=prompt.cache_salt,
        body_bytes=prompt.ByteSize(),
        editable=True,
        identity=identity,
    )


def _check(progress: pb.Progress) -> None:
    if progress.status and progress.status not in _STATUSES:
        raise Malformed("status is no HTTP status")
    if progress.ttft_s < 0 or not math.isfinite(progress.ttft_s):
        raise Malformed("ttft_s is no time")


def _outcome(ticket: Ticket, progress: pb.Progress, now: float) -> Outcome:
    def given(name: str) -> Any:
        return getattr(progress, name) if progress.HasField(name) else None

    began_at = ticket.lease.granted_at if ticket.lease else ticket.arrived_at
    return Outcome(
        lease=ticket.id,
        status=progress.status,
        error=error_of(progress.status),
        duration_s=now - began_at,
        ttft_s=given("ttft_s"),
        prompt_tokens=given("prompt_tokens"),
        output_tokens=given("output_tokens"),
        cached_tokens=given("cached_tokens"),
    )
