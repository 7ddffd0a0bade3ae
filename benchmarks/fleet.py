"""A scheduler with workers whose digests hold realistic content, built in process.

The workers are the policy's static ones, so they are always ready; each sends a snapshot, as
its agent would. Digests hold random keys and, on some workers, the prefixes that a benchmark
asks for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.chats import MODEL
from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest
from extproc.cache.feed import Snapshot
from extproc.decision.ticket import ServedModel
from extproc.policy import Policy, PoolPolicy
from extproc.scheduler import Scheduler
from extproc.server import build_keyer
from extproc.tokens.blocks import Keys
from extproc.tokens.keyer import PromptKeyer

DIGEST_KEYS = 30_000
_DISTINCT_FILLS = 32
"""Workers beyond this many repeat the random keys of earlier ones: making keys is slow."""


@dataclass(frozen=True)
class Held:
    """A prefix that the first ``workers`` of a shuffled fleet have in their digests."""

    keys: Keys
    workers: int


@dataclass
class Fleet:
    """A scheduler, its one pool and its keyer, at the time ``now`` (seconds)."""

    policy: Policy
    scheduler: Scheduler
    served: ServedModel
    now: float = 1_000.0


def make_policy(model_dir: Path) -> Policy:
    """Defaults throughout, with one pool."""
    return Policy(pools=(PoolPolicy(model=MODEL, tokenizer=model_dir),))


def make_fleet(
    policy: Policy,
    workers: int,
    held: Sequence[Held],
    rng: random.Random,
    keyer: PromptKeyer | None = None,
    digest_keys: int = DIGEST_KEYS,
) -> Fleet:
    """A pool of ready workers.

    Args:
        keyer: one whose caches are to be kept.
        digest_keys: random keys in each digest, besides the held prefixes.
    """
    addresses = tuple(f"10.0.{number >> 8}.{number & 255}:8000" for number in range(workers))
    pool = policy.pools[0].model_copy(update={"workers": addresses})
    policy = policy.model_copy(update={"pools": (pool,)})
    keyer = keyer or build_keyer(pool, policy)
    scheduler = Scheduler(policy, {pool.model: keyer}, rng, 0.0)
    fleet = Fleet(policy, scheduler, scheduler.models[pool.model])
    random_keys = np.random.default_rng(rng.getrandbits(32))
    size = (min(workers, _DISTINCT_FILLS), digest_keys)
    fills = random_keys.integers(0, 2**64, size=size, dtype=np.uint64)
    owners = [set(rng.sample(range(workers), min(each.workers, workers))) for each in held]
    for number, address in enumerate(addresses):
        prefixes = [h.keys for h, own in zip(held, owners, strict=True) if number in own]
        keys = np.concatenate([fills[number % len(fills)], *prefixes])
        worker = fleet.served.pool.workers[address]
        snapshot = _snapshot(fleet.served, np.unique(keys))
        scheduler.snapshot(fleet.served, worker, snapshot, fleet.now)
    return fleet


def _snapshot(served: ServedModel, keys: Keys) -> Snapshot:
    pool = served.pool.policy
    digest = BlockDigest(pool.digest.capacity_blocks, pool.digest.error_rate)
    digest.add_keys(keys)
    return snapshot_of(digest, pool.block_size_tokens, sequence=1)


def snapshot_of(digest: BlockDigest, block_size_tokens: int, sequence: int) -> Snapshot:
    """A whole digest as an agent would send it, of an engine's first life."""
    return Snapshot(
        version=WIRE_VERSION,
        epoch=1,
        sequence=sequence,
        block_size_tokens=block_size_tokens,
        capacity=digest.shape.capacity,
        error_rate=digest.shape.error_rate,
        num_slices=digest.shape.num_slices,
        bits_per_slice=digest.shape.bits_per_slice,
        hash_name=HASH_NAME,
        count=digest.count,
        bits=digest.packed(),
        checksum=digest.checksum(),
    )
