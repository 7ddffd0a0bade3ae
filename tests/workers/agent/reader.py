"""A scheduler's side of digests: what it believes after what it has heard."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.cache.digest import DigestShape
from extproc.cache.feed import Delta, DigestFeed, Snapshot
from extproc.cache.index import PrefixIndex
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.tokens.blocks import Keys

SNAPSHOT_FIELDS = tuple(Snapshot.__dataclass_fields__)


class Reader:
    """The column of one worker's tier, fed by the real feed and index."""

    def __init__(
        self,
        capacity: int,
        error_rate: float = 0.01,
        block_size_tokens: int = 4,
        tier: int = agent_pb2.TIER_DEVICE,
    ) -> None:
        self.index = PrefixIndex(DigestShape(capacity, error_rate), 10)
        self.feed = DigestFeed(self.index, self.index.add_column(), block_size_tokens)
        self.tier = tier
        self.bytes = 0

    def hear(self, messages: Iterable[agent_pb2.AgentMessage]) -> Reader:
        """Apply digest messages in order; an unfit one fails the test."""
        for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "snapshot" and message.snapshot.tier == self.tier:
                told = {name: getattr(message.snapshot, name) for name in SNAPSHOT_FIELDS}
                assert self.feed.apply_snapshot(Snapshot(**told), 0.0)
            elif kind == "delta" and message.delta.tier == self.tier:
                delta = message.delta
                fields = (delta.added_keys, delta.cleared_bits, delta.removed_keys)
                self.feed.apply_delta(Delta(delta.epoch, delta.sequence, *fields), 0.0)
            self.bytes += message.ByteSize()
        return self

    def held(self, keys: Keys) -> int:
        """Keys that the scheduler believes in, each on its own."""
        return sum(int(self.index.longest_runs(keys[at : at + 1])[0]) for at in range(len(keys)))

    def holds(self, keys: Keys) -> bool:
        """Whether it believes in all of them."""
        return self.held(keys) == len(keys)
