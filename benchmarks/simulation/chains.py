"""Block keys of planned prompts, made from segment ids in place of token ids.

Scheduler and engines are given the same keys, so nothing is tokenised and nothing hashed
twice. Two prompts have a key in common exactly if they begin with the same segments up to the
end of that block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from benchmarks.workloads.plan import Segment, SegmentId
from workers.simulator.chain import TokenChain

_PIECE = struct.Struct("<QII")
_CACHED_RUNS = 65_536
_ROOT = 0

_Run = tuple[tuple[int, ...], int, bytes]
"""Keys of the blocks that a segment fills, the last key, and what the open block holds."""


class KeyMaker:
    """Keys for one block size; runs of a shared segment are made once while they are cached."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._run = lru_cache(_CACHED_RUNS)(self._make_run)

    def keys(self, prompt: Sequence[Segment]) -> list[int]:
        """Keys of all full blocks of a prompt."""
        keys: list[int] = []
        parent, held, filled = _ROOT, b"", 0
        for segment in prompt:
            run, parent, held = self._run(parent, held, filled, segment.id, segment.tokens)
            keys += run
            filled = (filled + segment.tokens) % self._block_tokens
        return keys

    def _make_run(
        self, parent: int, held: bytes, filled: int, segment_id: SegmentId, tokens: int
    ) -> _Run:
        code = xxh3_64_intdigest(repr(segment_id).encode())
        size = self._block_tokens
        keys = []
        done = 0
        while filled + tokens - done >= size:
            taken = size - filled
            held += _PIECE.pack(code, done, taken)
            parent = xxh3_64_intdigest(held, parent)
            keys.append(parent)
            done += taken
            held, filled = b"", 0
        if done < tokens:
            held += _PIECE.pack(code, done, tokens - done)
        return tuple(keys), parent, held


class PlannedChain(TokenChain):
    """A sequence whose prompt blocks have known keys; its answer's blocks are nobody else's.

    Args:
        number: tells this sequence's answer from all others.
    """

    __slots__ = ("_number", "_tokens")

    def __init__(self, keys: Sequence[int], tokens: int, block_size: int, number: int) -> None:
        super().__init__(b"", block_size)
        self.hashes = [_ROOT, *keys]
        self._tokens = tokens
        self._number = number

    def __len__(self) -> int:
        return self._tokens

    def block_hashes(self, first: int, last: int) -> list[int]:
        """Keys of the blocks from ``first`` up to but without ``last``."""
        hashes = self.hashes
        while len(hashes) <= last:
            own = _PIECE.pack(self._number, len(hashes), 0)
            hashes.append(xxh3_64_intdigest(own, hashes[-1]))
        return hashes[first + 1 : last + 1]

    def block_bytes(self, _first: int, _last: int | None = None) -> memoryview:
        """Nothing: there are no token ids."""
        return memoryview(b"")
