"""What an autoscaler is told of a pool, gathered from admission, routing and workers."""

from __future__ import annotations

from extproc.admission.controller import AdmissionController
from extproc.admission.scaling import PoolSignals
from extproc.decision.ticket import ServedModel


def pool_signals(admission: AdmissionController, served: ServedModel, now: float) -> PoolSignals:
    """The pool's load of this moment."""
    table = served.pool.table
    usable = table.usable()
    slots = table.slots[usable]
    reports = [worker.last_report for worker in served.pool.workers.values()]
    usages = [each.kv_usage for each in reports if each and each.kv_usage is not None]
    waits = admission.pools[served.name]
    return PoolSignals(
        ready=int(usable.sum()),
        slots=float(slots.mean()) if len(slots) else 0.0,
        running=int(table.running()[usable].sum()),
        waiting=len(waits.queue),
        expected_wait_s=waits.pressing_wait_s(now),
        oldest_wait_s=waits.oldest_wait_s(now),
        backlog_tokens=sum(lane.tokens for lane in waits.queue.lanes.values()),
        kv_usage=sum(usages) / len(usages) if usages else None,
        ttft_violation_rate=served.level.violation_rate(now),
        goodput_per_s=served.level.goodput_per_s(now),
    )
