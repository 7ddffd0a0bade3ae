"""``HotPrefixes``: blocks that many different prompts continue, of one report interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from extproc.generated.kvgate.v1 import agent_pb2

MAX_TOLD = 32
MAX_COUNTED = 4_096
MIN_CONTINUATIONS = 2
"""One continuation is just a conversation that goes on."""
HUSHED_S = 60.0
"""How long a prefix that enough others hold is not told as hot."""


class HotPrefixes:
    """Counts continuations of blocks by key; bounded."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._any_hot = False
        self._hushed_until: dict[int, float] = {}

    def __bool__(self) -> bool:
        return self._any_hot

    def note(self, key: int) -> None:
        """A block got one more continuation."""
        self._counts[key] += 1
        self._any_hot = self._any_hot or self._counts[key] >= MIN_CONTINUATIONS
        if len(self._counts) > MAX_COUNTED:
            # Those seen once so far are the many; what is hot comes again.
            self._counts = Counter({key: count for key, count in self._counts.items() if count > 1})

    def hush(self, keys: Iterable[int], now_s: float) -> int:
        """Do not tell these for a while; returns how many were told so far."""
        hushed = {key: until for key, until in self._hushed_until.items() if until > now_s}
        known = len(hushed)
        for key in keys:
            if key in hushed or len(hushed) < MAX_COUNTED:
                hushed[key] = now_s + HUSHED_S
        self._hushed_until = hushed
        return len(hushed) - known

    def take(self, now_s: float) -> agent_pb2.HotPrefixes:
        """The hottest of the interval that ends now, largest first."""
        hushed = self._hushed_until
        told = {k: n for k, n in self._counts.items() if hushed.get(k, now_s) <= now_s}
        hot = [
            (key, count)
            for key, count in Counter(told).most_common(MAX_TOLD)
            if count >= MIN_CONTINUATIONS
        ]
        self.clear()
        return agent_pb2.HotPrefixes(keys=[key for key, _ in hot], counts=[n for _, n in hot])

    def clear(self) -> None:
        """Begin an interval."""
        self._counts.clear()
        self._any_hot = False
