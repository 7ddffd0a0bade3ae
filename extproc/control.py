"""The control port: agents' Report streams.

One stream a worker. The first message says who it is, the answer says how the pool makes
keys and digests; after that loads and digest changes come in, and a resync goes out when
one does not fit. A newer stream for the same worker ends the older one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeAlias

import grpc

from extproc.cache.feed import Delta, Snapshot
from extproc.errors import DigestError
from extproc.fleet.worker import LoadReport, Worker
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.policy import ReportPolicy, normal_address
from extproc.scheduler import ModelLane, Scheduler, Ticket
from extproc.telemetry.metrics import Metrics

logger = logging.getLogger("kvgate.control")

SERVICE = "kvgate.v1.Fleet"
_Context: TypeAlias = grpc.aio.ServicerContext


class FleetService:
    """Feeds agents' reports into the core.

    Args:
        wake: called with tickets whose wait a report ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reports: ReportPolicy,
        metrics: Metrics,
        clock: Callable[[], float],
        wake: Callable[[list[Ticket]], None],
    ) -> None:
        self._scheduler = scheduler
        self._reports = reports
        self._metrics = metrics
        self._clock = clock
        self._wake = wake
        self._streams: dict[str, object] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """What to register with a gRPC server."""
        method = grpc.stream_stream_rpc_method_handler(
            self._report,
            request_deserializer=agent_pb2.AgentMessage.FromString,
            response_serializer=agent_pb2.SchedulerMessage.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Report": method})

    async def _report(self, _requests: object, context: _Context) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is a hello")
        lane, worker = await self._introduce(first.hello, context)
        me = object()
        self._streams[worker.address] = me
        logger.info("agent connected", extra={"facts": {"worker": worker.address}})
        try:
            await context.write(self._settings(lane))
            while (message := await context.read()) is not grpc.aio.EOF:
                if self._streams.get(worker.address) is not me:
                    await context.abort(grpc.StatusCode.ABORTED, "a newer stream took over")
                if (resync := self._take(lane, worker, message)) is not None:
                    await context.write(resync)
        finally:
            if self._streams.get(worker.address) is me:
                del self._streams[worker.address]
            logger.info("agent gone", extra={"facts": {"worker": worker.address}})

    async def _introduce(
        self, hello: agent_pb2.Hello, context: _Context
    ) -> tuple[ModelLane, Worker]:
        code = grpc.StatusCode.INVALID_ARGUMENT
        try:
            address = normal_address(hello.address)
        except ValueError as error:
            await context.abort(code, str(error))
            raise
        lane = self._scheduler.lane_of_agent(hello.models)
        if lane is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no pool serves its models")
            raise AssertionError("abort returned")
        models = tuple(hello.models)
        worker = self._scheduler.hello(lane, address, models, hello.max_running, self._clock())
        if worker is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the pool is full")
            raise AssertionError("abort returned")
        return lane, worker

    def _settings(self, lane: ModelLane) -> agent_pb2.SchedulerMessage:
        policy = lane.pool.policy
        settings = agent_pb2.PoolSettings(
            pool=policy.model,
            key_namespace=lane.keyer.namespace,
            block_size_tokens=policy.block_size_tokens,
            digest_capacity=policy.digest.capacity_blocks,
            digest_error_rate=policy.digest.error_rate,
            report_interval_s=self._reports.interval_s,
            delta_interval_s=policy.digest.delta_interval_s,
            snapshot_interval_s=policy.digest.snapshot_interval_s,
        )
        return agent_pb2.SchedulerMessage(settings=settings)

    def _take(
        self, lane: ModelLane, worker: Worker, message: agent_pb2.AgentMessage
    ) -> agent_pb2.SchedulerMessage | None:
        """Apply one message; the resync to send if it does not fit."""
        now = self._clock()
        kind = message.WhichOneof("kind")
        if lane.pool.workers.get(worker.address) is not worker:
            # Lost while its stream was silent: the agent starts over with a hello.
            raise ConnectionResetError("worker left the pool")
        try:
            if kind == "load":
                was_ready = worker.last_report is not None and worker.last_report.ready
                self._wake(self._scheduler.report(lane, worker, _load(message.load), now))
                if was_ready != message.load.ready:
                    facts = {"worker": worker.address, "ready": message.load.ready}
                    logger.info("worker state", extra={"facts": facts})
            elif kind == "snapshot":
                self._scheduler.snapshot(lane, worker, _snapshot(message.snapshot), now)
            elif kind == "delta":
                self._scheduler.delta(lane, worker, _delta(message.delta), now)
            else:
                self._metrics.protocol_errors.labels("agent").inc()
        except DigestError as error:
            self._metrics.resyncs.labels(lane.pool.policy.model).inc()
            logger.warning(
                "digest refused", extra={"facts": {"worker": worker.address, "why": str(error)}}
            )
            return agent_pb2.SchedulerMessage(resync=agent_pb2.Resync(reason=str(error)))
        return None


def _load(load: agent_pb2.Load) -> LoadReport:
    return LoadReport(
        ready=load.ready,
        running=_gauge(load, "running"),
        waiting=_gauge(load, "waiting"),
        kv_usage=_gauge(load, "kv_usage"),
        age_s=max(0.0, load.age_s) if math.isfinite(load.age_s) else math.inf,
    )


def _gauge(load: agent_pb2.Load, name: str) -> float | None:
    value: float = getattr(load, name)
    return value if load.HasField(name) and math.isfinite(value) else None


def _snapshot(message: agent_pb2.DigestSnapshot) -> Snapshot:
    return Snapshot(
        version=message.version,
        epoch=message.epoch,
        sequence=message.sequence,
        block_size_tokens=message.block_size_tokens,
        capacity=message.capacity,
        error_rate=message.error_rate,
        num_slices=message.num_slices,
        bits_per_slice=message.bits_per_slice,
        hash_name=message.hash_name,
        count=message.count,
        bits=message.bits,
        checksum=message.checksum,
    )


def _delta(message: agent_pb2.DigestDelta) -> Delta:
    return Delta(message.epoch, message.sequence, message.added_keys)
