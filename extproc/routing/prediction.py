"""What each worker is expected to have cached of a request, and what of it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from extproc.fleet.pool import Pool
from extproc.fleet.table import Bools, Floats, Ints
from extproc.policy import AffinityPolicy
from extproc.tokens.keyer import PromptKeys

MOST_RUNNING = 2**53
"""More requests than run anywhere, as an integer or a float."""


def cached_tokens(pool: Pool, prompts: Sequence[PromptKeys], now: float) -> Floats:
    """Tokens of all prompts that each worker is expected to have cached.

    Scaled by how far the worker's engine has borne out predictions; nothing for a worker
    whose digest is too old.
    """
    block_size = pool.policy.block_size_tokens
    shortest = pool.policy.routing.min_prefix_tokens
    total: Floats | None = None
    for prompt in prompts:
        if len(prompt.keys):
            tokens = pool.cached_blocks(prompt.keys)
            tokens *= block_size
            if shortest:
                tokens[tokens < shortest] = 0
            total = tokens if total is None else total + tokens
    if total is None:
        return np.zeros(len(pool.table))
    total *= pool.table.digest_until > now
    total *= pool.table.cache_credit
    return total


def worth_moving_for(
    cached: Floats,
    prompt_tokens: int,
    running: Floats | Ints,
    usable: Bools,
    policy: AffinityPolicy,
) -> Floats:
    """Cached tokens that are a reason to choose a worker: enough of them, and not too busy.

    Workers with over ``max_extra_running`` requests more than the least loaded one, and
    matches below ``min_benefit`` of the prompt, count as if nothing were cached.
    """
    if running.max(initial=0) > policy.max_extra_running:
        least = running[usable].min(initial=MOST_RUNNING)
        cached = np.where(running <= least + policy.max_extra_running, cached, 0.0)
    if policy.min_benefit:
        cached = np.where(cached >= policy.min_benefit * prompt_tokens, cached, 0.0)
    return cached
