from __future__ import annotations

import pytest

from tests.support.engine import whole_page
from workers.agent.engine_metrics import EngineMetrics, Total, parse_metrics
from workers.agent.metrics_page import MAX_PAGE_BYTES, MetricsError

WHOLE = whole_page()


def metrics_of(*lines: str) -> EngineMetrics:
    return parse_metrics("".join(f"{line}\n" for line in lines).encode())


VLLM_PAGE = WHOLE + (
    'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0\n'
    'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 7.0\n'
    'vllm:num_preemptions_total{engine="0"} 5.0\n'
    'vllm:prefix_cache_queries_total{engine="0"} 26712.0\n'
    'vllm:prefix_cache_hits_total{engine="0"} 672.0\n'
    'vllm:prompt_tokens_total{engine="0"} 26412.0\n'
    'vllm:request_success_total{engine="0",finished_reason="stop"} 3.0\n'
    'vllm:request_success_total{engine="0",finished_reason="length"} 15.0\n'
    'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 9.0\n'
    'vllm:iteration_tokens_total_count{engine="0"} 4496.0\n'
    'vllm:iteration_tokens_total_sum{engine="0"} 43616.0\n'
    'vllm:time_to_first_token_seconds_count{engine="0"} 42.0\n'
    'vllm:time_to_first_token_seconds_sum{engine="0"} 3.5\n'
    'vllm:inter_token_latency_seconds_count{engine="0"} 17834.0\n'
    'vllm:inter_token_latency_seconds_sum{engine="0"} 81.5\n'
    'vllm:lora_requests_info{max_lora="2",running_lora_adapters="ad1"} 1.0\n'
    'vllm:lora_requests_info{max_lora="4",running_lora_adapters="ad2"} 2.0\n'
    "kvgate_simulator_busy_ratio 0.75\n"
)
SGLANG_PAGE = (
    'sglang:num_running_reqs{model_name="m",engine_type="unified",tp_rank="0"} 3.0\n'
    'sglang:num_queue_reqs{model_name="m"} 2.0\n'
    'sglang:token_usage{model_name="m"} 0.5\n'
    'sglang:cache_config_info{page_size="16",num_pages="100"} 1.0\n'
    'sglang:prompt_tokens_total{model_name="m"} 4096.0\n'
    'sglang:cached_tokens_total{model_name="m",cache_source="device"} 3000.0\n'
    'sglang:cached_tokens_total{model_name="m",cache_source="host"} 168.0\n'
    'sglang:generation_tokens_total{model_name="m"} 99.0\n'
    'sglang:num_retracted_requests_total{model_name="m"} 1.0\n'
    'sglang:num_requests_total{model_name="m"} 8.0\n'
    'sglang:time_to_first_token_seconds_sum{model_name="m"} 2.0\n'
    'sglang:time_to_first_token_seconds_count{model_name="m"} 8.0\n'
)


def test_a_whole_page_gives_every_number() -> None:
    assert parse_metrics(VLLM_PAGE.encode()) == EngineMetrics(
        engine="vllm",
        running=2.0,
        waiting=1.0,
        waiting_for_capacity=1.0,
        kv_usage=0.25,
        preemptions=5.0,
        prefix_queries=26712.0,
        prefix_hits=672.0,
        prompt_tokens=26412.0,
        generation_tokens=9000.0,
        finished=18.0,
        iterations=4496.0,
        ttft=Total(3.5, 42.0),
        tpot=Total(81.5, 17834.0),
        busy=0.75,
        awake=True,
        kv_blocks=300,
        block_size_tokens=4,
        max_adapters=4,
        process_start_time_s=1795961913.12,
    )


def test_sglangs_page_gives_the_same_numbers_under_its_own_names() -> None:
    assert parse_metrics(SGLANG_PAGE.encode()) == EngineMetrics(
        engine="sglang",
        running=3.0,
        waiting=2.0,
        kv_usage=0.5,
        preemptions=1.0,
        prefix_queries=4096.0,
        prefix_hits=3168.0,
        prompt_tokens=4096.0,
        generation_tokens=99.0,
        finished=8.0,
        ttft=Total(2.0, 8.0),
        kv_blocks=100,
        block_size_tokens=16,
    )


def test_half_a_histogram_is_unknown() -> None:
    assert metrics_of("vllm:time_to_first_token_seconds_sum 3.5").ttft is None


