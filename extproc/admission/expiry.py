"""``Expiries``: waiting requests by the time after which waiting makes no sense."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from extproc.admission.demand import Demand

_SPARE = 64


class Expiries:
    """A heap from which requests that stopped waiting are taken late; bounded by
    :meth:`forget_ended`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Demand]] = []
        self._added = 0

    def add(self, demand: Demand) -> None:
        """It waits until its ``expires_at``."""
        self._added += 1
        heapq.heappush(self._heap, (demand.expires_at, demand.sequence, self._added, demand))

    def due(self, now: float) -> Iterator[Demand]:
        """Take out those that still wait and whose time is over."""
        while self._heap and (self._heap[0][0] <= now or not self._heap[0][-1].waiting):
            demand = heapq.heappop(self._heap)[-1]
            if demand.waiting:
                yield demand

    def has_due(self, now: float) -> bool:
        """Whether :meth:`due` may have somebody."""
        return bool(self._heap) and self._heap[0][0] <= now

    def forget_ended(self, waiting: int) -> None:
        """Keep at most about twice as many entries as requests wait."""
        if len(self._heap) > _SPARE + 2 * waiting:
            self._heap = [entry for entry in self._heap if entry[-1].waiting]
            heapq.heapify(self._heap)
