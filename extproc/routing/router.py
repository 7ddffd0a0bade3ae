"""``route``: filters, costs and picker put together for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from extproc.fleet.pool import Pool
from extproc.fleet.table import Ints
from extproc.routing.costs import balanced
from extproc.routing.picker import Picker
from extproc.tokens.keyer import PromptKeys

_LAST_RESORT_COST = 1e15
"""More than any load: silent and suspect workers come after all others."""


@dataclass(frozen=True, slots=True)
class Route:
    """An ordered choice of workers and what the first is expected to have cached."""

    columns: list[int]
    cached_tokens: int
    uncached_tokens: int
    prompt_tokens: int


def route(
    pool: Pool,
    prompts: Sequence[PromptKeys],
    now: float,
    picker: Picker,
    *,
    model: str | None = None,
    needs_slot: bool = True,
) -> Route:
    """Choose workers for a request; the caller knows that at least one is allowed.

    The first column has a slot, unless none is needed (model lists, health pages). Later
    ones are for Envoy's retries: ready workers, full ones included, because a retry must
    land somewhere.
    """
    table = pool.table
    policy = pool.policy.routing
    usable = pool.usable(model)
    running = table.running()
    allowed = usable & (running < table.slots) if needs_slot else usable
    total = sum(prompt.tokens for prompt in prompts)
    cached = cached_tokens(pool, prompts, now)
    cost = balanced(total - cached, table.pending_prefill_tokens, running, policy)
    last_resort = table.last_resort(now)
    if last_resort.any():
        cost[last_resort] += _LAST_RESORT_COST
    columns = picker.pick(cost, allowed, usable, policy.endpoints)
    matched = int(cached[columns[0]])
    return Route(columns, matched, total - matched, total)


def cached_tokens(pool: Pool, prompts: Sequence[PromptKeys], now: float) -> Ints:
    """Tokens of all prompts that each worker is expected to have cached."""
    block_size = pool.policy.block_size_tokens
    shortest = pool.policy.routing.min_prefix_tokens
    total = np.zeros(len(pool.table), dtype=np.int64)
    for prompt in prompts:
        if len(prompt.keys):
            tokens = (pool.cached_blocks(prompt.keys) * block_size).astype(np.int64)
            if shortest:
                tokens[tokens < shortest] = 0
            total += tokens
    total *= pool.table.digest_until > now
    return total