def test_time_per_token_is_read_under_its_old_name() -> None:
    metrics = metrics_of(
        "vllm:time_per_output_token_seconds_sum 3", "vllm:time_per_output_token_seconds_count 6"
    )
    assert metrics.tpot == Total(3.0, 6.0)


def test_a_page_of_another_server_tells_its_start_alone() -> None:
    assert metrics_of("process_start_time_seconds 1e9") == EngineMetrics(process_start_time_s=1e9)


def test_requests_on_the_engine_are_unknown_if_one_number_is() -> None:
    assert metrics_of("vllm:num_requests_running 2").busy_requests is None
    assert metrics_of("vllm:num_requests_running 2", "vllm:num_requests_waiting 1").progress == ()


def test_kv_usage_is_read_under_its_new_name() -> None:
    assert metrics_of('vllm:kv_cache_usage_perc{engine="0"} 0.5').kv_usage == 0.5


def test_kv_usage_is_read_under_its_old_name() -> None:
    assert metrics_of('vllm:gpu_cache_usage_perc{model_name="m"} 0.5').kv_usage == 0.5


def test_the_first_name_present_wins() -> None:
    both = metrics_of("vllm:gpu_cache_usage_perc 0.1", "vllm:kv_cache_usage_perc 0.9")
    assert both.kv_usage == 0.9


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_counters_are_read_with_and_without_total(suffix: str) -> None:
    assert metrics_of(f"vllm:num_preemptions{suffix} 3").preemptions == 3.0


def test_a_missing_number_is_none_and_not_zero() -> None:
    fresh = metrics_of("process_start_time_seconds 1e9")
    assert (fresh.running, fresh.waiting, fresh.kv_usage, fresh.awake) == (None,) * 4


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "Inf", "nan"])
def test_a_value_that_is_no_finite_number_is_none(value: str) -> None:
    page = metrics_of(f"vllm:kv_cache_usage_perc {value}", "vllm:num_requests_running 4")
    assert (page.kv_usage, page.running) == (None, 4.0)


def test_openmetrics_with_exemplars_and_eof_is_read() -> None:
    page = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3.0 1795961913.1\n'
        'vllm:num_preemptions_total{engine="0"} 2.0 # {trace_id="abc"} 1.0 1795961913.1\n'
        "# EOF"
    )
    metrics = parse_metrics(page.encode())
    assert (metrics.running, metrics.preemptions) == (3.0, 2.0)


def test_several_engines_are_summed_and_the_fullest_counts_for_kv() -> None:
    metrics = metrics_of(
        'vllm:num_requests_running{engine="0"} 3',
        'vllm:num_requests_running{engine="1"} 4',
        'vllm:kv_cache_usage_perc{engine="0"} 0.2',
        'vllm:kv_cache_usage_perc{engine="1"} 0.9',
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="10"} 1',
        'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="20"} 1',
        'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1',
        'vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0',
    )
    assert (metrics.running, metrics.kv_usage, metrics.kv_blocks) == (7.0, 0.9, 30)
    assert (metrics.block_size_tokens, metrics.awake) == (16, False)


def test_one_engine_without_a_number_leaves_the_sum_unknown() -> None:
    metrics = metrics_of(
        'vllm:num_requests_running{engine="0"} 3', 'vllm:num_requests_running{engine="1"} NaN'
    )
    assert metrics.running is None


def test_kv_usage_stays_between_0_and_1() -> None:
    assert metrics_of("vllm:kv_cache_usage_perc 1.7").kv_usage == 1.0


def test_labels_may_hold_braces_and_quotes() -> None:
    assert metrics_of(r'vllm:num_requests_running{model_name="a}\"b {"} 3').running == 3.0


@pytest.mark.parametrize(
    "page",
    [
        "",
        "\n",
        "<html>\n<body>502 Bad Gateway</body>\n</html>\n",
        '{"detail":"Not Found"}',
        "404: Not Found",
        "404 page not found\n",
        WHOLE[:-20],
        WHOLE.rstrip("\n"),
        "# only a comment\n",
    ],
)
def test_what_is_no_whole_page_is_refused(page: str) -> None:
    with pytest.raises(MetricsError):
        parse_metrics(page.encode())


def test_a_page_of_10_mb_is_refused() -> None:
    with pytest.raises(MetricsError, match=str(MAX_PAGE_BYTES)):
        parse_metrics(b"vllm:num_requests_running 1\n" * 400_000)


def test_bytes_that_are_not_text_are_refused() -> None:
    with pytest.raises(MetricsError):
        parse_metrics(bytes(range(256)) + b"\n")
