"""What admission, leases and scaling are at the moment that Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from extproc.decision.signals import pool_signals
from extproc.decision.ticket import Freed
from extproc.scheduler import Scheduler


def admission_metrics(scheduler: Scheduler, now: float) -> Iterator[Metric]:
    """Every metric of queues, quotas, leases and desired workers."""
    yield from _queues(scheduler, now)
    yield from _returns(scheduler)
    yield from _rules(scheduler)
    yield from _leases(scheduler)
    yield from _scaling(scheduler, now)


def _queues(scheduler: Scheduler, now: float) -> Iterator[Metric]:
    admission, by_lane = scheduler.admission, ("model", "lane")
    running = GaugeMetricFamily("kvgate_running_requests", "Leases held.", labels=("model",))
    tokens = GaugeMetricFamily(
        "kvgate_running_tokens", "Work that leases were charged for.", labels=("model",)
    )
    oldest = GaugeMetricFamily(
        "kvgate_queue_oldest_seconds",
        "Wait of the request that waits longest.",
        labels=("model",),
    )
    held = GaugeMetricFamily(
        "kvgate_queued_bytes", "Bodies that waiting requests hold.", labels=("model",)
    )
    waiting = GaugeMetricFamily("kvgate_queued_requests", "Requests waiting.", labels=by_lane)
    backlog = GaugeMetricFamily("kvgate_queued_tokens", "Work that waits.", labels=by_lane)
    tenants = GaugeMetricFamily("kvgate_queued_tenants", "Tenants that wait.", labels=by_lane)
    for name, pool in admission.pools.items():
        running.add_metric((name,), pool.running)
        tokens.add_metric((name,), pool.running_tokens)
        oldest.add_metric((name,), pool.oldest_wait_s(now))
        held.add_metric((name,), pool.waiting_bytes)
        for lane_name, lane in pool.queue.lanes.items():
            waiting.add_metric((name, lane_name), len(lane.waiting))
            backlog.add_metric((name, lane_name), lane.tokens)
            tenants.add_metric((name, lane_name), len(lane.flows))
    yield from (running, tokens, oldest, held, waiting, backlog, tenants)
    for metric, text, value in (
        ("kvgate_queue_expired", "Requests whose wait ended in vain.", admission.expired_count),
        (
            "kvgate_queue_evicted",
            "Requests that gave up their place to one of a higher lane.",
            admission.evicted_count,
        ),
        (
            "kvgate_queue_left",
            "Requests whose client left the queue.",
            admission.left_count,
        ),
    ):
        counter = CounterMetricFamily(metric, text)
        counter.add_metric((), value)
        yield counter


def _returns(scheduler: Scheduler) -> Iterator[Metric]:
    """Refused requests that were told when to come back."""
    labels = ("model",)
    places = GaugeMetricFamily(
        "kvgate_kept_places", "Places kept for refused requests that may come back.",
        labels=labels,
    )  # fmt: skip
    share = GaugeMetricFamily(
        "kvgate_return_ratio", "Part of the places that clients came back to lately.",
        labels=labels,
    )  # fmt: skip
    ended = CounterMetricFamily(
        "kvgate_places_ended", "Places taken up, and places nobody came back to.",
        labels=("model", "how"),
    )  # fmt: skip
    for name, pool in scheduler.admission.pools.items():
        places.add_metric((name,), len(pool.returns))
        share.add_metric((name,), pool.returns.share)
        ended.add_metric((name, "taken_up"), pool.returns.kept)
        ended.add_metric((name, "lost"), pool.returns.lost)
    yield from (places, share, ended)


def _rules(scheduler: Scheduler) -> Iterator[Metric]:
    """Sums over a rule's counters: who they count is for logs, not for labels."""
    labels = ("rule", "model")
    used = GaugeMetricFamily("kvgate_quota_requests", "Requests running.", labels=labels)
    tokens = GaugeMetricFamily("kvgate_quota_tokens", "Work running.", labels=labels)
    lent = GaugeMetricFamily(
        "kvgate_quota_lent_requests", "Requests of other rules on this one's limit.", labels=labels
    )
    waiting = GaugeMetricFamily("kvgate_quota_waiting", "Requests waiting.", labels=labels)
    counters = GaugeMetricFamily("kvgate_quota_counters", "Values counted apart.", labels=labels)
    tightness = GaugeMetricFamily(
        "kvgate_quota_tightness_ratio", "Part of the limits that holds now.", labels=labels
    )
    for pool, rule in scheduler.admission.rules():
        at, all_counters = (rule.name, pool), rule.counters.values()
        used.add_metric(at, sum(counter.requests for counter in all_counters))
        tokens.add_metric(at, sum(counter.tokens for counter in all_counters))
        lent.add_metric(at, sum(counter.lent_requests for counter in all_counters))
        waiting.add_metric(at, sum(counter.waiting for counter in all_counters))
        counters.add_metric(at, len(rule.counters))
        tightness.add_metric(at, rule.tightness)
    yield from (used, tokens, lent, waiting, counters, tightness)


def _leases(scheduler: Scheduler) -> Iterator[Metric]:
    freed = CounterMetricFamily(
        "kvgate_leases_freed", "Leases given back, by why.", labels=("model", "why")
    )
    mismatch = GaugeMetricFamily(
        "kvgate_lease_mismatch",
        "Leases that workers do not list, and requests that they list without a lease.",
        labels=("model",),
    )
    for name, served in scheduler.models.items():
        for why in Freed:
            freed.add_metric((name, why.value), scheduler.leases.freed[name, why])
        mismatch.add_metric((name,), scheduler.leases.mismatch(served.pool.workers))
    yield from (freed, mismatch)


def _scaling(scheduler: Scheduler, now: float) -> Iterator[Metric]:
    labels = ("model",)
    wait = GaugeMetricFamily(
        "kvgate_expected_wait_seconds", "Of what waits in the highest lanes.", labels=labels
    )
    late = GaugeMetricFamily(
        "kvgate_ttft_violation_ratio", "First tokens after their budget, last minute.",
        labels=labels,
    )  # fmt: skip
    good = GaugeMetricFamily(
        "kvgate_goodput_requests_per_second", "Requests within their budgets.", labels=labels
    )
    desired = GaugeMetricFamily(
        "kvgate_desired_workers",
        "Workers that the pool should have; absent unless scaling is on.",
        labels=labels,
    )
    for name, served in scheduler.models.items():
        signals = pool_signals(scheduler.admission, served, now)
        wait.add_metric((name,), signals.expected_wait_s)
        late.add_metric((name,), signals.ttft_violation_rate)
        good.add_metric((name,), signals.goodput_per_s)
        if served.desire is not None and scheduler.policy.rollout.scaling == "on":
            desired.add_metric((name,), served.desire.workers)
    yield from (wait, late, good, desired)
