"""/metrics with vLLM's names and labels.

Gauges and counters are read from the engine when scraped; only the latency histograms are
kept here. ``process_start_time_seconds`` is the start of this engine, so that several in one
process can be told apart as several processes would be. One gauge is the simulator's own:
its busy share, which takes the place of a GPU's utilisation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.simulator.busy import BusyMeter
from workers.simulator.engine import Engine
from workers.simulator.requests import EngineRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

# Bucket bounds as in a scrape of vLLM 0.32.
_TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_LABELS = ("engine", "model_name")


class EngineMetrics:
    """What /metrics says about one engine."""

    def __init__(self, engine: Engine, model_name: str, adapters: tuple[str, ...] = ()) -> None:
        self.busy = BusyMeter()
        """Fed by the step loop."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name, adapters))
        busy = Gauge(
            "kvgate_simulator_busy_ratio",
            "Share of the last second in which the step loop computed.",
            registry=self._registry,
        )
        busy.set_function(lambda: self.busy.ratio(time.monotonic()))
        self._model_name = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", _TTFT_BOUNDS)
        self._gap = self._histogram("inter_token_latency_seconds", _TOKEN_BOUNDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", _REQUEST_BOUNDS)
        self._queue = self._histogram("request_queue_time_seconds", _REQUEST_BOUNDS)
        success = self._counter("request_success", (*_LABELS, "finished_reason"))
        self._success = {r: success.labels("0", model_name, r) for r in FINISH_REASONS}
        rejected = self._counter("admission_rejections", ("model_name", "reason"))
        self._rejected = {r: rejected.labels(model_name, r) for r in REJECTION_REASONS}

    def first_token(self, ttft_s: float, queued_s: float) -> None:
        """A request got its first token."""
        self._ttft.observe(ttft_s)
        self._queue.observe(queued_s)

    def next_token(self, gap_s: float) -> None:
        """A request got another token."""
        self._gap.observe(gap_s)

    def finished(self, e2e_s: float, reason: str) -> None:
        """A request ended by itself; aborts are not counted, as in vLLM."""
        self._e2e.observe(e2e_s)
        self._success[reason].inc()

    def rejected(self, reason: str) -> None:
        """A queue limit refused a request."""
        self._rejected[reason].inc()

    def render(self) -> bytes:
        """The scrape."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, bounds: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"vllm:{name}", _words(name), _LABELS, buckets=bounds, registry=self._registry
        )
        return family.labels("0", self._model_name)

    def _counter(self, name: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"vllm:{name}", _words(name), labels, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, model_name: str, adapters: tuple[str, ...]) -> None:
        self._engine = engine
        self._base = ["0", model_name]
        self._adapters = adapters
        self._started = time.time()
        self._adapter_series: dict[tuple[str, str], float] = {}

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", len(self._engine.running))
        yield self._gauge("num_requests_waiting", len(self._engine.waiting))
        yield self._labelled(
            "num_requests_waiting_by_reason",
            "reason",
            {"capacity": len(self._engine.waiting), "deferred": 0},
        )
        yield self._labelled(
            "engine_sleep_state",
            "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )
        yield self._gauge("kv_cache_usage_perc", self._engine.blocks.usage)
        yield from self._counters()
        yield self._cache_config()
        if self._adapters:
            yield from self._adapter_info()
        start = "Start time of the process since unix epoch in seconds."
        yield GaugeMetricFamily("process_start_time_seconds", start, value=self._started)

    def _counters(self) -> Iterator[Metric]:
        stats = self._engine.stats
        counts = {
            "prefix_cache_queries": stats.prefix_queries,
            "prefix_cache_hits": stats.prefix_hits,
            "num_preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "prompt_tokens_cached": stats.cached_prompt_tokens,
            "generation_tokens": stats.generation_tokens,
        }
        for name, count in counts.items():
            family = CounterMetricFamily(f"vllm:{name}", _words(name), labels=_LABELS)
            family.add_metric(self._base, count)
            yield family

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", _words(name), labels=_LABELS)
        family.add_metric(self._base, value)
        return family

    def _labelled(self, name: str, label: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", _words(name), labels=(*_LABELS, label))
        for value, number in values.items():
            family.add_metric([*self._base, value], number)
        return family

    def _cache_config(self) -> Metric:
        config = self._engine.config
        facts = {
            "block_size": config.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "engine": 0,
            "gpu_memory_utilization": 0.92,
            "kv_cache_size_tokens": config.block_size * config.num_blocks,
            "num_cpu_blocks": None,
            "num_gpu_blocks": config.num_blocks,
            "prefix_caching_hash_algo": "xxh3_64",
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=tuple(facts),
        )
        family.add_metric([str(value) for value in facts.values()], 1)
        return family

    def _adapter_info(self) -> Iterator[Metric]:
        # One series a combination, old ones stay; the newest value is the current one.
        running = _adapters(self._engine.running)
        waiting = _adapters(self._engine.waiting)
        if running or waiting or self._adapter_series:
            self._adapter_series[running, waiting] = time.time()
            family = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Running stats on lora requests.",
                labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            )
            for (run, wait), seen in self._adapter_series.items():
                family.add_metric([str(len(self._adapters)), run, wait], seen)
            yield family


def _adapters(requests: Iterable[EngineRequest]) -> str:
    names = (request.chain.origin.adapter for request in requests)
    return ",".join(sorted({name for name in names if name}))


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize() + "."
