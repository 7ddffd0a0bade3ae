"""Prometheus metrics of the scheduler.

What happens is counted where it happens; what *is* (queues, workers, caches) is read from
the core when Prometheus asks, so the request path pays nothing for it. Labels are bounded:
model is a pool of the policy or ``other``, worker an address in the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.decision.ticket import ServedModel
from extproc.scheduler import Scheduler
from extproc.telemetry.admission import admission_metrics

_FAST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

OTHER_MODEL = "other"


class Metrics:
    """Counters and histograms that the shell feeds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvgate_requests",
            "Requests by how they ended here: allowed, selected, dry_run, client_gone, or a"
            " refusal's code.",
            ("model", "endpoint", "outcome"),
            registry=self.registry,
        )
        self.responses = Counter(
            "kvgate_responses",
            "Responses by HTTP status class of the worker's answer.",
            ("model", "status"),
            registry=self.registry,
        )
        self.retried = Counter(
            "kvgate_retried_requests",
            "Requests that Envoy took to another worker than the first choice.",
            ("model",),
            registry=self.registry,
        )
        self.decision_s = Histogram(
            "kvgate_decision_seconds",
            "From the last byte of a request to its decision, queue wait left out.",
            ("model",),
            buckets=_FAST_S,
            registry=self.registry,
        )
        self.queue_wait_s = Histogram(
            "kvgate_queue_wait_seconds",
            "Time that allowed requests waited for quota and capacity.",
            ("model",),
            buckets=_SLOW_S,
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "kvgate_ttft_seconds",
            "From arrival at kvgate to the response headers: the first token, where workers"
            " hold their headers.",
            ("model",),
            buckets=_SLOW_S,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvgate_prompt_tokens",
            "Prompt tokens of allowed requests, estimated where they could not be counted.",
            ("model",),
            registry=self.registry,
        )
        self.cached_tokens = Counter(
            "kvgate_predicted_cached_tokens",
            "Prompt tokens expected in the chosen worker's cache.",
            ("model",),
            registry=self.registry,
        )
        self.unkeyed = Counter(
            "kvgate_unkeyed_prompts",
            "Prompts routed by load alone, by reason.",
            ("model", "reason"),
            registry=self.registry,
        )
        self.resyncs = Counter(
            "kvgate_digest_resyncs",
            "Digest messages refused; the agent was asked for a snapshot.",
            ("model",),
            registry=self.registry,
        )
        self.outcomes = Counter(
            "kvgate_engine_outcomes",
            "Requests by how they ended on their engine, as its middleware saw it.",
            ("model", "error"),
            registry=self.registry,
        )
        self.shadow_verdicts = Counter(
            "kvgate_shadow_admission",
            "Requests that ran although admission, in shadow, would not have let them: waits,"
            " or a refusal's code.",
            ("model", "verdict"),
            registry=self.registry,
        )
        self.watched_picks = Counter(
            "kvgate_shadow_routing",
            "Requests routed by load while cache-aware routing watched, by whether it would"
            " have led with the same worker.",
            ("model", "agreement"),
            registry=self.registry,
        )
        self.policy_reloads = Counter(
            "kvgate_policy_reloads",
            "Looks at the policy file: applied, unchanged, or refused (the one before stays).",
            ("result",),
            registry=self.registry,
        )
        self.degraded = Counter(
            "kvgate_degraded_requests",
            "Steps of degrade ladders taken instead of refusals.",
            ("model", "step"),
            registry=self.registry,
        )
        self.loop_lag_s = Histogram(
            "kvgate_event_loop_lag_seconds",
            "How late the event loop came back to a timer: what every stream waits for.",
            buckets=_FAST_S,
            registry=self.registry,
        )
        self.open_streams = Gauge(
            "kvgate_open_streams",
            "Requests that Envoy has with this scheduler, waiting and running.",
            registry=self.registry,
        )
        self.tokenizing = Gauge(
            "kvgate_tokenizing_prompts",
            "Cold prompts in or before a tokenizer thread.",
            registry=self.registry,
        )
        self.agent_streams = Gauge(
            "kvgate_agent_streams", "Agents connected.", registry=self.registry
        )
        self.replica_advice = Counter(
            "kvgate_replica_advice",
            "Hot prefixes that agents were told enough other workers hold.",
            ("model",),
            registry=self.registry,
        )
        self.protocol_errors = Counter(
            "kvgate_protocol_errors",
            "Streams ended because a message came that does not belong there.",
            ("peer",),
            registry=self.registry,
        )

        self._by_model: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """The children of one model, looked up once: label lookups cost more than counting."""
        found = self._by_model.get(model)
        if found is None:
            found = self._by_model[model] = ModelMetrics(self, model)
        return found

    def count_unkeyed(self, model: str, reason: str) -> None:
        """A prompt was routed by load alone."""
        self.unkeyed.labels(model, reason).inc()

    def watch(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        """Show the core's state from now on."""
        self.registry.register(_CoreCollector(scheduler, clock))


class ModelMetrics:
    """One model's counters and histograms."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._requests: dict[tuple[str, str], Counter] = {}
        self._responses: dict[int, Counter] = {}
        self.retried = metrics.retried.labels(model)
        self.decision_s = metrics.decision_s.labels(model)
        self.queue_wait_s = metrics.queue_wait_s.labels(model)
        self.ttft_s = metrics.ttft_s.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)

    def count_request(self, endpoint: str, outcome: str) -> None:
        """How a request's admission ended."""
        key = (endpoint, outcome)
        child = self._requests.get(key)
        if child is None:
            child = self._metrics.requests.labels(self._model, endpoint, outcome)
            self._requests[key] = child
        child.inc()

    def count_shadow(self, verdict: str) -> None:
        """What admission would have done with a request that it let run."""
        self._metrics.shadow_verdicts.labels(self._model, verdict).inc()

    def count_watched(self, same: bool) -> None:
        """Cache-aware routing watched a pick by load."""
        self._metrics.watched_picks.labels(self._model, "same" if same else "other").inc()

    def count_degraded(self, step: str) -> None:
        """A degrade step was taken instead of a refusal."""
        self._metrics.degraded.labels(self._model, step).inc()

    def count_outcome(self, error: str) -> None:
        """How a request ended on its engine."""
        self._metrics.outcomes.labels(self._model, error).inc()

    def count_response(self, status: int) -> None:
        """An HTTP status that a worker answered."""
        child = self._responses.get(status // 100)
        if child is None:
            child = self._metrics.responses.labels(self._model, f"{status // 100}xx")
            self._responses[status // 100] = child
        child.inc()


_Sample = tuple[str, str, Callable[[ServedModel, float], float]]

_MODEL_GAUGES: tuple[_Sample, ...] = (
    (
        "kvgate_index_bytes",
        "Memory of the prefix index.",
        lambda served, _: served.pool.index.nbytes,
    ),
    (
        "kvgate_segment_cache_bytes",
        "Token ids kept by text segment.",
        lambda served, _: served.keyer.segment_cache.bytes,
    ),
    (
        "kvgate_boundary_cache_bytes",
        "Block keys kept by conversation prefix.",
        lambda served, _: served.keyer.boundaries.size_bytes,
    ),
    (
        "kvgate_known_words",
        "Words whose token ids are kept, at most 65,536.",
        lambda served, _: served.keyer.known_words,
    ),
    (
        "kvgate_oscillating_prefixes",
        "Conversations known that change their worker more often than every tenth request.",
        lambda served, _: served.router.by_policy.conversations.oscillating,
    ),
    (
        "kvgate_known_prefixes",
        "Conversations whose last worker is remembered.",
        lambda served, _: len(served.router.by_policy.conversations),
    ),
    (
        "kvgate_counted_prefixes",
        "Shared prefixes whose requests are counted.",
        lambda served, _: len(served.router.by_policy.hot),
    ),
    (
        "kvgate_known_sessions",
        "Sessions whose last worker is remembered.",
        lambda served, _: len(served.router.by_policy.sessions),
    ),
    (
        "kvgate_approximate_workers",
        "Workers that send no digests: what was routed there is all that is known.",
        lambda served, _: sum(not w.sends_digests for w in served.pool.workers.values()),
    ),
    (
        "kvgate_exact_keys",
        "1 where the pool has a tokenizer; 0: keys are over characters, and no digest has them.",
        lambda served, _: float(served.keyer.exact),
    ),
)

_MODEL_COUNTERS: tuple[_Sample, ...] = (
    (
        "kvgate_prefix_repeats",
        "Requests that continued or repeated a known conversation.",
        lambda served, _: served.router.by_policy.conversations.repeats,
    ),
    (
        "kvgate_prefix_switches",
        "Those of them that went to another worker than the request before.",
        lambda served, _: served.router.by_policy.conversations.switches,
    ),
    (
        "kvgate_segment_cache_hits",
        "Text segments found tokenised.",
        lambda served, _: served.keyer.segment_cache.hits,
    ),
    (
        "kvgate_segment_cache_misses",
        "Text segments tokenised anew.",
        lambda served, _: served.keyer.segment_cache.misses,
    ),
    (
        "kvgate_segment_cache_evictions",
        "Text segments dropped for room.",
        lambda served, _: served.keyer.segment_cache.evictions,
    ),
    (
        "kvgate_boundary_cache_evictions",
        "Conversation prefixes dropped for room.",
        lambda served, _: served.keyer.boundaries.cache.evictions,
    ),
    (
        "kvgate_template_failures",
        "Chats that the model's template could not render here.",
        lambda served, _: served.keyer.template_failures,
    ),
)


class _CoreCollector(Collector):
    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        models = self._scheduler.models
        for name, text, read in _MODEL_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=("model",))
            for model, served in models.items():
                gauge.add_metric((model,), read(served, now))
            yield gauge
        for name, text, read in _MODEL_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model",))
            for model, served in models.items():
                counter.add_metric((model,), read(served, now))
            yield counter
        yield from admission_metrics(self._scheduler, now)
        yield from _worker_gauges(models.items(), now)


def _worker_gauges(models: Iterable[tuple[str, ServedModel]], now: float) -> Iterator[Metric]:
    labels = ("model", "worker")
    ready = GaugeMetricFamily("kvgate_worker_ready", "1 while the engine serves.", labels=labels)
    stale = GaugeMetricFamily(
        "kvgate_worker_last_resort", "1 while silent or suspect.", labels=labels
    )
    in_flight = GaugeMetricFamily(
        "kvgate_worker_in_flight_requests", "Requests booked by this scheduler.", labels=labels
    )
    foreign = GaugeMetricFamily(
        "kvgate_worker_foreign_requests", "Requests that came another way.", labels=labels
    )
    pending = GaugeMetricFamily(
        "kvgate_worker_pending_prefill_tokens",
        "Uncached tokens before a first token.",
        labels=labels,
    )
    state = GaugeMetricFamily(
        "kvgate_worker_state", "1 for the state that its agent tells.", labels=(*labels, "state")
    )
    signal = GaugeMetricFamily(
        "kvgate_worker_signal",
        "What its agent reads of the engine: rates and times of the last report interval.",
        labels=(*labels, "signal"),
    )
    lost = GaugeMetricFamily(
        "kvgate_worker_lost_kv_events", "KV events that never came.", labels=labels
    )
    kv_usage = GaugeMetricFamily(
        "kvgate_worker_kv_usage_ratio", "KV blocks held by live requests.", labels=labels
    )
    keys = GaugeMetricFamily("kvgate_worker_digest_keys", "Blocks in the digest.", labels=labels)
    fill = GaugeMetricFamily("kvgate_worker_digest_fill_ratio", "Bits set.", labels=labels)
    age = GaugeMetricFamily(
        "kvgate_worker_digest_age_seconds", "Since its last part.", labels=labels
    )
    overlay = GaugeMetricFamily(
        "kvgate_worker_overlay_keys", "Blocks credited from routing alone.", labels=labels
    )
    health = GaugeMetricFamily("kvgate_worker_health", "Health score, 0 to 100.", labels=labels)
    errors = GaugeMetricFamily(
        "kvgate_worker_error_ratio", "Its own errors of late, 0 to 1.", labels=labels
    )
    credit = GaugeMetricFamily(
        "kvgate_worker_cache_credit_ratio",
        "Cached tokens that its engine found over those predicted.",
        labels=labels,
    )
    rate = GaugeMetricFamily(
        "kvgate_worker_prefill_tokens_per_second", "Prefill rate as learned.", labels=labels
    )
    for model, served in models:
        pool, table = served.pool, served.pool.table
        last_resort, scores = table.last_resort(now), pool.health.scores(now)
        for worker in pool.workers.values():
            at, column = (model, worker.address), worker.column
            ready.add_metric(at, float(table.ready[column]))
            stale.add_metric(at, float(last_resort[column]))
            in_flight.add_metric(at, float(table.in_flight[column]))
            foreign.add_metric(at, float(table.foreign[column]))
            pending.add_metric(at, float(table.pending_prefill_tokens[column]))
            report = worker.last_report
            if report is not None:
                state.add_metric((*at, report.state.value), 1.0)
                lost.add_metric(at, report.lost_events)
                for name, value in report.signals.items():
                    signal.add_metric((*at, name), value)
                if report.kv_usage is not None:
                    kv_usage.add_metric(at, report.kv_usage)
            keys.add_metric(at, worker.feed.count)
            fill.add_metric(at, pool.index.digest_fill(column))
            if worker.feed.updated_at is not None:
                age.add_metric(at, now - worker.feed.updated_at)
            overlay.add_metric(at, pool.index.overlay_keys(column))
            health.add_metric(at, float(scores[column]))
            errors.add_metric(at, float(table.error_rate[column]))
            credit.add_metric(at, float(table.cache_credit[column]))
            if not math.isnan(table.prefill_tokens_per_s[column]):
                rate.add_metric(at, float(table.prefill_tokens_per_s[column]))
    yield from (ready, stale, state, signal, lost, in_flight, foreign, pending, kv_usage)
    yield from (keys, fill, age, overlay, health, errors, credit, rate)
