"""``Boundaries``: key chains remembered by the text that they cover, up to a special token.

Of a growing conversation only what is new is looked at. Its older part is found without
reading it token by token: chains of texts that start with the same 16, 64, 256 ... KB are
listed by the digest of that start, so a few digests tell how far a long text is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from extproc.tokens.blocks import Keys
from extproc.tokens.cache import ByteBoundedLru

NO_KEYS: Keys = np.empty(0, dtype=np.uint64)
ENTRY_OVERHEAD_BYTES = 200
"""Dict entry, digest key and array header of one cached segment or boundary."""
FIRST_LANDMARK_BYTES = 16_384
"""Shorter texts are read whole: that is as fast."""
_LANDMARK_FACTOR = 4
_MAX_ENDS = 8
"""Ends remembered behind one landmark, the newest: branches of one conversation."""
_END_BYTES = 40
_ENDS_SHARE = 32
"""Part of the cache's bytes that the lists of ends may take beside it."""

Span: TypeAlias = tuple[int, int]


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
    its end. ``ids``: uint32-LE, None for a text that must be tokenised. ``end``: of a special
    token, bytes of the text up to its end.
    """

    digest: bytes
    ids: bytes | None
    special: bool
    end: int = 0


class Landmark(NamedTuple):
    """A place that texts pass on their way, and the digest of all text before it."""

    end: int
    digest: bytes


class Known(NamedTuple):
    """How far a text is known, and the special tokens behind that.

    ``digests``: of root, prefix and the whole text up to the end of each span.
    """

    boundary: Boundary | None
    end: int
    spans: list[Span]
    digests: list[bytes]
    landmarks: list[Landmark]


class Boundaries:
    """Remembered chains within ``max_bytes``, least recently used first out."""

    def __init__(self, max_bytes: int) -> None:
        self.cache: ByteBoundedLru[bytes, Boundary] = ByteBoundedLru(max_bytes)
        self._ends: ByteBoundedLru[bytes, tuple[int, ...]] = ByteBoundedLru(
            max_bytes // _ENDS_SHARE
        )

    @property
    def size_bytes(self) -> int:
        """What chains and the lists of their ends take."""
        return self.cache.bytes + self._ends.bytes

    def known(
        self,
        root: int,
        prefix: bytes,
        data: bytes,
        spans_from: Callable[[int], list[Span]],
        *,
        may_leap: bool = True,
    ) -> Known:
        """The longest remembered chain of a text.

        Args:
            prefix: ids ahead of the text. They go into the digests' seed, where no text can
                look like them.
            spans_from: special tokens from a place on at which one has ended before.
            may_leap: those are the ones that are found from the beginning.
        """
        hasher = xxh3_128(seed=xxh3_64_intdigest(prefix, root))
        landmarks, leap = self._leap(hasher, data) if may_leap else ([], None)
        boundary, start, hasher = leap or (None, 0, hasher)
        spans = spans_from(start)
        digests = _digests(hasher, data, start, spans)
        for index in range(len(digests) - 1, -1, -1):
            found = self.cache.get(digests[index])
            if found is not None:
                end = spans[index][1]
                self._list(landmarks, end)
                rest = index + 1
                return Known(found, end, spans[rest:], digests[rest:], landmarks)
        return Known(boundary, start, spans, digests, landmarks)

    def remember(self, landmarks: list[Landmark], piece: Piece, boundary: Boundary) -> None:
        """Keep the chain that ends with a special token."""
        self.cache.put(piece.digest, boundary, boundary.size_bytes)
        self._list(landmarks, piece.end)

    def _leap(
        self, hasher: xxh3_128, data: bytes
    ) -> tuple[list[Landmark], tuple[Boundary, int, xxh3_128] | None]:
        """The text's landmarks, and the chain of its farthest listed end with that end and the
        hasher there."""
        landmarks: list[Landmark] = []
        states: list[xxh3_128] = []
        view, passing = memoryview(data), hasher.copy()
        start, stop = 0, FIRST_LANDMARK_BYTES
        while stop <= len(data):
            passing.update(view[start:stop])
            landmarks.append(Landmark(stop, passing.digest()))
            states.append(passing.copy())
            start, stop = stop, stop * _LANDMARK_FACTOR
        for landmark, state in zip(reversed(landmarks), reversed(states), strict=True):
            found, start = None, landmark.end
            for end in sorted(self._ends.get(landmark.digest) or ()):
                if end > len(data):
                    break
                state.update(view[start:end])
                start = end
                boundary = self.cache.get(state.digest())
                if boundary is not None:
                    found = boundary, end, state.copy()
            if found is not None:
                return landmarks, found
        return landmarks, None

    def _list(self, landmarks: list[Landmark], end: int) -> None:
        """A chain ends here: texts that pass the last landmark before it may go on from it."""
        for landmark in reversed(landmarks):
            if landmark.end <= end:
                ends = self._ends.get(landmark.digest) or ()
                kept = (*(other for other in ends if other != end), end)[-_MAX_ENDS:]
                self._ends.put(landmark.digest, kept, ENTRY_OVERHEAD_BYTES + _END_BYTES * len(kept))
                return


def _digests(hasher: xxh3_128, data: bytes, start: int, spans: list[Span]) -> list[bytes]:
    """Digest of all text up to the end of each span; the hasher has read up to ``start``."""
    update, digest, view = hasher.update, hasher.digest, memoryview(data)
    digests = []
    for _, end in spans:
        update(view[start:end])
        digests.append(digest())
        start = end
    return digests
