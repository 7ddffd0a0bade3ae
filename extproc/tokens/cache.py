"""``ByteBoundedLru``: a cache with a bound in bytes and counts of what it did."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteBoundedLru(Generic[K, V]):
    """Least recently used entries leave when the sizes add up to more than ``max_bytes``.

    An entry larger than the whole cache is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, now most recent; None when absent."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        """Keep a value that takes ``size_bytes``, evicting what is oldest."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.bytes -= old[1]
        if size_bytes > self.max_bytes:
            return
        self._entries[key] = (value, size_bytes)
        self.bytes += size_bytes
        while self.bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed
            self.evictions += 1

    def __len__(self) -> int:
        return len(self._entries)
