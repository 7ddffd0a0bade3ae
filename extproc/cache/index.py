"""``PrefixIndex``: which workers hold how much of a prompt, for all workers in one pass.

A bit-sliced matrix: row = bit position of the pool's Bloom filters, column = worker,
eight columns to a byte. Looking up a prompt gathers the rows of all its keys, ANDs them
over the filter's slices and then along the prefix; only an unbroken run from block 0
counts. A column is the worker's digest plus the overlay of prefixes just routed to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from extproc.cache.digest import (
    DigestShape,
    PackedBits,
    Positions,
    clear_bits,
    set_bits,
    test_bits,
)
from extproc.tokens.blocks import Keys

Runs = npt.NDArray[np.int64]
"""Length of the cached prefix in blocks, shape (columns,)."""

_FIRST_COLUMNS = 8
_FIRST_CHUNK_BLOCKS = 192
"""Blocks looked up first: most prompts in one go (and below 256, so that counts fit a byte)."""
_LAST_CHUNK_BLOCKS = 1_024
_FEW_COLUMNS = 4
"""So few columns are read one by one, out of 78 KB each instead of the whole matrix."""
_STRIDE = 8
"""Of a few columns' long runs, one key in so many is looked up."""
_BIT = (1 << np.arange(8)).astype(np.uint8)
_CHECKPOINT_BLOCKS = 32
"""Distance of the remembered keys of a credited chain."""


class _Column:
    """One worker's bits, and the two generations of keys that the overlay adds to them."""

    __slots__ = (
        "credited",
        "current",
        "current_keys",
        "digest_bits",
        "live_bits",
        "older",
        "older_keys",
        "overlay_bits",
    )

    def __init__(self, num_bytes: int) -> None:
        self.digest_bits = np.zeros(num_bytes, dtype=np.uint8)
        self.live_bits = np.zeros(num_bytes, dtype=np.uint8)
        self.credited: set[int] = set()
        """Some keys of ``current``: with a chained key, all before it are there too."""
        self.current: list[Keys] = []
        self.older: list[Keys] = []
        self.current_keys = 0
        self.older_keys = 0
        self.overlay_bits: PackedBits | None = None
        """Bits of both generations, once somebody has asked for them."""


