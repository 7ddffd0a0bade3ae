"""``WorkerReport``: everything known of one worker, as the ``Load`` message says it."""

from __future__ import annotations

from dataclasses import asdict

from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.drain import Drain, Draining
from workers.agent.engine_state import Condition, EngineState
from workers.agent.request_watch import RequestWatch
from workers.agent.signals import NO_SIGNALS, Signals
from workers.agent.worker_cache import WorkerCache

UNREADABLE = "unreadable"
"""In ``Load.left_out``, events that could not be decoded."""

_STATES = {
    Condition.DOWN: agent_pb2.WORKER_STATE_DOWN,
    Condition.STARTING: agent_pb2.WORKER_STATE_STARTING,
    Condition.READY: agent_pb2.WORKER_STATE_READY,
    Condition.ASLEEP: agent_pb2.WORKER_STATE_ASLEEP,
    Condition.FROZEN: agent_pb2.WORKER_STATE_FROZEN,
}


class WorkerReport:
    """Puts engine, drain, requests and cache together.

    Args:
        requests: what the middleware tells.
    """

    def __init__(
        self,
        engine: EngineState,
        cache: WorkerCache,
        drain: Drain | None = None,
        requests: RequestWatch | None = None,
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.drain = drain or Drain()
        self.requests = requests or RequestWatch()
        self.lost_events = 0
        """KV event batches that never came and could not be replayed."""

    @property
    def state(self) -> agent_pb2.WorkerState:
        """The worker's state; the truth about a dead engine goes before its drain."""
        condition = self.engine.condition
        if condition is Condition.DOWN or self.drain.state is Draining.NOT:
            return _STATES[condition]
        if self.drain.state is Draining.DONE:
            return agent_pb2.WORKER_STATE_DRAINED
        return agent_pb2.WORKER_STATE_DRAINING

    def running_requests(self) -> float | None:
        """Requests on the engine: the middleware's truth, else its metrics; None = unknown."""
        if self.requests.known:
            return float(self.requests.count)
        return self.engine.requests_by_metrics

    def load(self, now_s: float, interval_s: float) -> agent_pb2.Load:
        """The message as of now."""
        state = self.state
        numbers = self.engine.load(now_s, interval_s)
        # None leaves an optional field absent.
        return agent_pb2.Load(
            ready=state == agent_pb2.WORKER_STATE_READY,
            state=state,
            running=numbers.running,
            waiting=numbers.waiting,
            kv_usage=numbers.kv_usage,
            age_s=numbers.age_s,
            kv_blocks=numbers.kv_blocks,
            signals=_signals_message(numbers.signals),
            adapters=self.engine.adapters,
            max_adapters=numbers.max_adapters or 0,
            leases_known=self.requests.known,
            in_flight_leases=self.requests.leases() if self.requests.known else (),
            left_out=self._left_out(),
            lost_events=self.lost_events,
        )

    def _left_out(self) -> dict[str, int]:
        left = {reason.value: count for reason, count in self.cache.left().items() if count}
        return {**left, UNREADABLE: self.cache.unreadable} if self.cache.unreadable else left


def _signals_message(signals: Signals) -> agent_pb2.Signals | None:
    return None if signals == NO_SIGNALS else agent_pb2.Signals(**asdict(signals))
