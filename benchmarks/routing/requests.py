"""Requests of the Mooncake traces: block keys and lengths, without texts."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import typer

from extproc.tokens.blocks import Keys

BLOCK_TOKENS = 512
CLUMP_S = 3.0
TRACES = {"conversation": "mooncake_conversation.jsonl", "synthetic": "mooncake_synthetic.jsonl"}
TRACES_FOLDER = Path(__file__).parents[3] / "shared" / "traces"


class Row(msgspec.Struct):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: arrival in seconds, lengths in tokens, keys of its full blocks."""

    arrives_at: float
    prompt_tokens: int
    output_tokens: int
    keys: Keys


class BlockCache:
    """An LRU of block keys: those asked for longest ago leave first, a prompt's end before its
    beginning."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def serve(self, keys: Sequence[int]) -> tuple[int, list[int]]:
        """Leading blocks of a prompt that were there, and the keys that it pushed out."""
        found = next((n for n, key in enumerate(keys) if key not in self._keys), len(keys))
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        over = max(0, len(self._keys) - self.blocks)
        return found, [self._keys.popitem(last=False)[0] for _ in range(over)]

    @property
    def keys(self) -> Keys:
        """What is cached."""
        return np.fromiter(self._keys, dtype=np.uint64, count=len(self._keys))


def load_traces(folder: Path, rows: int, seed: int) -> dict[str, list[Request]]:
    """The first rows of every trace that the folder has, by name.

    Raises:
        typer.BadParameter: it has none.
    """
    traces = {
        name: load_trace(folder / file, rows, seed)
        for name, file in TRACES.items()
        if (folder / file).exists()
    }
    if not traces:
        raise typer.BadParameter(f"no trace in {folder}")
    return traces


def load_trace(path: Path, rows: int, seed: int) -> list[Request]:
    """The first rows of a trace, clumps spread over their 3 s, in order of arrival."""
    rng = random.Random(seed)
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as lines:
        read = [decoder.decode(line) for _, line in zip(range(rows), lines, strict=False)]
    stamps = {row.timestamp for row in read}
    clumped = 2 * len(stamps) < len(read)
    return sorted(
        (_request(row, rng.random() * CLUMP_S if clumped else 0.0) for row in read),
        key=lambda request: request.arrives_at,
    )


def one_cache_hit_ratio(requests: Sequence[Request], blocks: int) -> float:
    """Token hit ratio of one LRU of so many blocks that serves everything.

    What routing could reach with the memory of a whole pool if no block were there twice.
    """
    cache = BlockCache(blocks)
    cached = 0
    for request in requests:
        found, _ = cache.serve(request.keys.tolist())
        cached += min(found * BLOCK_TOKENS, request.prompt_tokens - 1)
    return cached / sum(request.prompt_tokens for request in requests)


def _request(row: Row, spread_s: float) -> Request:
    full = (row.input_length - 1) // BLOCK_TOKENS
    ids = np.array(row.hash_ids[:full], dtype=np.uint64) + np.uint64(1)
    keys = ids * np.uint64(0x9E3779B97F4A7C15)
    keys ^= keys >> np.uint64(32)
    keys *= np.uint64(0xD6E8FEB86659FD93)
    return Request(row.timestamp / 1_000 + spread_s, row.input_length, row.output_length, keys)