class PrefixIndex:
    """Digests and overlay of one pool's workers.

    Args:
        shape: size of every filter.
        max_overlay_keys: bound on the overlay of one worker; the older half leaves first.
    """

    def __init__(self, shape: DigestShape, max_overlay_keys: int) -> None:
        self.shape = shape
        self.max_overlay_keys = max_overlay_keys
        self._columns: dict[int, _Column] = {}
        self._free: list[int] = []
        self._matrix = np.zeros((shape.num_bits, _FIRST_COLUMNS // 8), dtype=np.uint8)
        self._words = _as_words(self._matrix)
        self._looked_up: tuple[Keys, Positions] | None = None

    @property
    def width(self) -> int:
        """Columns that the matrix has room for: the length of every ``Runs``."""
        return self._matrix.shape[1] * 8

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of all columns' own bits."""
        overlays = sum(column.overlay_bits is not None for column in self._columns.values())
        return self._matrix.nbytes + (2 * len(self._columns) + overlays) * self.shape.num_bytes

    def add_column(self) -> int:
        """An empty column; the matrix doubles when it is full."""
        number = self._free.pop() if self._free else len(self._columns)
        self.open_column(number)
        return number

    def open_column(self, number: int) -> None:
        """An empty column of a given number, which another index has chosen."""
        while number >= self.width:
            self._matrix = np.hstack([self._matrix, np.zeros_like(self._matrix)])
            self._words = _as_words(self._matrix)
        self._columns[number] = _Column(self.shape.num_bytes)

    def remove_column(self, number: int) -> None:
        """Empty a column and give its number back."""
        self.close_column(number)
        self._free.append(number)

    def close_column(self, number: int) -> None:
        """Empty a column whose number belongs to another index."""
        self.clear(number)
        del self._columns[number]

    def clear(self, number: int) -> None:
        """Forget everything about a worker: digest and overlay."""
        column = self._columns[number]
        column.current, column.older = [], []
        column.credited = set()
        column.current_keys = column.older_keys = 0
        column.overlay_bits = None
        column.digest_bits[:] = 0
        self._replace_live(number, column, np.zeros_like(column.live_bits))

    def replace(self, number: int, bits: bytes) -> None:
        """Put a new digest in a column; the overlay stays until it expires."""
        column = self._columns[number]
        column.digest_bits = np.frombuffer(bits, dtype=np.uint8).copy()
        self._replace_live(number, column, column.digest_bits | self._overlay_bits(column))

    def add_keys(self, number: int, keys: Keys) -> None:
        """Add a delta's keys to the worker's digest."""
        column = self._columns[number]
        positions = self.shape.positions(keys).reshape(-1)
        set_bits(column.digest_bits, positions)
        self._set(number, column, positions)

    def clear_bits(self, number: int, positions: npt.NDArray[np.int64]) -> None:
        """Clear bits of the worker's digest; what the overlay holds stays until it expires."""
        column = self._columns[number]
        clear_bits(column.digest_bits, positions)
        if column.current or column.older:
            positions = positions[~test_bits(self._overlay_bits(column), positions)]
        clear_bits(column.live_bits, positions)
        self._matrix[positions, number >> 3] &= np.uint8(~(1 << (number & 7)) & 0xFF)

    def overlay(self, number: int, keys: Keys) -> None:
        """Credit a worker with keys just routed to it, for one to two generations."""
        column = self._columns[number]
        start, end = _already(keys, column.credited), len(keys)
        if start == end:
            return
        if column.current_keys + end - start > self.max_overlay_keys // 2:
            self._rotate(number, column)
            # The new generation has nothing of this chain yet.
            start, end = 0, min(end, self.max_overlay_keys // 2)
        fresh = keys[start:end]
        column.credited.update(fresh[_CHECKPOINT_BLOCKS - 1 :: _CHECKPOINT_BLOCKS].tolist())
        column.credited.add(int(fresh[-1]))
        column.current.append(fresh)
        column.current_keys += len(fresh)
        positions = self._positions(keys, start, end).reshape(-1)
        if column.overlay_bits is not None:
            set_bits(column.overlay_bits, positions)
        self._set(number, column, positions)

    def age_overlay(self, number: int) -> None:
        """End a generation: keys routed before the previous call lose their credit."""
        self._rotate(number, self._columns[number])

    def overlay_keys(self, number: int) -> int:
        """Keys in a worker's overlay, repeats counted."""
        column = self._columns[number]
        return column.current_keys + column.older_keys

    def digest_fill(self, number: int) -> float:
        """Share of the digest's bits that are set, 0 to 1."""
        return int(np.bitwise_count(self._columns[number].digest_bits).sum()) / self.shape.num_bits

    def longest_runs(self, keys: Keys) -> Runs:
        """Blocks of the prompt's prefix that each column holds, unbroken from block 0.

        Chunks grow while somebody holds all of them; where a run ends is looked for only in
        chunks in which one does. The last few columns of a long prompt are followed in their
        own bits, one key in eight: a gap of fewer keys may be passed over.
        """
        if not len(keys):
            return np.zeros(self.width, dtype=np.int64)
        positions = self.shape.positions(keys[:_FIRST_CHUNK_BLOCKS])
        self._looked_up = keys, positions
        held = self._held(positions)
        np.bitwise_and.accumulate(held, axis=0, out=held)
        runs: Runs = _bits_of(held).sum(axis=0, dtype=np.uint8).astype(np.int64)
        alive, start, size = held[-1], _FIRST_CHUNK_BLOCKS, 2 * _FIRST_CHUNK_BLOCKS
        while start < len(keys):
            columns = np.flatnonzero(_bits_of(alive))
            if not len(columns):
                break
            if len(columns) <= _FEW_COLUMNS:
                self._follow(columns.tolist(), keys[start:], runs)
                break
            held = self._held(self.shape.positions(keys[start : start + size]))
            lasting = np.bitwise_and.reduce(held, axis=0) & alive
            if (lasting == alive).all():
                runs[columns] += len(held)
            else:
                held[0] &= alive
                np.bitwise_and.accumulate(held, axis=0, out=held)
                runs += _bits_of(held).sum(axis=0, dtype=np.uint16)
            alive, start, size = lasting, start + size, min(4 * size, _LAST_CHUNK_BLOCKS)
        return runs

    def held(self, keys: Keys, width: int) -> npt.NDArray[np.uint8]:
        """1 for each key that a column holds, shape (keys, width)."""
        bits = _bits_of(self._held(self.shape.positions(keys)))
        return np.pad(bits, ((0, 0), (0, width - bits.shape[1])))

    def _held(self, positions: Positions) -> npt.NDArray[np.generic]:
        """Rows of the keys at these positions over all columns, shape (keys, words)."""
        held: npt.NDArray[np.generic] = np.bitwise_and.reduce(
            self._words.take(positions.T, axis=0), axis=0
        )
        return held

    def _positions(self, keys: Keys, start: int, end: int) -> Positions:
        """Of some of a prompt's keys: most often its lookup has just made them."""
        if self._looked_up is not None:
            looked_up, positions = self._looked_up
            if looked_up is keys and end <= len(positions):
                return positions[start:end]
        return self.shape.positions(keys[start:end])

    def _follow(self, columns: list[int], keys: Keys, runs: Runs) -> None:
        """Lengthen the runs of a few columns, each looked up in its own bits.

        One key in :data:`_STRIDE` is, and all of them where a run ends. Caches evict the end of
        a prefix before its start, and those that drop what is out of a window leave wider gaps.
        """
        samples = keys[_STRIDE - 1 :: _STRIDE]
        for start in range(0, len(samples), _LAST_CHUNK_BLOCKS):
            chunk = samples[start : start + _LAST_CHUNK_BLOCKS]
            for number, held in self._held_by(columns, chunk):
                length = int(held.argmin())
                if held[length]:
                    runs[number] += _STRIDE * len(held)
                else:
                    columns.remove(number)
                    end = _STRIDE * (start + length)
                    runs[number] += _STRIDE * length
                    self._follow_to_end(number, keys[end : end + _STRIDE], runs)
            if not columns:
                return
        for number in columns:
            self._follow_to_end(number, keys[_STRIDE * len(samples) :], runs)

    def _follow_to_end(self, number: int, keys: Keys, runs: Runs) -> None:
        for _, held in self._held_by([number], keys) if len(keys) else ():
            length = int(held.argmin())
            runs[number] += len(held) if held[length] else length

    def _held_by(self, columns: list[int], keys: Keys) -> list[tuple[int, npt.NDArray[np.bool_]]]:
        """Which of the keys each column holds."""
        slices = self.shape.positions(keys).T
        octets, bits = slices >> 3, _BIT.take(slices & 7)
        return [
            (number, np.logical_and.reduce(self._columns[number].live_bits.take(octets) & bits))
            for number in columns
        ]

    def _set(self, number: int, column: _Column, positions: npt.NDArray[np.int64]) -> None:
        set_bits(column.live_bits, positions)
        self._matrix[positions, number >> 3] |= np.uint8(1 << (number & 7))

    def _rotate(self, number: int, column: _Column) -> None:
        """The older generation ends, the current one becomes the older."""
        ended = column.older
        column.older, column.current = column.current, []
        column.credited = set()
        column.older_keys, column.current_keys = column.current_keys, 0
        if not ended:
            return
        left = self._bits(column.older)
        if column.overlay_bits is not None:
            column.overlay_bits = left
        still = column.digest_bits | left
        gone = self._bits(ended) & ~still & column.live_bits
        self._replace_live(number, column, column.live_bits ^ gone)

    def _overlay_bits(self, column: _Column) -> PackedBits:
        if column.overlay_bits is None:
            column.overlay_bits = self._bits(column.current + column.older)
        return column.overlay_bits

    def _bits(self, generation: list[Keys]) -> PackedBits:
        flags = np.zeros(self.shape.num_bytes * 8, dtype=bool)
        for keys in generation:
            flags[self.shape.positions(keys)] = True
        return np.packbits(flags, bitorder="little")

    def _replace_live(self, number: int, column: _Column, live: PackedBits) -> None:
        """Write only the rows that differ: most digests change little between snapshots."""
        changed = np.unpackbits(column.live_bits ^ live, bitorder="little")
        rows = np.flatnonzero(changed[: self.shape.num_bits])
        self._matrix[rows, number >> 3] ^= np.uint8(1 << (number & 7))
        column.live_bits = live


def joint_runs(keys: Keys, device: PrefixIndex, host: PrefixIndex) -> Runs:
    """Like ``longest_runs``, where each block may be in either of two tiers."""
    width = device.width
    runs = np.zeros(width, dtype=np.int64)
    alive = np.ones(width, dtype=np.uint8)
    for start in range(0, len(keys), _FIRST_CHUNK_BLOCKS):
        chunk = keys[start : start + _FIRST_CHUNK_BLOCKS]
        held = device.held(chunk, width) | host.held(chunk, width)
        held[0] &= alive
        np.bitwise_and.accumulate(held, axis=0, out=held)
        runs += held.sum(axis=0, dtype=np.uint8)
        alive = held[-1]
        if not alive.any():
            break
    return runs


def _already(keys: Keys, credited: set[int]) -> int:
    """How many of the first keys are known to be in the generation."""
    if not credited:
        return 0
    for end in range(len(keys), 0, -_FIRST_CHUNK_BLOCKS):
        last_first: list[int] = keys[max(0, end - _FIRST_CHUNK_BLOCKS) : end][::-1].tolist()
        last = next(filter(credited.__contains__, last_first), None)
        if last is not None:
            return end - last_first.index(last)
    return 0


def _as_words(matrix: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
    """The same memory in the widest words that fit a row: fewer, larger AND operations."""
    for word in (np.uint64, np.uint32, np.uint16):
        if matrix.shape[1] % np.dtype(word).itemsize == 0:
            return matrix.view(word)
    return matrix


def _bits_of(words: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Bits along the last axis, lowest column first."""
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
