"""Cost terms: small pure functions over arrays, one value a worker, lowest is best.

Unless a term says otherwise its unit is *tokens of prefill work*; weights turn the others
into it. What a worker has not told is the pool's mean by the time it comes here, never zero.
None is nothing for anybody: a decision over a few workers costs as many microseconds as it
touches arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from extproc.fleet.table import Bools, Floats, Ints, WorkerTable
from extproc.policy import Term

_HASH_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""The multipliers of splitmix64's finaliser."""


class Places(msgspec.Struct, frozen=True):
    """Where a request is at home.

    Attributes:
        last, session: columns of the conversation's and the session's last worker, or -1.
        adapter_loaded: workers that have the request's adapter; None if it needs none.
        hash_key: of its session or of its prompt's beginning; None if it has neither.
        hash_max_load: bound on a worker's share for consistent hashing.
    """

    last: int = -1
    session: int = -1
    adapter_loaded: Bools | None = None
    hash_key: int | None = None
    hash_max_load: float = 1.25


class Candidates(msgspec.Struct, frozen=True):
    """One request against all workers: what the terms read.

    Attributes:
        prompt_tokens: of all its prompts.
        output_tokens: what it is expected to generate, 0 if unknown.
        cached: prompt tokens that count as cached, by worker.
        running: requests on each worker, a new worker's discounted.
        pending_prefill: tokens without a first token on each, discounted likewise.
        new: workers that are new among older ones; None if there are none.
        slow, pressed, zoned: whether slowness, KV pressure, zones differ from nothing.
    """

    table: WorkerTable
    usable: Bools
    prompt_tokens: int
    output_tokens: int
    cached: Floats
    running: Floats | Ints
    pending_prefill: Floats | Ints
    new: Bools | None
    places: Places = Places()
    slow: bool = True
    pressed: bool = True
    zoned: bool = True


def uncached(request: Candidates) -> Floats:
    """Prompt tokens that the worker would have to compute."""
    return request.prompt_tokens - request.cached


def pending_prefill(request: Candidates) -> Floats | Ints:
    """Tokens sent to the worker whose requests have no first token yet."""
    return request.pending_prefill


def running(request: Candidates) -> Floats | Ints:
    """Requests running or waiting on the worker; unit: requests."""
    return request.running


def queued_tokens(request: Candidates) -> Floats | Ints:
    """Prompt tokens to compute and output tokens to generate that we have there."""
    return request.pending_prefill + request.table.output_tokens


def recent_work(request: Candidates) -> Floats:
    """Uncached tokens sent there in the last minute: what pushes out what is cached."""
    return request.table.recent_tokens


def slow_prefill(request: Candidates) -> Floats | None:
    """Extra time of the prefills on a much slower worker, in the pool's mean tokens."""
    if not request.slow:
        return None
    work = request.pending_prefill + uncached(request)
    extra: Floats = work * np.maximum(0.0, request.table.slowness - 1.0)
    return extra


def finish(request: Candidates) -> Floats:
    """When the request would finish: prefills before it and its own, then its output."""
    table = request.table
    work = (request.pending_prefill + uncached(request)) * table.slowness
    tpot_s, rate = table.filled(table.tpot_s), table.mean(table.prefill_tokens_per_s)
    if tpot_s is None or rate is None:
        return work
    return work + request.output_tokens * tpot_s * rate


def kv_pressure(request: Candidates) -> Floats | None:
    """KV use beyond 80%, 0 to 1: what comes there pushes running requests out."""
    return request.table.kv_pressure if request.pressed else None


def health(request: Candidates) -> Floats:
    """``100 / score - 1``: nothing for a healthy worker, 1 at 50, 9 at 10."""
    odds: Floats = 100.0 / np.maximum(request.table.health_base, 1.0) - 1.0
    return odds


def health_loss(request: Candidates) -> Floats:
    """Points missing from a score of 100."""
    return 100.0 - request.table.health_base


def load(request: Candidates) -> Floats:
    """Share of the worker's slots in use, 0 to 1."""
    share: Floats = request.running / np.maximum(request.table.slots, 1)
    return share


def miss_share(request: Candidates) -> Floats:
    """Share of the prompt that the worker would have to compute, 0 to 1."""
    share: Floats = uncached(request) / max(1, request.prompt_tokens)
    return share


def prefix_locality(request: Candidates) -> Floats:
    """Cached tokens, as a gain."""
    return -request.cached


def switch(request: Candidates) -> Floats | None:
    """1 for every worker but the conversation's last."""
    return _elsewhere(request, request.places.last)


def session(request: Candidates) -> Floats | None:
    """1 for every worker but the session's last."""
    return _elsewhere(request, request.places.session)


def adapter_cold(request: Candidates) -> Floats | None:
    """1 where the request's adapter would have to be loaded first."""
    if request.places.adapter_loaded is None:
        return None
    return np.where(request.places.adapter_loaded, 0.0, 1.0)


def zone(request: Candidates) -> Floats | None:
    """1 where the worker is labelled with another zone than the gateway's."""
    return request.table.elsewhere.astype(np.float64) if request.zoned else None


def last_pick(request: Candidates) -> Ints:
    """Running number of the worker's last pick: the longest not picked is next."""
    return request.table.picked_at


def hash_rank(request: Candidates) -> Floats:
    """Rank of each worker for the prompt's beginning, 0 to 1, and 1 more where it is full.

    Rendezvous hashing (Thaler and Ravishankar) with bounded loads (Mirrokni et al.).
    """
    if request.places.hash_key is None:
        rank = np.zeros(len(request.cached))
    else:
        rank = hash_order(request.table.seed, request.places.hash_key)
    workers = max(1, int(request.usable.sum()))
    total = float(request.running[request.usable].sum())
    bound = np.ceil(request.places.hash_max_load * (total + 1) / workers)
    full: Bools = request.running >= bound
    return rank + full.astype(np.float64)


def hash_order(seeds: npt.NDArray[np.uint64], key: int) -> Floats:
    """A number from 0 to 1 for each worker, another order for every key."""
    mixed = seeds ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _HASH_MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _HASH_MIX[1]
    order: Floats = (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
    return order


TERMS: dict[Term, Callable[[Candidates], Floats | Ints | None]] = {
    "uncached": uncached,
    "pending_prefill": pending_prefill,
    "running": running,
    "queued_tokens": queued_tokens,
    "recent_work": recent_work,
    "slow_prefill": slow_prefill,
    "finish": finish,
    "kv_pressure": kv_pressure,
    "health": health,
    "health_loss": health_loss,
    "load": load,
    "miss_share": miss_share,
    "prefix_locality": prefix_locality,
    "switch": switch,
    "session": session,
    "adapter_cold": adapter_cold,
    "zone": zone,
    "last_pick": last_pick,
    "hash_rank": hash_rank,
}


def _elsewhere(request: Candidates, column: int) -> Floats | None:
    if column < 0:
        return None
    there = np.ones(len(request.cached))
    there[column] = 0.0
    return there
