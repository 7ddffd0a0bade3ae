"""``BlockLedger``: which block keys one engine's cache holds, from its KV events.

The engine stores the same hash several times and removes it once per physical copy, so
copies are counted. Keys come from the events' token ids and parents; what cannot be
keyed as the scheduler keys it is left out and counted. Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from extproc.tokens.blocks import Keys, chain_keys, root_key
from workers.kv_events import BlockHash, Cleared, KvEvent, Removed, Stored

NO_PARENT = None


class Left(Enum):
    """Why blocks are not in the digest."""

    UNKNOWN_PARENT = "unknown_parent"
    """The chain's beginning was never seen, left out, or dropped."""
    EXTRA_KEYS = "extra_keys"
    """Hashed with something that the scheduler cannot reproduce, such as an image."""
    MEDIUM = "medium"
    """Not in the accelerator's memory."""
    GROUP = "group"
    """Another KV group, or not full attention."""
    BLOCK_SIZE = "block_size"
    """The engine's block size is not the pool's."""
    MALFORMED = "malformed"
    """Token ids missing or out of range."""
    CAPACITY = "capacity"
    """Dropped, least recently used chain first, to stay within the digest's capacity."""


class Changes(NamedTuple):
    """Effect of one event on the set of live keys."""

    added: list[int]
    removed: int


NO_CHANGES = Changes([], 0)


class _Block:
    __slots__ = ("children", "copies", "hash", "key", "parent")

    def __init__(self, block_hash: BlockHash, key: int, parent: _Block | None) -> None:
        self.hash = block_hash
        self.key = key
        self.parent = parent
        self.copies = 1
        self.children = 0


