"""``WorkerTable``: what routing needs of every worker, as arrays over columns.

A decision reads whole arrays, so that its cost hardly grows with the fleet; events write
single elements. Column numbers are the prefix index's own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEVER = -np.inf
ALWAYS = np.inf
_BLANK = {
    "kv_free_blocks": np.inf,
    "kv_usage": np.nan,
    "prefill_tokens_per_s": np.nan,
    "tpot_s": np.nan,
    "ttft_share": np.nan,
    "cache_credit": 1.0,
    "slowness": 1.0,
    "leads": True,
}


class WorkerTable:
    """Arrays of shape (columns,), grown together.

    Attributes:
        present: the column belongs to a worker.
        ready: it is there, and its last report said that it can serve.
        leads: requests may be sent to it; False for workers that only prefill for others.
        prefills, decodes: it is labelled to prefill for others, to answer what another prefilled.
        elsewhere: it is labelled with another zone than the gateway's.
        fresh_until: seconds until which its last report is to be believed.
        suspect_until: seconds until which it is a last resort.
        in_flight: requests that this scheduler has on it.
        foreign: requests on it that came another way, from its reports.
        pending_prefill_tokens: uncached tokens sent to it, first token not yet seen.
        output_tokens: expected output of the requests that this scheduler has on it.
        slots: requests it may have at once.
        engine_queue: requests waiting inside its engine at the last report, 0 if unknown.
        kv_free_blocks: those not held by live requests at the last report; infinite if unknown.
        kv_booked_blocks: blocks of requests sent there that the report cannot have seen.
        recent_tokens: uncached tokens sent to it lately, fading over a minute.
        kv_usage: share of KV blocks held by live requests.
        prefilling: requests that this scheduler has on it without a first token.
        prefill_tokens_per_s, tpot_s: moving averages of what it was seen to do.
        ttft_share: moving average of TTFT over what it may be.
        slowness: the pool's mean prefill rate over its own; 1 where either is
            not known or they are about equal.
        kv_pressure: KV use beyond 80%, 0 to 1; an unknown or stale one is the pool's mean.
        error_rate: moving average of its own errors, 0 to 1.
        progress_at: seconds of the last sign that it computes.
        health_base, health_target, health_since: the score at a time, the last tick's as a
            rule, and where it tends.
        cooling_until: seconds until which long prompts avoid it.
        joined_at: seconds since which it is there, new or empty again.
        picked_at: running number of its last pick.
        seed: hash of its address, for consistent hashing.
        cache_credit: real over predicted cached tokens, 0 to 1.

    Floats that are not known are NaN, never zero.
        digest_until: seconds until which its digest may be used; always for workers
            that sent none, whose overlay is all there is.
    """

    def __init__(self) -> None:
        self.present: Bools = np.zeros(0, dtype=bool)
        self.ready: Bools = np.zeros(0, dtype=bool)
        self.leads: Bools = np.zeros(0, dtype=bool)
        self.prefills: Bools = np.zeros(0, dtype=bool)
        self.decodes: Bools = np.zeros(0, dtype=bool)
        self.elsewhere: Bools = np.zeros(0, dtype=bool)
        self.fresh_until: Floats = np.zeros(0)
        self.suspect_until: Floats = np.zeros(0)
        self.digest_until: Floats = np.zeros(0)
        self.in_flight: Ints = np.zeros(0, dtype=np.int64)
        self.foreign: Ints = np.zeros(0, dtype=np.int64)
        self.pending_prefill_tokens: Ints = np.zeros(0, dtype=np.int64)
        self.output_tokens: Ints = np.zeros(0, dtype=np.int64)
        self.slots: Ints = np.zeros(0, dtype=np.int64)
        self.engine_queue: Ints = np.zeros(0, dtype=np.int64)
        self.kv_free_blocks: Floats = np.zeros(0)
        self.kv_booked_blocks: Ints = np.zeros(0, dtype=np.int64)
        self.recent_tokens: Floats = np.zeros(0)
        self.kv_usage: Floats = np.zeros(0)
        self.prefilling: Ints = np.zeros(0, dtype=np.int64)
        self.prefill_tokens_per_s: Floats = np.zeros(0)
        self.tpot_s: Floats = np.zeros(0)
        self.ttft_share: Floats = np.zeros(0)
        self.slowness: Floats = np.zeros(0)
        self.kv_pressure: Floats = np.zeros(0)
        self.error_rate: Floats = np.zeros(0)
        self.progress_at: Floats = np.zeros(0)
        self.health_base: Floats = np.zeros(0)
        self.health_target: Floats = np.zeros(0)
        self.health_since: Floats = np.zeros(0)
        self.cooling_until: Floats = np.zeros(0)
        self.joined_at: Floats = np.zeros(0)
        self.picked_at: Ints = np.zeros(0, dtype=np.int64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.cache_credit: Floats = np.zeros(0)

    def __len__(self) -> int:
        return len(self.present)

    def resize(self, width: int) -> None:
        """Grow every array to ``width`` columns; never shrinks."""
        for name, array in vars(self).items():
            if len(array) < width:
                grown = np.full(width, _blank(name), dtype=array.dtype)
                grown[: len(array)] = array
                setattr(self, name, grown)

    def reset(self, column: int) -> None:
        """Forget a column's former worker."""
        for name, array in vars(self).items():
            array[column] = _blank(name)

    def running(self) -> Ints:
        """Requests on each worker, ours and others'."""
        return self.in_flight + self.foreign

    def mean(self, values: Floats) -> float | None:
        """Mean of what is known of the usable workers; None if nothing is."""
        known = values[self.usable() & ~np.isnan(values)]
        return float(np.add.reduce(known)) / len(known) if len(known) else None

    def filled(self, values: Floats) -> Floats | None:
        """Values with the mean for what is not known; None if nothing is."""
        mean = self.mean(values)
        return None if mean is None else np.where(np.isnan(values), mean, values)

    def usable(self) -> Bools:
        """Workers that are there and ready for requests, full or not."""
        return self.ready & self.leads

    def prefillers(self) -> Bools:
        """Workers that are there and ready to prefill for others."""
        return self.ready & self.prefills

    def has_slot(self) -> Bools:
        """Usable workers with room for one request more."""
        return self.usable() & (self.running() < self.slots)

    def has_room(self, max_engine_queue: int, kv_blocks: int) -> Bools:
        """Workers with a slot, a short engine queue and so many free KV blocks.

        An idle worker always fits: the engine alone knows what to do with a request that is
        larger than all its memory.
        """
        running = self.running()
        fits = self.kv_free_blocks - self.kv_booked_blocks >= kv_blocks
        fits &= self.engine_queue <= max_engine_queue
        fits |= running == 0
        fits &= running < self.slots
        fits &= self.usable()
        return fits

    def last_resort(self, now: float) -> Bools:
        """Workers to use only when no better one is left: silent or suspect."""
        return (self.fresh_until <= now) | (self.suspect_until > now)


def some(mask: Bools) -> bool:
    """Whether any is set, at a quarter of the price of ``mask.any()`` for so few."""
    return bool(np.count_nonzero(mask))


def _blank(name: str) -> float:
    return NEVER if name.endswith("_until") else _BLANK.get(name, 0)
