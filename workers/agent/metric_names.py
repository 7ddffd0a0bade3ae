"""Names under which engines tell what routing needs, newest spelling first.

vLLM has renamed metrics between versions, and counters appear with and without
``_total``. The first name on the page wins; none on the page means unknown (case LD1).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

Names: TypeAlias = tuple[str, ...]


def _counter(*names: str) -> Names:
    return tuple(form for name in names for form in (f"{name}_total", name))


@dataclass(frozen=True, slots=True)
class MetricNames:
    """One engine's names. Histograms go by the name before ``_sum`` and ``_count``."""

    engine: str
    running: Names
    waiting: Names
    kv_usage: Names
    preemptions: Names
    prompt_tokens: Names
    generation_tokens: Names
    prefix_queries: Names
    prefix_hits: Names
    finished: Names
    ttft: Names
    tpot: Names
    cache_config: Names
    blocks_labels: Names
    block_size_labels: Names
    waiting_by_reason: Names = ()
    iterations: Names = ()
    """Histogram: its count tells steps of the engine."""
    sleep_state: Names = ()
    adapters: Names = ()
    busy: Names = ()

    def wanted(self) -> frozenset[str]:
        """Every sample name that a page may have."""
        plain = {
            name
            for field in fields(self)
            if field.name not in ("engine", "blocks_labels", "block_size_labels")
            for name in getattr(self, field.name)
        }
        histograms = (*self.ttft, *self.tpot, *self.iterations)
        return frozenset(plain | {f"{name}{end}" for name in histograms for end in _ENDS})


_ENDS = ("_sum", "_count")

VLLM = MetricNames(
    engine="vllm",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    preemptions=_counter("vllm:num_preemptions"),
    prompt_tokens=_counter("vllm:prompt_tokens"),
    generation_tokens=_counter("vllm:generation_tokens"),
    prefix_queries=_counter("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    prefix_hits=_counter("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    finished=_counter("vllm:request_success"),
    ttft=("vllm:time_to_first_token_seconds",),
    tpot=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    cache_config=("vllm:cache_config_info",),
    blocks_labels=("num_gpu_blocks",),
    block_size_labels=("block_size",),
    waiting_by_reason=("vllm:num_requests_waiting_by_reason",),
    iterations=("vllm:iteration_tokens_total",),
    sleep_state=("vllm:engine_sleep_state",),
    adapters=("vllm:lora_requests_info",),
    busy=("kvgate_simulator_busy_ratio",),
)
SGLANG = MetricNames(
    engine="sglang",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs", "sglang:num_waiting_reqs"),
    kv_usage=("sglang:token_usage",),
    preemptions=_counter("sglang:num_retracted_requests"),
    prompt_tokens=_counter("sglang:prompt_tokens"),
    generation_tokens=_counter("sglang:generation_tokens"),
    prefix_queries=_counter("sglang:prompt_tokens"),
    prefix_hits=_counter("sglang:cached_tokens"),
    finished=_counter("sglang:num_requests"),
    ttft=("sglang:time_to_first_token_seconds",),
    tpot=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    cache_config=("sglang:cache_config_info",),
    blocks_labels=("num_pages",),
    block_size_labels=("page_size",),
)
ENGINES = (VLLM, SGLANG)
PROCESS_START = ("process_start_time_seconds",)
