"""A gateway's side of the Scheduler API, and a desk for it to call in-process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from extproc.api import SERVICE, SchedulerService
from extproc.cold_text import ColdText
from extproc.desk import Desk
from extproc.generated.kvgate.v1 import scheduler_pb2 as pb
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import Metrics
from tests.support.builders import MODEL

_RESPONSES = {
    "Admit": pb.AdmitResponse,
    "SelectWorker": pb.SelectWorkerResponse,
    "Estimate": pb.EstimateResponse,
    "Release": pb.ReleaseResponse,
    "Renew": pb.RenewResponse,
}


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gateway:
    """Calls by name: ``await gateway.admit(request)``; messages are given by their fields."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._calls = {
            name: channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=response.FromString,
            )
            for name, response in _RESPONSES.items()
        }

    def admit(self, request: pb.InferenceRequest, **options: Any) -> Any:
        return self._calls["Admit"](request, **options)

    def select(self, request: pb.InferenceRequest) -> Any:
        return self._calls["SelectWorker"](request)

    def estimate(self, request: pb.InferenceRequest) -> Any:
        return self._calls["Estimate"](request)

    def release(self, lease: str, **progress: Any) -> Any:
        return self._calls["Release"](pb.ReleaseRequest(lease=lease, progress=progress))

    def renew(self, lease: str, **progress: Any) -> Any:
        return self._calls["Renew"](pb.RenewRequest(lease=lease, progress=progress))


@asynccontextmanager
async def gateway_at(address: str) -> AsyncIterator[Gateway]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Gateway(channel)


def desk_of(scheduler: Scheduler, clock: Clock, **options: Any) -> Desk:
    metrics = Metrics()
    cold_text = ColdText(scheduler.policy.tokenization, metrics.count_unkeyed)
    return Desk(scheduler, metrics, cold_text, clock, **options)


@asynccontextmanager
async def serving(desk: Desk) -> AsyncIterator[Gateway]:
    """The API of a desk on a loopback port, and a gateway that calls it."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((SchedulerService(desk).handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with gateway_at(f"127.0.0.1:{port}") as gateway:
            yield gateway
    finally:
        await server.stop(0)
        desk.cold_text.close()


def tokens(*ids: int, model: str = MODEL, headers: Any = (), **prompt: Any) -> pb.InferenceRequest:
    """A request by token ids."""
    given = pb.Prompt(model=model, tokens=pb.TokenIds(ids=ids), **prompt)
    return pb.InferenceRequest(prompt=given, headers=_headers(headers))


def chat_call(
    body: bytes, path: str = "/v1/chat/completions", headers: Any = ()
) -> pb.InferenceRequest:
    return pb.InferenceRequest(path=path, body=body, headers=_headers(headers))


def _headers(pairs: Any) -> list[pb.Header]:
    return [pb.Header(key=name, value=value) for name, value in pairs]


def outcomes(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    """Counted requests by model, endpoint and outcome."""
    return {
        (sample.labels["model"], sample.labels["endpoint"], sample.labels["outcome"]): sample.value
        for metric in metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
