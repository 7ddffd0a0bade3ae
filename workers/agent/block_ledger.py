"""``BlockLedger``: which block keys one worker's caches hold, from its KV events.

The engine stores the same hash several times and removes it once per physical copy, so
copies are counted, in each tier. Each data-parallel rank has hashes of its own; the keys of
all ranks are the worker's. Keys come from the events' token ids and parents; what cannot be
keyed as the scheduler keys it is left out and counted. Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from extproc.tokens.blocks import Keys, chain_keys, root_key
from workers.agent.kv_events import BlockHash, Cleared, KvEvent, Removed, Stored
from workers.agent.tiers import Block, Tier, TierKeys

NO_PARENT = None
DEVICE_MEDIA = frozenset({"GPU", "XPU", "HPU", "NPU", "TPU", "DEVICE"})
"""What an engine computes from. vLLM says GPU on every platform, its CPU build included."""
HOST_MEDIA = frozenset({"CPU", "CPU_PINNED", "HOST", "DISK", "STORAGE", "FS", "NVME"})
"""What an engine loads blocks back from: vLLM's and SGLang's names."""
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""KV groups whose cached blocks serve any longer prompt. A hybrid model's other groups
(sliding window, Mamba) keep only what they need next, so their blocks say less."""


class Left(Enum):
    """Why blocks are not in the digest."""

    UNKNOWN_PARENT = "unknown_parent"
    """The chain's beginning was never seen, left out, or dropped."""
    EXTRA_KEYS = "extra_keys"
    """Hashed with something that the scheduler cannot reproduce, such as an image."""
    MEDIUM = "medium"
    """In a memory of an unknown kind, or on another machine."""
    GROUP = "group"
    """Of another KV group, or not full attention."""
    BLOCK_SIZE = "block_size"
    """The engine's block size is not the pool's."""
    MALFORMED = "malformed"
    """Token ids missing, too few or out of range."""
    CAPACITY = "capacity"
    """Dropped, least recently used chain first, to stay within the digest's capacity."""


