"""Paged KV blocks with prefix cache, as vLLM v1 keeps them.

A freed block keeps its content and waits at the tail of the free queue until it is revived
by a hit or evicted by an allocation. Several physical blocks may carry the same hash, and
each is removed on its own. vLLM's reserved null block is not modelled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks handed out, and the hashes evicted for them, oldest first."""

    blocks: list[int]
    evicted: list[int]


class BlockManager:
    """A fixed number of blocks, told apart by number."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}  # blocks beyond the first of a hash

    def __repr__(self) -> str:
        used = self.num_blocks - len(self._free)
        copies = sum(map(len, self._copies.values()))
        return f"<BlockManager used={used} free={len(self._free)} cached={self.cached + copies}>"

    @property
    def free(self) -> int:
        """Blocks that no live request holds; many of them still serve as cache."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Distinct hashes that a prompt can hit."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks held by live requests, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def lookup(self, hashes: Iterable[int]) -> list[int]:
        """Blocks holding the longest cached run from the first hash on."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int, hits: Sequence[int] = ()) -> Allocation | None:
        """Take ``hits`` as they are and ``count`` new blocks; None, and no change, if short."""
        references, free = self._references, self._free
        idle = sum(not references[block] for block in hits)
        if count > len(free) - idle:
            return None
        for block in hits:
            if not references[block]:
                del free[block]
            references[block] += 1
        taken: list[int] = []
        evicted: list[int] = []
        for _ in range(count):
            block, _none = free.popitem(last=False)
            references[block] = 1
            self._evict(block, evicted)
            taken.append(block)
        return Allocation(taken, evicted)

    def store(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Make full blocks findable; a hash that another block has is stored once more."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._hash_of[block] is not None:
                raise ValueError(f"block {block} already has a hash")
            self._hash_of[block] = block_hash
            if self._cached.setdefault(block_hash, block) != block:
                self._copies.setdefault(block_hash, {})[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each; a chain's tail is first in line for eviction."""
        references = self._references
        for block in reversed(blocks):
            if references[block] < 1:
                raise ValueError(f"block {block} is not held")
            references[block] -= 1
            if not references[block]:
                self._free[block] = None

    def clear(self) -> bool:
        """Forget every cached block; refused (False) while a request holds any."""
        if len(self._free) < self.num_blocks:
            return False
        self._hash_of = [None] * self.num_blocks
        self._cached.clear()
        self._copies.clear()
        return True

    def _evict(self, block: int, evicted: list[int]) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        evicted.append(block_hash)
        copies = self._copies.get(block_hash)
        if copies and self._cached[block_hash] != block:
            del copies[block]
        elif copies:
            self._cached[block_hash] = next(iter(copies))
            del copies[self._cached[block_hash]]
        else:
            del self._cached[block_hash]
        if copies is not None and not copies:
            del self._copies[block_hash]
