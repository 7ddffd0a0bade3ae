"""Whether a request that cannot run now may wait, and what it is told if not."""

from __future__ import annotations

import math

from extproc.admission.demand import Demand
from extproc.admission.pool_state import PoolState
from extproc.errors import DeadlineUnreachable, QueueFull, QuotaTooSmall, WouldWait

_CAUTION = 1.25
"""Who is refused at the door can be told when to come back; who waits in vain has lost time."""
_LATE_AFTER_COMEBACKS = 3


def check_size(demand: Demand) -> None:
    """Raise if no waiting could help.

    Raises:
        QuotaTooSmall: a rule could never let it run.
    """
    for counter in demand.counters:
        if not counter.rule.ever_fits(demand.cost_tokens):
            raise QuotaTooSmall(
                f"The request is larger than quota {counter.rule.name!r} allows at all.",
                reason=counter.reason,
            )


def check_wait(pool: PoolState, demand: Demand, now: float) -> None:
    """Raise unless the request may wait, and has a chance to make it in time.

    Raises:
        QueueFull, WouldWait, DeadlineUnreachable: with the time after which to come back.
    """
    if demand.max_queue_time_s == 0:
        raise WouldWait(
            "There is no room now, and the request does not want to wait.",
            retry_after_s=pool.retry_after_s(demand, now),
            reason=demand.blocked_by,
        )
    full = full_queue(demand)
    if full is None and demand.body_bytes + pool.waiting_bytes > (
        pool.policy.admission.max_queue_bytes
    ):
        full = f"capacity:{demand.pool}"
    if full is not None:
        raise QueueFull(
            "There is no room, and the queue is full.",
            retry_after_s=pool.retry_after_s(demand, now),
            reason=full,
        )
    latest = latest_start(demand)
    if demand.returned and latest >= now:
        return  # As told: its place was kept.
    expected_s = pool.expected_wait_s(demand, now, latest - now)
    if expected_s is not None and now + _CAUTION * expected_s > latest:
        raise DeadlineUnreachable(
            f"The expected wait of {expected_s:.3g} s is longer than the request allows.",
            retry_after_s=pool.retry_after_s(demand, now),
            reason=demand.blocked_by,
        )


def full_queue(demand: Demand) -> str | None:
    """The rule whose queue has no place left; the one that lacks room, if it is among them."""
    returned = demand.returned
    full = [each.reason for each in demand.counters if each.queue_is_full(returned=returned)]
    if demand.blocked_by in full:
        return demand.blocked_by
    return full[0] if full else None


def latest_start(demand: Demand) -> float:
    """When it must run, to have its first token in time.

    Who came back so often has no budget any more: large prompts can only meet theirs on an
    idle worker, and would be sent away for ever.
    """
    latest = math.inf if demand.deadline_at is None else demand.deadline_at
    if demand.ttft_budget_s is not None and demand.comebacks < _LATE_AFTER_COMEBACKS:
        latest = min(latest, demand.arrived_at + demand.ttft_budget_s)
    return latest - demand.prefill_s
