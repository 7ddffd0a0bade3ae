"""``Health``: how well each worker does, from its requests' ends and its agent's reports.

The score is ``100 * (1 - 0.35 * (TTFT/limit)^2 - 0.40 * min(1, 5 * error rate)
- 0.25 * max(queue/limit, (kv - 0.80)/0.20))``, every ratio within 0 and 1. It falls at once
and rises by a limited number of points a second. Averages fade while nothing new is known,
so that every mark ends by itself.
"""

from __future__ import annotations

import math

import numpy as np

from extproc.fleet.table import NEVER, Bools, Floats, Ints, WorkerTable, some
from extproc.fleet.worker import EngineError, LoadReport
from extproc.policy import HealthPolicy

_NEW_SAMPLE = 0.2
"""Weight of a new sample in every moving average."""
_FADE_S = 10.0
"""Time constant with which TTFT and error rate are forgotten without new samples."""
_FADE_RATES_S = 30.0
"""The same for prefill rates: a worker found slow is tried again after a while."""
_OPEN_AT = 0.5
"""Error rate from which a worker is tried once in a while only."""
_SATURATED = frozenset({EngineError.QUEUE_FULL, EngineError.KV_EXHAUSTED})
_BROKEN = frozenset({EngineError.ENGINE_DEAD, EngineError.STREAM, EngineError.OTHER})
_NOISE = 1.5
"""Workers within this factor of the mean prefill rate are equally fast."""
_SLOWEST = 20.0
"""How many times slower than the mean a worker is believed to be at most."""
_LEAST_PREFILL_TOKENS = 256
"""Shorter prefills say more about queues and steps than about the prefill rate."""
_PROGRESS = ("prompt_tokens_per_s", "generation_tokens_per_s")


