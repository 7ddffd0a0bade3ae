"""The control port: agents' Report streams.

One stream a worker. The first message says who it is, the answer says how the pool makes
keys and digests; after that loads and digest changes come in, and a resync goes out when
one does not fit. A newer stream for the same worker ends the older one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeAlias

import grpc

from extproc.cache.feed import Delta, Snapshot
from extproc.decision.ticket import ServedModel, Ticket
from extproc.errors import DigestError
from extproc.fleet.worker import (
    EngineError,
    Introduction,
    LoadReport,
    Outcome,
    Tier,
    Worker,
    WorkerState,
)
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.policy import ReportPolicy, normal_address
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import Metrics

logger = logging.getLogger("kvgate.control")

SERVICE = "kvgate.v1.Fleet"
_MAX_NAME_CHARS = 256
_MAX_ADAPTERS = 1_024
_MAX_HOT_PREFIXES = 64
_MAX_LABELS = 32
_STATES = {
    agent_pb2.WORKER_STATE_STARTING: WorkerState.STARTING,
    agent_pb2.WORKER_STATE_READY: WorkerState.READY,
    agent_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
    agent_pb2.WORKER_STATE_DRAINED: WorkerState.DRAINED,
    agent_pb2.WORKER_STATE_ASLEEP: WorkerState.ASLEEP,
    agent_pb2.WORKER_STATE_FROZEN: WorkerState.FROZEN,
    agent_pb2.WORKER_STATE_DOWN: WorkerState.DOWN,
}
_ERRORS = {
    agent_pb2.ENGINE_ERROR_NONE: EngineError.NONE,
    agent_pb2.ENGINE_ERROR_CLIENT: EngineError.CLIENT,
    agent_pb2.ENGINE_ERROR_TOO_LONG: EngineError.TOO_LONG,
    agent_pb2.ENGINE_ERROR_QUEUE_FULL: EngineError.QUEUE_FULL,
    agent_pb2.ENGINE_ERROR_KV_EXHAUSTED: EngineError.KV_EXHAUSTED,
    agent_pb2.ENGINE_ERROR_ENGINE_DEAD: EngineError.ENGINE_DEAD,
    agent_pb2.ENGINE_ERROR_SHUTTING_DOWN: EngineError.SHUTTING_DOWN,
    agent_pb2.ENGINE_ERROR_STREAM: EngineError.STREAM,
    agent_pb2.ENGINE_ERROR_CLIENT_GONE: EngineError.CLIENT_GONE,
    agent_pb2.ENGINE_ERROR_OTHER: EngineError.OTHER,
}
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
        self._streams: dict[str, _Context] = {}

    @property
    def open_streams(self) -> int:
        """Agents connected."""
        return len(self._streams)

    def handler(self) -> grpc.GenericRpcHandler:
        """What to register with a gRPC server."""
        method = grpc.stream_stream_rpc_method_handler(
            self._report,
            request_deserializer=agent_pb2.AgentMessage.FromString,
            response_serializer=agent_pb2.SchedulerMessage.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Report": method})

    async def drain(self, address: str, deadline_s: float) -> bool:
        """Tell a worker's agent to take nothing new; False if no agent speaks for it."""
        return await self._command(address, _drain_message(deadline_s))

    async def resume(self, address: str) -> bool:
        """Undo a drain; False if no agent speaks for the worker."""
        return await self._command(address, agent_pb2.SchedulerMessage(resume=agent_pb2.Resume()))

    async def _command(self, address: str, message: agent_pb2.SchedulerMessage) -> bool:
        stream = self._streams.get(address)
        if stream is None:
            return False
        await stream.write(message)
        return True

    async def _report(self, _requests: object, context: _Context) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is a hello")
        served, worker = await self._introduce(first.hello, context)
        self._streams[worker.address] = context
        logger.info("agent connected", extra={"facts": {"worker": worker.address}})
        try:
            await context.write(self._settings(served))
            while (message := await context.read()) is not grpc.aio.EOF:
                if self._streams.get(worker.address) is not context:
                    await context.abort(grpc.StatusCode.ABORTED, "a newer stream took over")
                if (answer := self._take(served, worker, message)) is not None:
                    await context.write(answer)
        finally:
            if self._streams.get(worker.address) is context:
                del self._streams[worker.address]
            logger.info("agent gone", extra={"facts": {"worker": worker.address}})

    async def _introduce(
        self, hello: agent_pb2.Hello, context: _Context
    ) -> tuple[ServedModel, Worker]:
        code = grpc.StatusCode.INVALID_ARGUMENT
        try:
            address = normal_address(hello.address)
        except ValueError as error:
            await context.abort(code, str(error))
            raise
        served = self._scheduler.model_of_agent(hello.models)
        if served is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no pool serves its models")
            raise AssertionError("abort returned")
        introduction = Introduction(
            address=address,
            models=tuple(hello.models),
            max_running=hello.max_running,
            sends_digests=hello.kv_events,
            engine=hello.engine[:_MAX_NAME_CHARS],
            labels={
                name[:_MAX_NAME_CHARS]: value[:_MAX_NAME_CHARS]
                for name, value in islice(hello.labels.items(), _MAX_LABELS)
            },
        )
        worker = self._scheduler.hello(served, introduction, self._clock())
        if worker is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the pool is full")
            raise AssertionError("abort returned")
        return served, worker

    def _settings(self, served: ServedModel) -> agent_pb2.SchedulerMessage:
        policy = served.pool.policy
        settings = agent_pb2.PoolSettings(
            pool=policy.model,
            key_namespace=served.keyer.namespace,
            block_size_tokens=policy.block_size_tokens,
            digest_capacity=policy.digest.capacity_blocks,
            digest_error_rate=policy.digest.error_rate,
            report_interval_s=self._reports.interval_s,
            delta_interval_s=policy.digest.delta_interval_s,
            snapshot_interval_s=policy.digest.snapshot_interval_s,
        )
        return agent_pb2.SchedulerMessage(settings=settings)

    def _take_load(self, served: ServedModel, worker: Worker, load: LoadReport, now: float) -> None:
        before = worker.last_report.state if worker.last_report else None
        self._wake(self._scheduler.report(served, worker, load, now))
        if load.state is not before:
            facts = {"worker": worker.address, "state": load.state.value}
            logger.info("worker state", extra={"facts": facts})

    def _take_outcome(
        self, served: ServedModel, worker: Worker, outcome: Outcome, now: float
    ) -> None:
        self._metrics.of(served.pool.policy.model).count_outcome(outcome.error.value)
        self._wake(self._scheduler.outcome(served, worker, outcome, now))

    def _take_hot(
        self, served: ServedModel, worker: Worker, hot: tuple[tuple[int, int], ...], now: float
    ) -> agent_pb2.SchedulerMessage | None:
        surplus = self._scheduler.hot(served, worker, hot, now)
        if not surplus:
            return None
        self._metrics.replica_advice.labels(served.name).inc(len(surplus))
        return agent_pb2.SchedulerMessage(advice=agent_pb2.ReplicaAdvice(surplus_keys=surplus))

    def _take(
        self, served: ServedModel, worker: Worker, message: agent_pb2.AgentMessage
    ) -> agent_pb2.SchedulerMessage | None:
        """Apply one message; what to answer, a resync if it does not fit."""
        now = self._clock()
        kind = message.WhichOneof("kind")
        if served.pool.workers.get(worker.address) is not worker:
            # Lost while its stream was silent: the agent starts over with a hello.
            raise ConnectionResetError("worker left the pool")
        try:
            if kind == "load":
                self._take_load(served, worker, _load(message.load), now)
            elif kind == "finished":
                for outcome in message.finished.outcomes:
                    self._take_outcome(served, worker, _outcome(outcome), now)
            elif kind == "hot":
                pairs = zip(message.hot.keys, message.hot.counts, strict=False)
                return self._take_hot(served, worker, tuple(islice(pairs, _MAX_HOT_PREFIXES)), now)
            elif kind == "snapshot":
                self._scheduler.snapshot(
                    served, worker, _snapshot(message.snapshot), now, _tier(message.snapshot.tier)
                )
            elif kind == "delta":
                self._scheduler.delta(
                    served, worker, _delta(message.delta), now, _tier(message.delta.tier)
                )
            else:
                self._metrics.protocol_errors.labels("agent").inc()
        except DigestError as error:
            self._metrics.resyncs.labels(served.pool.policy.model).inc()
            logger.warning(
                "digest refused", extra={"facts": {"worker": worker.address, "why": str(error)}}
            )
            return agent_pb2.SchedulerMessage(resync=agent_pb2.Resync(reason=str(error)))
        return None


