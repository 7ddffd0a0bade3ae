"""How many workers a pool should have, and why: signals for an autoscaler."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from extproc.policy import ScalingPolicy

_MOST_AT_ONCE = 2.0
"""A desire at most doubles what is there: waits under overload say little about how much
is missing, and new workers change them within a report."""


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """What is known of a pool's load, over all its workers.

    ``slots`` is of one worker; ``kv_usage`` is the mean over workers that tell, None if
    none does.
    """

    ready: int
    slots: float
    running: int
    waiting: int
    expected_wait_s: float
    oldest_wait_s: float
    backlog_tokens: int
    kv_usage: float | None
    ttft_violation_rate: float
    goodput_per_s: float


@dataclass(frozen=True, slots=True)
class Desire:
    """A number of workers and the signal that it follows from."""

    workers: int
    reason: str


def desire(signals: PoolSignals, policy: ScalingPolicy) -> Desire:
    """The number of workers that the load of this moment asks for.

    The largest of: requests running and waiting over slots plus headroom; workers over KV
    blocks in use against their target; half as many more for each ``target_wait_s`` of
    expected wait; one more for late first tokens. Never by utilisation of the accelerator:
    a full batch is what it is for.
    """
    have = max(1, signals.ready)
    wants = [
        (
            (signals.running + signals.waiting) / max(1.0, signals.slots) * (1 + policy.headroom),
            "requests",
        )
    ]
    if signals.kv_usage is not None:
        wants.append((have * signals.kv_usage / policy.target_kv_usage, "kv_usage"))
    if signals.expected_wait_s > policy.target_wait_s:
        wants.append((have * (1 + signals.expected_wait_s / policy.target_wait_s / 2), "wait"))
    if signals.ttft_violation_rate > policy.max_ttft_violation_rate:
        wants.append((have + 1, "ttft"))
    number, reason = max(wants)
    workers = math.ceil(min(number, _MOST_AT_ONCE * have) - 1e-9)
    if workers <= policy.min_workers:
        return Desire(policy.min_workers, "warm_floor")
    if workers > policy.max_workers:
        return Desire(policy.max_workers, "ceiling")
    return Desire(workers, reason)


class DesiredWorkers:
    """Follows a desire up at once and down only when it stayed low."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, Desire]] = deque()

    def update(self, signals: PoolSignals, policy: ScalingPolicy, now: float) -> Desire:
        """The highest desire of the last ``scale_in_after_s``; call it about once a second.

        Kept as a falling sequence, so memory follows the number of steps down.
        """
        latest = desire(signals, policy)
        while self._recent and self._recent[-1][1].workers <= latest.workers:
            self._recent.pop()
        self._recent.append((now, latest))
        while now - self._recent[0][0] > policy.scale_in_after_s:
            self._recent.popleft()
        highest = self._recent[0][1]
        return highest if highest is latest else Desire(highest.workers, "scale_in_delay")
