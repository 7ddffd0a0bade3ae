"""Block keys: one 64-bit number for a KV block and everything before it.

``root = xxh3_64(namespace, block size, adapter, salt)`` and
``key_i = xxh3_64(token ids of block i as uint32-LE, seed = key_{i-1})``. The scheduler
derives keys from the tokens it makes, the agent from the tokens in the engine's KV
events, so the engine's own hash algorithm and seed never matter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Keys = npt.NDArray[np.uint64]
"""Chained block keys, shape (blocks,), first block first."""
TokenIds = npt.NDArray[np.uint32]
"""Token ids, shape (tokens,)."""

TOKEN_BYTES = 4


def key_namespace(model_revision: str, tokenizer_fingerprint: str) -> int:
    """64-bit namespace shared by a pool's scheduler and agents."""
    return xxh3_64_intdigest(_framed((model_revision, tokenizer_fingerprint)))


def root_key(namespace: int, block_size_tokens: int, adapter: str = "", salt: str = "") -> int:
    """Seed of the chain; differs for every adapter and every ``cache_salt``."""
    head = struct.pack("<QI", namespace, block_size_tokens)
    return xxh3_64_intdigest(head + _framed((adapter, salt)))


def chain_keys(parent: int, token_bytes: bytes | memoryview, block_size_tokens: int) -> list[int]:
    """Keys of the full blocks in ``token_bytes`` (uint32-LE), continuing from ``parent``.

    A trailing partial block has no key.
    """
    step = block_size_tokens * TOKEN_BYTES
    view = memoryview(token_bytes)
    keys: list[int] = []
    append = keys.append
    key = parent
    for start in range(0, len(view) - step + 1, step):
        key = xxh3_64_intdigest(view[start : start + step], key)
        append(key)
    return keys


def block_keys(root: int, token_ids: Iterable[int] | TokenIds, block_size_tokens: int) -> Keys:
    """Keys that an engine can reuse for this whole prompt.

    The engine always computes the prompt's last token, so a prompt whose length is a
    multiple of the block size has one reusable block fewer than it has full blocks.
    """
    ids = np.asarray(token_ids, dtype="<u4")
    usable = reusable_blocks(len(ids), block_size_tokens)
    view = memoryview(ids.tobytes())[: usable * block_size_tokens * TOKEN_BYTES]
    return np.array(chain_keys(root, view, block_size_tokens), dtype=np.uint64)


def reusable_blocks(prompt_tokens: int, block_size_tokens: int) -> int:
    """Full blocks of a prompt that a cache can serve: all but the one of the last token."""
    return max(0, prompt_tokens - 1) // block_size_tokens


def _framed(parts: Iterable[str]) -> bytes:
    # Length prefixes keep ("ab", "c") and ("a", "bc") apart.
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    return b"".join(struct.pack("<I", len(part)) + part for part in encoded)