class BlockLedger:
    """Live keys of one engine under one pool's namespace; never more than ``capacity``.

    ``epoch`` grows whenever the set starts anew; ``next_epoch`` makes the numbers.
    """

    def __init__(
        self,
        namespace: int,
        block_size_tokens: int,
        capacity: int,
        next_epoch: Callable[[], int],
    ) -> None:
        self.namespace = namespace
        self.block_size_tokens = block_size_tokens
        self.capacity = capacity
        self.left: Counter[Left] = Counter()
        """Blocks left out in this epoch, by reason."""
        self._next_epoch = next_epoch
        self._blocks: dict[BlockHash, _Block] = {}
        self._holders: dict[int, int] = {}
        # Blocks that nothing continues, least recently stored first. Only these are ever
        # dropped: a chain without its beginning could never be matched.
        self._leaves: OrderedDict[BlockHash, _Block] = OrderedDict()
        self._start_anew()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def mismatched(self) -> bool:
        """The engine's blocks have another size than the pool's: nothing can be keyed."""
        return self.engine_block_size_tokens != self.block_size_tokens

    def live_keys(self) -> Keys:
        """Every live key once, in no particular order."""
        return np.fromiter(self._holders, dtype=np.uint64, count=len(self._holders))

    def clear(self) -> None:
        """Forget everything and begin a new epoch."""
        self._start_anew()

    def apply(self, event: KvEvent) -> Changes:
        """Take one event in; tells the keys that became live and how many ceased to be."""
        if isinstance(event, Cleared):
            self.clear()
            return NO_CHANGES
        blocks = len(event.block_hashes)
        if event.medium is not None and event.medium.upper() != "GPU":
            return self._leave_out(Left.MEDIUM, blocks)
        if event.group_idx or getattr(event, "spec_kind", None) not in (None, "full_attention"):
            return self._leave_out(Left.GROUP, blocks)
        return self._store(event) if isinstance(event, Stored) else self._remove(event)

    def _leave_out(self, reason: Left, blocks: int) -> Changes:
        if blocks:
            self.left[reason] += blocks
        return NO_CHANGES

    def _start_anew(self) -> None:
        self.epoch = self._next_epoch()
        self.engine_block_size_tokens = self.block_size_tokens
        self.left.clear()
        self._blocks.clear()
        self._holders.clear()
        self._leaves.clear()

    def _store(self, event: Stored) -> Changes:
        blocks = len(event.block_hashes)
        if self.mismatched or event.block_size != self.block_size_tokens:
            self._refuse_block_size(event.block_size)
            return self._leave_out(Left.BLOCK_SIZE, blocks)
        start = self._start_of(event)
        if isinstance(start, Left):
            return self._leave_out(start, blocks)
        parent, seed = start
        usable = _plain_run(event)
        self._leave_out(Left.EXTRA_KEYS, blocks - usable)
        keys = self._keys_of(event, seed, usable)
        self._leave_out(Left.MALFORMED, usable - len(keys))
        added = self._insert(event.block_hashes, keys, parent)
        removed = self._drop_oldest()
        if removed:
            added = [key for key in added if key in self._holders]
        return Changes(added, removed)

    def _refuse_block_size(self, size: int) -> None:
        # Sticky until the next clear, so that a mixed engine does not make epochs by the dozen.
        if not self.mismatched:
            self._start_anew()
            self.engine_block_size_tokens = size

    def _start_of(self, event: Stored) -> tuple[_Block | None, int] | Left:
        if event.parent_hash is not NO_PARENT:
            parent = self._blocks.get(event.parent_hash)
            return Left.UNKNOWN_PARENT if parent is None else (parent, parent.key)
        if event.lora_id is not None and not event.lora_name:
            return Left.EXTRA_KEYS
        extras = _own_extras(event, 0)
        salt = extras[0] if extras else ""
        if len(extras) > 1 or not isinstance(salt, str):
            return Left.EXTRA_KEYS
        adapter = event.lora_name or ""
        return None, root_key(self.namespace, self.block_size_tokens, adapter, salt)

    def _keys_of(self, event: Stored, seed: int, usable: int) -> list[int]:
        tokens = event.token_ids[: usable * self.block_size_tokens]
        try:
            packed = np.array(tokens, dtype="<u4").tobytes()
        except (OverflowError, ValueError):
            return []
        return chain_keys(seed, packed, self.block_size_tokens)

    def _insert(
        self, hashes: Iterable[BlockHash], keys: Iterable[int], parent: _Block | None
    ) -> list[int]:
        added: list[int] = []
        for block_hash, key in zip(hashes, keys, strict=False):
            block = self._blocks.get(block_hash)
            if block is not None:
                block.copies += 1
                if not block.children:
                    self._leaves.move_to_end(block_hash)
            else:
                block = self._create(block_hash, key, parent)
                holders = self._holders.get(key, 0)
                self._holders[key] = holders + 1
                if not holders:
                    added.append(key)
            parent = block
        return added

    def _create(self, block_hash: BlockHash, key: int, parent: _Block | None) -> _Block:
        block = self._blocks[block_hash] = _Block(block_hash, key, parent)
        self._leaves[block_hash] = block
        if parent is not None:
            if not parent.children:
                del self._leaves[parent.hash]
            parent.children += 1
        return block

    def _drop_oldest(self) -> int:
        removed = 0
        surplus = max(0, len(self._blocks) - self.capacity)
        for _ in range(surplus):
            removed += self._forget(next(iter(self._leaves.values())))
        self._leave_out(Left.CAPACITY, surplus)
        return removed

    def _remove(self, event: Removed) -> Changes:
        removed = 0
        for block_hash in event.block_hashes:
            block = self._blocks.get(block_hash)
            # Unknown: left out or dropped earlier.
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                removed += self._forget(block)
        return Changes([], removed)

    def _forget(self, block: _Block) -> int:
        """Take a block out; tells how many keys went with it, 0 or 1."""
        del self._blocks[block.hash]
        self._leaves.pop(block.hash, None)
        self._release_parent(block)
        block.copies = 0
        holders = self._holders[block.key] - 1
        if holders:
            self._holders[block.key] = holders
            return 0
        del self._holders[block.key]
        return 1

    def _release_parent(self, block: _Block) -> None:
        parent, block.parent = block.parent, None
        if parent is None:
            return
        parent.children -= 1
        # A chain is as recent as its end: its new end is the next to go.
        if parent.copies and not parent.children:
            self._leaves[parent.hash] = parent
            self._leaves.move_to_end(parent.hash, last=False)


def _own_extras(event: Stored, index: int) -> list[Any]:
    """Extra hash keys of one block without the adapter's name. They carry no tags."""
    if not event.extra_keys or index >= len(event.extra_keys):
        return []
    extras = list(event.extra_keys[index] or ())
    if event.lora_name and event.lora_name in extras:
        extras.remove(event.lora_name)
    return extras


def _plain_run(event: Stored) -> int:
    """Blocks before the first whose extra keys the scheduler cannot reproduce."""
    blocks = len(event.block_hashes)
    if not event.extra_keys:
        return blocks
    # A chain's first block may have a salt, which its root key already holds.
    first = 1 if event.parent_hash is NO_PARENT else 0
    for index in range(first, blocks):
        if _own_extras(event, index):
            return index
    return blocks