class Health:
    """Keeps the health columns of a table.

    Args:
        table: ``health_*``, ``ttft_share``, ``error_rate``, ``prefill_tokens_per_s``, ``tpot_s``,
            ``progress_at``, ``cooling_until`` and ``suspect_until`` are written here.

    Attributes:
        any_slow, any_pressed: whether some worker has a slowness above 1, some KV pressure.
        marked_until: seconds until which some worker cools down or is suspect.
    """

    def __init__(self, table: WorkerTable, policy: HealthPolicy, now: float) -> None:
        self._table = table
        self.policy = policy
        self.any_slow = self.any_pressed = True
        self.marked_until = NEVER
        self._faded_at = now

    def start(self, column: int, now: float, *, score: float) -> None:
        """A worker begins, new or empty again, with a score that rises from here."""
        table = self._table
        table.error_rate[column] = 0.0
        table.ttft_share[column] = table.tpot_s[column] = np.nan
        table.prefill_tokens_per_s[column] = np.nan
        table.health_base[column] = score
        table.health_target[column] = 100.0
        table.health_since[column] = table.progress_at[column] = now

    def scores(self, now: float) -> Floats:
        """Every worker's score at this time, 0 to 100."""
        table = self._table
        risen = self.policy.recovery_points_per_s * (now - table.health_since)
        scores: Floats = np.minimum(table.health_base + risen, table.health_target)
        return scores

    def report(self, column: int, load: LoadReport, now: float) -> None:
        """Rates and times that an agent tells; its own TTFT where headers come too early."""
        table, signals = self._table, load.signals
        if any(signals.get(name, 0.0) > 0 for name in _PROGRESS):
            table.progress_at[column] = now
        _average(table.tpot_s, column, signals.get("tpot_s"))
        if load.leases is None:
            _average(table.ttft_share, column, self._share_of_limit(signals.get("ttft_s"), 0))

    def first_token(self, column: int, ttft_s: float, ahead_tokens: int, now: float) -> None:
        """A prefill ended ``ttft_s`` after it was sent, behind and with ``ahead_tokens``.

        Engines prefill in order of arrival, so tokens ahead over time is the worker's rate
        whether or not it waited.
        """
        table = self._table
        table.progress_at[column] = max(table.progress_at[column], now)
        _average(table.ttft_share, column, self._share_of_limit(ttft_s, ahead_tokens))
        if ahead_tokens >= _LEAST_PREFILL_TOKENS and ttft_s > 0:
            _average(table.prefill_tokens_per_s, column, ahead_tokens / ttft_s)

    def ended(self, column: int, error: EngineError, now: float) -> None:
        """A request ended. What its caller or a gateway is to blame for changes nothing."""
        table = self._table
        rate = float(table.error_rate[column])
        if error is EngineError.NONE:
            table.error_rate[column] = rate * (1.0 - _NEW_SAMPLE)
        elif error in _SATURATED:
            table.error_rate[column] = 1.0
            self.mark(table.cooling_until, column, now + self.policy.cool_down_s)
        elif error in _BROKEN:
            table.error_rate[column] = rate + _NEW_SAMPLE * (1.0 - rate)
            if table.error_rate[column] >= _OPEN_AT:
                self.mark(table.suspect_until, column, now + self.policy.cool_down_s)

    def mark(self, until: Floats, column: int, until_s: float) -> None:
        """A worker cools down or is suspect until a time; a mark never ends sooner for it."""
        until[column] = max(until[column], until_s)
        self.marked_until = max(self.marked_until, until_s)

    def tick(self, now: float, trust: Floats) -> None:
        """Forget a little, find workers that stall, and set where every score tends to.

        Args:
            trust: weight of each worker's last report, 1 when fresh, 0 when stale.
        """
        table = self._table
        kept = math.exp(-max(0.0, now - self._faded_at) / _FADE_S)
        self._faded_at = now
        table.error_rate *= kept
        table.ttft_share *= kept
        self._compare(trust, kept ** (_FADE_S / _FADE_RATES_S))
        current = self.scores(now)
        target = self._targets()
        stalled = self.stalled(now)
        if some(stalled):
            target[stalled] = 0.0
            for column in np.flatnonzero(stalled).tolist():
                self.mark(table.suspect_until, column, now + 1.0)
        table.health_base[:] = np.minimum(current, target)
        table.health_target[:] = target
        table.health_since[:] = now

    def _compare(self, trust: Floats, kept_rates: float) -> None:
        """Each worker's speed and KV use beside the others'; rates fade into their mean."""
        table = self._table
        rates, mean_rate = table.prefill_tokens_per_s, table.mean(table.prefill_tokens_per_s)
        if mean_rate is None:
            table.slowness[:] = 1.0
        else:
            rates += (1.0 - kept_rates) * (mean_rate - rates)
            slowness = mean_rate / np.where(np.isnan(rates), mean_rate, rates)
            alike = (slowness < _NOISE) & (slowness > 1.0 / _NOISE)
            table.slowness[:] = np.where(alike, 1.0, np.minimum(slowness, _SLOWEST))
        mean = table.mean(table.kv_usage)
        if mean is None:
            table.kv_pressure[:] = 0.0
        else:
            usage = np.where(np.isnan(table.kv_usage), mean, table.kv_usage)
            table.kv_pressure[:] = _share(mean + trust * (usage - mean) - 0.8, 0.2)
        self.any_slow = some(table.slowness > 1.0)
        self.any_pressed = bool(np.count_nonzero(table.kv_pressure))

    def stalled(self, now: float) -> Bools:
        """Workers that owe a first token and have shown no progress for too long."""
        table = self._table
        rate = np.where(
            np.isnan(table.prefill_tokens_per_s),
            self.policy.slow_prefill_tokens_per_s,
            table.prefill_tokens_per_s,
        )
        patience_s = self.policy.stall_after_s + table.pending_prefill_tokens / rate
        stalled: Bools = (table.prefilling > 0) & (now - table.progress_at > patience_s)
        return stalled

    def _targets(self) -> Floats:
        table, policy = self._table, self.policy
        slow = _share(table.ttft_share, 1.0) ** 2
        failing = np.minimum(1.0, 5.0 * table.error_rate)
        queued = _share(table.engine_queue, policy.queue_limit)
        full = _share(table.kv_usage - 0.8, 0.2)
        loss: Floats = 0.35 * slow + 0.40 * failing + 0.25 * np.maximum(queued, full)
        return 100.0 * (1.0 - loss)

    def _share_of_limit(self, ttft_s: float | None, ahead_tokens: int) -> float | None:
        """TTFT over its limit, which grows with what had to be prefilled before."""
        if ttft_s is None:
            return None
        policy = self.policy
        return ttft_s / (policy.ttft_limit_s + ahead_tokens / policy.slow_prefill_tokens_per_s)


def error_of(status: int) -> EngineError:
    """What a status alone says of the worker: a 429 may be anybody's limit."""
    if status >= 500:
        return EngineError.OTHER
    return EngineError.CLIENT if status >= 400 else EngineError.NONE


def _average(values: Floats, column: int, sample: float | None) -> None:
    if sample is not None:
        known = values[column]
        values[column] = sample if math.isnan(known) else known + _NEW_SAMPLE * (sample - known)


def _share(values: Floats | Ints, limit: float) -> Floats:
    """Share of a limit, 0 to 1; 0 where the value is not known."""
    share: Floats = np.minimum(np.fmax(values / limit, 0.0), 1.0)
    return share
