"""Parts of a prompt's key chain, and the digests under which a chain is remembered."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from extproc.tokens.blocks import Keys

NO_KEYS: Keys = np.empty(0, dtype=np.uint64)
ENTRY_OVERHEAD_BYTES = 200
"""Dict entry, digest key and array header of one cached segment or boundary."""


class Boundary(msgspec.Struct, frozen=True):
    """The key chain after some segment: keys of all full blocks and the bytes behind them."""

    keys: Keys
    tail: bytes

    @property
    def size_bytes(self) -> int:
        """What it takes in a cache."""
        return self.keys.nbytes + len(self.tail) + ENTRY_OVERHEAD_BYTES


NOTHING = Boundary(NO_KEYS, b"")


class Piece(NamedTuple):
    """Text or one special token behind the known boundary.

    ``digest``: of a text, under which its ids are kept; of a special token, of all text up to
    its end. ``ids``: uint32-LE, None for a text that must be tokenised.
    """

    digest: bytes
    ids: bytes | None
    special: bool


def prefix_digests(
    root: int, prefix: bytes, data: bytes, spans: list[tuple[int, int]]
) -> list[bytes]:
    """Digest of root, prefix and the whole text up to the end of each span.

    The prefix is ids, not text: it goes into the seed, where no text can look like it.
    """
    hasher = xxh3_128(seed=xxh3_64_intdigest(prefix, root))
    update, digest, view = hasher.update, hasher.digest, memoryview(data)
    digests = []
    start = 0
    for _, end in spans:
        update(view[start:end])
        digests.append(digest())
        start = end
    return digests
