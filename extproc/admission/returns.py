"""``Returns``: places kept for clients that were told when to come back.

Whoever is refused for lack of room and comes back as told goes on where it would have
waited: before what its tenant asked for later, and the door lets it in without asking again
how long it may have to wait. Without that a client that obeys ``retry-after`` competes with
newcomers for ever, and no announced wait could be true.

A request that comes back is known by its tenant and the hash of its body. Not every client
comes back: places count by the share of those that did lately.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TypeVar

from extproc.admission.demand import Demand

_MAX_PLACES = 8_192
_GRACE_S = 2.0
_GRACE_PART = 0.25
"""Clients add jitter, and some know whole seconds only."""
_EARLY_S = 0.05
_SLICE_S = 0.1
_FIRST_SHARE = 0.5
_PACE = 0.02

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class Place:
    """What is kept for one refused request: its ``sequence`` among others, how often it came
    back so far, and its work."""

    key: tuple[str, int]
    lane: str
    cost_tokens: int
    sequence: int
    comebacks: int
    due_at: float
    until: float
    counted: bool = True

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.key[0]


class Returns:
    """The places of one pool, at most 8,192.

    Attributes:
        share: part of the promises that were taken up lately, 0 to 1.
        kept, lost: places taken up, and places nobody came back to, ever.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE
        self.kept = 0
        self.lost = 0
        self._places: dict[tuple[str, int], Place] = {}
        self._ends: list[tuple[float, int, Place]] = []
        self._made = 0
        self._tokens: dict[str, int] = {}
        self._by_tenant: dict[tuple[str, str], int] = {}
        self._slices: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def places(self) -> Collection[Place]:
        """All that are kept."""
        return self._places.values()

    def promise(self, demand: Demand, lane: str, wait_s: float, now: float) -> float:
        """Keep a place for a request that is refused.

        Args:
            lane: in which it asked.
            wait_s: until there is room for it.

        Returns:
            the wait to announce: what is left of a promise that it did not wait for.
        """
        key = demand.tenant, demand.fingerprint
        place = self._places.get(key)
        if place is not None and place.due_at > now + _EARLY_S:
            return place.due_at - now
        if place is not None:
            self._drop(place)
        elif not demand.fingerprint or len(self._places) >= _MAX_PLACES:
            return wait_s
        due_at = now + wait_s
        until = due_at + _GRACE_S + _GRACE_PART * wait_s
        place = Place(
            key, lane, demand.cost_tokens, demand.sequence, demand.comebacks, due_at, until
        )
        self._places[key] = place
        self._count(place, 1)
        self._made += 1
        heapq.heappush(self._ends, (until, self._made, place))
        return wait_s

    def take_up(self, tenant: str, fingerprint: int, now: float) -> Place | None:
        """The place of a request that comes back; None if it has none, or is too early."""
        place = self._places.get((tenant, fingerprint))
        if place is None or place.due_at > now + _EARLY_S or place.until < now:
            return None
        return place

    def settle(self, tenant: str, fingerprint: int) -> None:
        """A request is in, it runs or waits: it needs no place any more."""
        place = self._places.get((tenant, fingerprint))
        if place is not None:
            self._drop(place)
            self.kept += 1
            self.share += _PACE * (1.0 - self.share)

    def expire(self, now: float) -> None:
        """Give up places that nobody came back to."""
        while self._ends and (self._ends[0][0] < now or not self._ends[0][2].counted):
            _, _, place = heapq.heappop(self._ends)
            if place.counted:
                self._drop(place)
                self.lost += 1
                self.share -= _PACE * self.share
        if len(self._ends) > 64 + 2 * len(self._places):
            self._ends = [entry for entry in self._ends if entry[2].counted]
            heapq.heapify(self._ends)

    def tokens(self, lane: str) -> float:
        """Work that is likely to come back to a lane."""
        return self.share * self._tokens.get(lane, 0)

    def tokens_of(self, lane: str, tenant: str) -> float:
        """Work of one tenant that is likely to come back to a lane."""
        return self.share * self._by_tenant.get((lane, tenant), 0)

    def tokens_due(self, lane: str, within_s: float, now: float) -> float:
        """Work that is likely to come back to a lane so soon."""
        if within_s >= 100 * _SLICE_S:
            return self.tokens(lane)
        first = math.floor((now - _GRACE_S) / _SLICE_S)
        end = math.floor((now + within_s) / _SLICE_S) + 1
        due = sum([self._slices.get((lane, number), 0) for number in range(first, end)])
        return self.share * due

    def _drop(self, place: Place) -> None:
        del self._places[place.key]
        place.counted = False
        self._count(place, -1)

    def _count(self, place: Place, sign: int) -> None:
        change = sign * place.cost_tokens
        _add(self._tokens, place.lane, change)
        _add(self._by_tenant, (place.lane, place.tenant), change)
        _add(self._slices, (place.lane, math.floor(place.due_at / _SLICE_S)), change)


def _add(sums: dict[_Key, int], key: _Key, change: int) -> None:
    total = sums.get(key, 0) + change
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)
