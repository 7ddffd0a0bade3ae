"""An engine's /metrics page, reduced to the few numbers that routing needs.

vLLM has renamed metrics between versions, so each number has a list of names and the
first one present wins. What a page does not have, or has as NaN or infinity, is None and
never 0: an unknown worker must not look idle (case LD1).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A real page has about 100 KB; nothing longer is read."""

RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
PREFIX_QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
PREFIX_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
)
GENERATED = ("vllm:generation_tokens_total", "vllm:generation_tokens")
SLEEP_STATE = ("vllm:engine_sleep_state",)
CACHE_CONFIG = ("vllm:cache_config_info",)
PROCESS_START = ("process_start_time_seconds",)

_WANTED = frozenset(
    name
    for names in (
        *(RUNNING, WAITING, KV_USAGE, PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS),
        *(GENERATED, SLEEP_STATE, CACHE_CONFIG, PROCESS_START),
    )
    for name in names
)
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)"
    r"(?:\{(?P<labels>(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
    r"[ \t]+(?P<value>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|Inf|NaN))(?=[ \t]|$)",
    re.ASCII,
)
_LABEL = re.compile(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"", re.ASCII)

Sample = tuple[dict[str, str], float]


class MetricsError(Exception):
    """The page is no metrics page, or only part of one."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Numbers of one worker, all its engines (data-parallel ranks) together."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of KV blocks held by live requests, 0 to 1, of the fullest engine: it is the
    one that preempts first, and a mean would hide it."""
    preemptions: float | None = None
    prefix_queries: float | None = None
    """Tokens looked up in the prefix cache since start."""
    prefix_hits: float | None = None
    """Tokens found there since start."""
    generated: float | None = None
    """Tokens generated since start."""
    awake: bool | None = None
    """False if any engine sleeps."""
    kv_blocks: int | None = None
    block_size_tokens: int | None = None
    process_start_time_s: float | None = None
    """Unix time; another value means another process."""


def parse_metrics(page: bytes) -> EngineMetrics:
    """Read a page in Prometheus text or OpenMetrics format.

    Raises:
        MetricsError: too long, cut in the middle, or without a single sample.
    """
    if len(page) > MAX_PAGE_BYTES:
        raise MetricsError(f"metrics page has over {MAX_PAGE_BYTES} bytes")
    samples = _samples(page.decode("utf-8", "replace"))
    config = _first(samples, CACHE_CONFIG) or []
    return EngineMetrics(
        running=_total(samples, RUNNING),
        waiting=_total(samples, WAITING),
        kv_usage=_share(samples, KV_USAGE),
        preemptions=_total(samples, PREEMPTIONS),
        prefix_queries=_total(samples, PREFIX_QUERIES),
        prefix_hits=_total(samples, PREFIX_HITS),
        generated=_total(samples, GENERATED),
        awake=_awake(samples),
        kv_blocks=_sum_of_label(config, "num_gpu_blocks"),
        block_size_tokens=_common_label(config, "block_size"),
        process_start_time_s=_total(samples, PROCESS_START),
    )


def _samples(page: str) -> dict[str, list[Sample]]:
    # A page ends with a newline or "# EOF"; otherwise its last number may be half a number.
    if not page.endswith("\n") and not page.endswith("# EOF"):
        raise MetricsError("metrics page is empty or cut")
    found: dict[str, list[Sample]] = {}
    any_sample = False
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if any_sample and name not in _WANTED:
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        any_sample = True
        if name in _WANTED:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            found.setdefault(name, []).append((labels, _number(match["value"])))
    if not any_sample:
        raise MetricsError("no metric on the page")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _first(samples: dict[str, list[Sample]], names: tuple[str, ...]) -> list[Sample] | None:
    return next((samples[name] for name in names if name in samples), None)


def _values(samples: dict[str, list[Sample]], names: tuple[str, ...]) -> list[float]:
    """Values of the first name present; none at all if one of them is no finite number."""
    values = [value for _, value in _first(samples, names) or []]
    return values if all(map(math.isfinite, values)) else []


def _total(samples: dict[str, list[Sample]], names: tuple[str, ...]) -> float | None:
    values = _values(samples, names)
    return sum(values) if values else None


def _share(samples: dict[str, list[Sample]], names: tuple[str, ...]) -> float | None:
    values = _values(samples, names)
    return min(1.0, max(0.0, *values)) if values else None


def _awake(samples: dict[str, list[Sample]]) -> bool | None:
    states = _first(samples, SLEEP_STATE) or []
    awake = [value > 0 for labels, value in states if labels.get("sleep_state") == "awake"]
    return all(awake) if awake else None


def _sum_of_label(config: list[Sample], label: str) -> int | None:
    numbers = [labels.get(label, "") for labels, _ in config]
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    return sum(map(int, numbers))


def _common_label(config: list[Sample], label: str) -> int | None:
    numbers = {labels.get(label, "") for labels, _ in config}
    number = numbers.pop() if len(numbers) == 1 else ""
    return int(number) if number.isdecimal() else None
