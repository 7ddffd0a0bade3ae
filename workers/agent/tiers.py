"""``TierKeys``: the live keys of one cache tier, and what to drop first when it is full.

Several blocks may have one key (the engine's ranks, or hashes that differ only in what the
key ignores), so holders are counted. Only blocks that nothing continues are ever dropped,
least recently stored first: a chain without its beginning could never be matched.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum

import numpy as np

from extproc.tokens.blocks import Keys
from workers.agent.kv_events import BlockHash


class Tier(IntEnum):
    """Where a block lies; the numbers are those of the agent API."""

    DEVICE = 0
    HOST = 1


class Block:
    """One block of one engine: its key, its place in the chain, its copies in each tier."""

    __slots__ = ("children", "copies", "hash", "key", "parent", "rank")

    def __init__(self, rank: int, block_hash: BlockHash, key: int, parent: Block | None) -> None:
        self.rank = rank
        self.hash = block_hash
        self.key = key
        self.parent = parent
        self.copies = [0, 0]
        self.children = [0, 0]
        """Blocks of the same tier that continue this one."""

    @property
    def is_gone(self) -> bool:
        """No copy is left anywhere."""
        return not any(self.copies)


class TierKeys:
    """Keys of the blocks that have copies in one tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._holders: dict[int, int] = {}
        self._leaves: OrderedDict[int, Block] = OrderedDict()
        self.blocks = 0
        """Distinct blocks; never fewer than keys."""

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, key: int) -> bool:
        return key in self._holders

    def live_keys(self) -> Keys:
        """Every live key once, in no particular order."""
        return np.fromiter(self._holders, dtype=np.uint64, count=len(self._holders))

    def add_copy(self, block: Block) -> bool:
        """Count one more copy; True if the block's key became live."""
        tier = self._tier
        block.copies[tier] += 1
        if block.copies[tier] > 1:
            if id(block) in self._leaves:
                self._leaves.move_to_end(id(block))
            return False
        self.blocks += 1
        if not block.children[tier]:
            self._leaves[id(block)] = block
        if block.parent is not None:
            block.parent.children[tier] += 1
            self._leaves.pop(id(block.parent), None)
        holders = self._holders.get(block.key, 0)
        self._holders[block.key] = holders + 1
        return not holders

    def drop_copy(self, block: Block) -> bool:
        """Count one copy less, if there is one; True if the block's key ceased to be live."""
        tier = self._tier
        # None: dropped earlier, or of another tier.
        if not block.copies[tier]:
            return False
        block.copies[tier] -= 1
        return not block.copies[tier] and self._leave(block)

    def drop_block(self, block: Block) -> bool:
        """Forget all copies; True if the block's key ceased to be live."""
        if not block.copies[self._tier]:
            return False
        block.copies[self._tier] = 0
        return self._leave(block)

    def oldest_end(self) -> Block:
        """The end of the chain stored least recently."""
        return next(iter(self._leaves.values()))

    def _leave(self, block: Block) -> bool:
        self.blocks -= 1
        self._leaves.pop(id(block), None)
        self._release_parent(block.parent)
        holders = self._holders[block.key] - 1
        if holders:
            self._holders[block.key] = holders
            return False
        del self._holders[block.key]
        return True

    def _release_parent(self, parent: Block | None) -> None:
        tier = self._tier
        if parent is None:
            return
        parent.children[tier] -= 1
        # A chain is as recent as its end: its new end is the next to go.
        if parent.copies[tier] and not parent.children[tier]:
            self._leaves[id(parent)] = parent
            self._leaves.move_to_end(id(parent), last=False)
