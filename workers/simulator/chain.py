"""The tokens of one sequence and the chained hashes of its full blocks.

A hash covers a block's tokens and, through its parent, everything before it; adapter and
``cache_salt`` are rooted in the first parent. The hashes are this engine's own: a gateway
that wants keys must derive them from the tokens in the KV events, as with vLLM.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """What beside its tokens keeps a sequence's blocks apart, and what its events say."""

    adapter: str | None = None
    adapter_id: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None

    def root(self, seed: int) -> int:
        """Parent hash of block 0."""
        parts = [(part or "").encode() for part in (self.adapter, self.cache_salt)]
        framed = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        return xxh3_64_intdigest(b"simulated engine" + framed, seed)


BASE = Origin()
"""Base model, no salt."""


class TokenChain:
    """Token ids, prompt first and then the answer to come, hashed block by block on demand.

    Args:
        token_bytes: ids as uint32-LE.
        seed: the engine's hash seed; engines with different seeds share no hash.
    """

    __slots__ = ("_bytes", "block_size", "hashes", "origin")

    def __init__(
        self, token_bytes: bytes, block_size: int, origin: Origin = BASE, seed: int = 0
    ) -> None:
        self._bytes = memoryview(token_bytes)
        self.block_size = block_size
        self.origin = origin
        self.hashes: list[int] = [origin.root(seed)]

    @classmethod
    def of(
        cls, token_ids: Sequence[int], block_size: int, origin: Origin = BASE, seed: int = 0
    ) -> TokenChain:
        """The chain of these ids."""
        return cls(pack_ids(token_ids), block_size, origin, seed)

    def __len__(self) -> int:
        return len(self._bytes) // TOKEN_BYTES

    def block_hashes(self, first: int, last: int) -> list[int]:
        """Hashes of the blocks from ``first`` up to but without ``last``."""
        hashes = self.hashes
        while len(hashes) <= last:
            hashes.append(xxh3_64_intdigest(self.block_bytes(len(hashes) - 1), hashes[-1]))
        return hashes[first + 1 : last + 1]

    def parent_hash(self, block: int) -> int | None:
        """Hash that the block hangs from; None for the first, as in vLLM's events."""
        return self.hashes[block] if block else None

    def block_bytes(self, first: int, last: int | None = None) -> memoryview:
        """Token ids of block ``first``, or of the blocks up to ``last``, as uint32-LE."""
        step = self.block_size * TOKEN_BYTES
        return self._bytes[first * step : (first + 1 if last is None else last) * step]


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as uint32-LE."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(token_bytes: bytes | memoryview) -> list[int]:
    """Token ids from uint32-LE."""
    return list(struct.unpack(f"<{len(token_bytes) // TOKEN_BYTES}I", token_bytes))
