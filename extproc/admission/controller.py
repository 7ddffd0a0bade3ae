"""``AdmissionController``: one pool's concurrency limit and its bounded FIFO queue.

``admit`` answers with a lease or a place in the queue, or raises a refusal; ``release``
gives a lease back; ``next_waiting`` says who may run now. Whether a worker has room is
asked of the caller, so that it is always clear which of the two holds a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from extproc.admission.drain_rate import DrainRate
from extproc.admission.lease import Lease
from extproc.errors import QueueFull, QueueTimeout
from extproc.policy import AdmissionPolicy

_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0


class AdmissionController:
    """Counts what runs and keeps what waits, in order of arrival.

    Attributes:
        running: leases granted and not yet released.
        granted, refused_full, refused_timeout, left_queue: totals, for metrics.
    """

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy
        self.running = 0
        self.granted = 0
        self.refused_full = 0
        self.refused_timeout = 0
        self.left_queue = 0
        self._drain_rate = DrainRate()
        self._queue: OrderedDict[str, float] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def oldest_wait_s(self, now: float) -> float:
        """How long the head of the queue has waited; 0 when nobody waits."""
        first = next(iter(self._queue.values()), now)
        return now - first

    def admit(self, request_id: str, now: float, *, has_capacity: bool) -> Lease | None:
        """A lease now, or None: the request waits under ``request_id``.

        Raises:
            QueueFull: it can neither run nor wait.
        """
        if has_capacity and not self._queue and self._has_quota():
            return self._grant(request_id, now)
        if len(self._queue) >= self.policy.max_queue:
            self.refused_full += 1
            raise QueueFull(
                "The model is at capacity and its queue is full.",
                retry_after_s=self._retry_after_s(now),
            )
        self._queue[request_id] = now
        return None

    def next_waiting(
        self, now: float, has_capacity: Callable[[str], bool]
    ) -> tuple[str, Lease] | None:
        """Grant a lease to the first in the queue that a worker has room for."""
        if not self._has_quota():
            return None
        request_id = next(filter(has_capacity, self._queue), None)
        if request_id is None:
            return None
        del self._queue[request_id]
        return request_id, self._grant(request_id, now)

    def release(self, lease: Lease, now: float) -> None:
        """Give a lease back; a second call does nothing."""
        if lease.released:
            return
        lease.released = True
        self.running -= 1
        self._drain_rate.release(now)

    def leave(self, request_id: str) -> bool:
        """The client is gone; False if it was not waiting."""
        if self._queue.pop(request_id, None) is None:
            return False
        self.left_queue += 1
        return True

    def expired(self, now: float) -> Iterator[tuple[str, QueueTimeout]]:
        """Take out requests that waited their whole time, oldest first."""
        while self._queue:
            request_id, since = next(iter(self._queue.items()))
            if now - since < self.policy.max_queue_time_s:
                return
            del self._queue[request_id]
            self.refused_timeout += 1
            yield (
                request_id,
                QueueTimeout(
                    f"No capacity within {self.policy.max_queue_time_s:g} s.",
                    retry_after_s=self._retry_after_s(now),
                ),
            )

    def abandon(self) -> list[str]:
        """Empty the queue: nobody is left who could serve it."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    def _has_quota(self) -> bool:
        return self.running < self.policy.max_concurrency

    def _grant(self, request_id: str, now: float) -> Lease:
        self.running += 1
        self.granted += 1
        return Lease(request_id, now)

    def _retry_after_s(self, now: float) -> float:
        wait = self._drain_rate.wait_s(self.waiting + 1, now, longest_s=_LONGEST_RETRY_S)
        return max(_SHORTEST_RETRY_S, wait)