def _drain_message(deadline_s: float) -> agent_pb2.SchedulerMessage:
    return agent_pb2.SchedulerMessage(drain=agent_pb2.Drain(deadline_s=deadline_s))


def _load(load: agent_pb2.Load) -> LoadReport:
    signals = {
        field.name: value for field, value in load.signals.ListFields() if math.isfinite(value)
    }
    return LoadReport(
        state=_state(load),
        running=_gauge(load, "running"),
        waiting=_gauge(load, "waiting"),
        kv_usage=_gauge(load, "kv_usage"),
        kv_blocks=load.kv_blocks if load.HasField("kv_blocks") else None,
        age_s=max(0.0, load.age_s) if math.isfinite(load.age_s) else math.inf,
        leases=frozenset(load.in_flight_leases) if load.leases_known else None,
        adapters=tuple(name[:_MAX_NAME_CHARS] for name in load.adapters[:_MAX_ADAPTERS]),
        max_adapters=load.max_adapters,
        signals=signals,
        left_out=dict(load.left_out),
        lost_events=load.lost_events,
    )


def _tier(tier: int) -> Tier:
    return Tier.HOST if tier == agent_pb2.TIER_HOST else Tier.DEVICE


def _state(load: agent_pb2.Load) -> WorkerState:
    known = _STATES.get(load.state)
    if known is not None:
        return known
    return WorkerState.READY if load.ready else WorkerState.DOWN


def _outcome(message: agent_pb2.Outcome) -> Outcome:
    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return Outcome(
        lease=message.lease,
        status=message.status,
        error=_ERRORS.get(message.error, EngineError.UNKNOWN),
        duration_s=message.duration_s,
        ttft_s=given("ttft_s"),
        prompt_tokens=given("prompt_tokens"),
        output_tokens=given("output_tokens"),
        cached_tokens=given("cached_tokens"),
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
    return Delta(
        message.epoch,
        message.sequence,
        message.added_keys,
        message.cleared_bits,
        message.removed_keys,
    )