class Changes(NamedTuple):
    """Effect of one event on the live keys of one tier."""

    tier: Tier
    added: list[int]
    removed: list[int]
    continued: int | None = None
    """Key of an earlier block that got one more continuation."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


NO_CHANGES = Changes(Tier.DEVICE, [], [])


class BlockLedger:
    """Live keys of one worker under one pool's namespace; never more than ``capacity`` a tier.

    ``epoch`` grows whenever a set starts anew; ``next_epoch`` makes the numbers.
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
        self._start_anew()

    def __len__(self) -> int:
        return self.count(Tier.DEVICE)

    @property
    def mismatched(self) -> bool:
        """The engine's blocks have another size than the pool's: nothing can be keyed."""
        return self.engine_block_size_tokens != self.block_size_tokens

    def count(self, tier: Tier) -> int:
        """Distinct live keys of a tier."""
        return len(self._tiers[tier])

    def live_keys(self, tier: Tier = Tier.DEVICE) -> Keys:
        """Every live key of a tier once, in no particular order."""
        return self._tiers[tier].live_keys()

    def clear(self, rank: int | None = None) -> None:
        """Forget everything, or all of one rank, and begin a new epoch."""
        others = self._ranks.keys() - {rank}
        if rank is None or not others:
            self._start_anew()
            return
        self.epoch = self._next_epoch()
        for block in self._ranks.pop(rank, {}).values():
            for tier in self._tiers:
                tier.drop_block(block)

    def apply(self, event: KvEvent, rank: int = 0) -> Changes:
        """Take one event of a rank in; tells what changed."""
        if isinstance(event, Cleared):
            self.clear(rank)
            return NO_CHANGES
        blocks = len(event.block_hashes)
        tier = _tier_of(event)
        if tier is None:
            return self._leave_out(Left.MEDIUM, blocks)
        if not self._is_our_group(event):
            return self._leave_out(Left.GROUP, blocks)
        if isinstance(event, Removed):
            return self._remove(event, tier, rank)
        return self._store(event, tier, rank)

    def _leave_out(self, reason: Left, blocks: int) -> Changes:
        if blocks:
            self.left[reason] += blocks
        return NO_CHANGES

    def _start_anew(self) -> None:
        self.epoch = self._next_epoch()
        self.engine_block_size_tokens = self.block_size_tokens
        self.left.clear()
        self._ranks: dict[int, dict[BlockHash, Block]] = {}
        self._tiers = tuple(map(TierKeys, Tier))
        # Removals name only the number of their group, so it is learned from the stores.
        self._group: int | None = None

    def _is_our_group(self, event: Stored | Removed) -> bool:
        group = event.group_idx or 0
        if isinstance(event, Removed):
            return group == (self._group or 0)
        if event.spec_kind not in FULL_ATTENTION:
            return False
        if self._group is None and (event.spec_kind is not None or not group):
            self._group = group
        return group == self._group

    def _store(self, event: Stored, tier: Tier, rank: int) -> Changes:
        known = self._ranks.setdefault(rank, {})
        copies = [known[block_hash] for block_hash in event.block_hashes if block_hash in known]
        if len(copies) == len(event.block_hashes) or not event.token_ids:
            # More copies; an engine that offloads blocks may not repeat their tokens.
            self._leave_out(Left.MALFORMED, len(event.block_hashes) - len(copies))
            return self._enter(copies, tier)
        blocks = self._new_chain(event, tier, rank)
        if isinstance(blocks, Left):
            return self._leave_out(blocks, len(event.block_hashes))
        return self._enter(blocks, tier)

    def _new_chain(self, event: Stored, tier: Tier, rank: int) -> list[Block] | Left:
        """Blocks of the event that can be keyed, from its first one on."""
        if self._is_other_size(event.block_size):
            return Left.BLOCK_SIZE
        start = self._start_of(event, tier, rank)
        if isinstance(start, Left):
            return start
        if len(event.token_ids) != len(event.block_hashes) * self.block_size_tokens:
            return Left.MALFORMED
        usable = _plain_run(event)
        keys = self._keys_of(event, start[1], usable)
        self._leave_out(Left.EXTRA_KEYS, len(event.block_hashes) - usable)
        self._leave_out(Left.MALFORMED, usable - len(keys))
        return self._chain(event.block_hashes, keys, start[0], rank)

    def _is_other_size(self, size: int) -> bool:
        ours = self.block_size_tokens
        if size == ours and not self.mismatched:
            return False
        # A block cut short, as hybrid models have them, is no other block size; neither is
        # the 0 of an event without tokens.
        if not self.mismatched and not (size < ours and (len(self) or not size)):
            # Sticky until the next clear: a mixed engine does not make epochs by the dozen.
            self._start_anew()
            self.engine_block_size_tokens = size
        return True

    def _start_of(self, event: Stored, tier: Tier, rank: int) -> tuple[Block | None, int] | Left:
        """The block before the event's first and the seed of its key."""
        if event.parent_hash is not NO_PARENT:
            parent = self._ranks[rank].get(event.parent_hash)
            return Left.UNKNOWN_PARENT if parent is None else (parent, parent.key)
        if event.lora_id is not None and not event.lora_name:
            return Left.EXTRA_KEYS
        # Offloading engines leave extra keys out of events even where the hash has them.
        if tier is Tier.HOST and event.extra_keys is None:
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

    def _chain(
        self, hashes: list[BlockHash], keys: list[int], parent: Block | None, rank: int
    ) -> list[Block]:
        known = self._ranks[rank]
        new: dict[BlockHash, Block] = {}
        blocks: list[Block] = []
        for block_hash, key in zip(hashes, keys, strict=False):
            block = known.get(block_hash) or new.get(block_hash)
            if block is None:
                block = new[block_hash] = Block(rank, block_hash, key, parent)
            blocks.append(block)
            parent = block
        return blocks

    def _enter(self, blocks: list[Block], tier: Tier) -> Changes:
        tier_keys = self._tiers[tier]
        added: list[int] = []
        is_new = bool(blocks) and blocks[0].is_gone
        for block in blocks:
            if block.is_gone:
                self._ranks[block.rank][block.hash] = block
            if tier_keys.add_copy(block):
                added.append(block.key)
        removed = self._drop_oldest(tier_keys)
        if removed:
            lost = set(removed)
            new = set(added)
            added = [key for key in added if key not in lost]
            removed = [key for key in removed if key not in new]
        parent = blocks[0].parent if is_new else None
        return Changes(tier, added, removed, parent.key if parent else None)

    def _drop_oldest(self, tier_keys: TierKeys) -> list[int]:
        surplus = max(0, tier_keys.blocks - self.capacity)
        removed: list[int] = []
        for _ in range(surplus):
            block = tier_keys.oldest_end()
            if tier_keys.drop_block(block):
                removed.append(block.key)
            self._forget_if_gone(block)
        self._leave_out(Left.CAPACITY, surplus)
        return removed

    def _remove(self, event: Removed, tier: Tier, rank: int) -> Changes:
        known = self._ranks.get(rank, {})
        removed: list[int] = []
        for block_hash in event.block_hashes:
            block = known.get(block_hash)
            # Unknown: left out or dropped earlier.
            if block is None:
                continue
            if self._tiers[tier].drop_copy(block):
                removed.append(block.key)
            self._forget_if_gone(block)
        return Changes(tier, [], removed)

    def _forget_if_gone(self, block: Block) -> None:
        if block.is_gone:
            del self._ranks[block.rank][block.hash]
            # Or every chain ever stored would hang on its last block.
            block.parent = None


def _tier_of(event: Stored | Removed) -> Tier | None:
    if event.locality == "REMOTE":
        return None
    medium = "GPU" if event.medium is None else event.medium.upper()
    if medium in DEVICE_MEDIA:
        return Tier.DEVICE
    return Tier.HOST if medium in HOST_MEDIA else None


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
