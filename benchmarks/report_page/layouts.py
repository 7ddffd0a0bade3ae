"""Which fields of each benchmark's JSON become which table."""

from __future__ import annotations

from benchmarks.report_page.comparison import FIVE
from benchmarks.report_page.tables import Column, Layout

_COUNT = "{:,.0f}"
_MS = "{:,.0f}"
_TTFT = (
    Column("TTFT p50 ms", "figures.ttft_s.p50", _MS, 1_000),
    Column("p99 ms", "figures.ttft_s.p99", _MS, 1_000),
)
_REQUESTS = (
    Column("requests", "figures.requests", _COUNT),
    Column("served", "figures.served", _COUNT),
)
_GOODPUT = Column("goodput/s", "figures.goodput_per_s")
_FIVE = tuple(Column(each.heading, f"medians.{each.field}", each.form) for each in FIVE)
_COMPARE = (
    Layout(
        "what was sent, and what one infinite cache would have found of it",
        "workloads[]",
        ("workload",),
        (
            Column("requests", "plan.requests", _COUNT),
            Column("prompt tokens", "plan.prompt_tokens", _COUNT),
            Column("output tokens", "plan.output_tokens", _COUNT),
            Column("KV blocks of a worker", "plan.num_blocks", _COUNT),
            Column("hit ratio at most", "plan.ceiling_hit_ratio", "{:.3f}"),
        ),
    ),
    Layout("medians of the rounds", "workloads[].arms[]", ("workload", "arm"), _FIVE, grouped=True),
    Layout(
        "cost",
        "workloads[].arms[]",
        ("workload", "arm"),
        (
            Column("router CPU ms a request", "medians.cpu_ms"),
            Column("agents' CPU ms", "medians.agents_cpu_ms"),
            Column("router MB", "medians.memory_mb", _COUNT),
            Column("not served", "medians.not_served", _COUNT),
        ),
        grouped=True,
    ),
)
_OVERHEAD = (
    Column("p50 ms", "p50_ms"),
    Column("p95 ms", "p95_ms"),
    Column("p99 ms", "p99_ms"),
    Column("requests/s", "requests_per_s", _COUNT),
    Column("Envoy CPU ms", "envoy_cpu_ms"),
    Column("processor CPU ms", "processor_cpu_ms"),
    Column("cores", "processor_cores"),
    Column("decision p50 ms", "decision_p50_ms"),
    Column("p95 ms", "decision_p95_ms"),
)
_SIMULATE = (
    *_REQUESTS,
    Column("hit ratio", "figures.hit_ratio", "{:.3f}"),
    *_TTFT,
    _GOODPUT,
    Column("waiting at most", "waiting_most", _COUNT),
    Column("simulated s", "simulated_s", _COUNT),
    Column("in CPU s", "cpu_s", _COUNT),
)
_COSTS = (
    Column("decision CPU ms p50", "decision_cpu_ms.p50", "{:.3f}"),
    Column("p99", "decision_cpu_ms.p99", "{:.3f}"),
    Column("end CPU ms p50", "end_cpu_ms.p50", "{:.3f}"),
    Column("p99", "end_cpu_ms.p99", "{:.3f}"),
    Column("memory MB", "memory_mb", _COUNT),
)
_EXPONENTS = (
    Column("decision CPU p50", "decision_p50"),
    Column("p99", "decision_p99"),
    Column("end CPU p50", "end_p50"),
    Column("p99", "end_p99"),
    Column("memory", "memory"),
)
_SWEEP = (
    Column("sent/s", "sent_per_s"),
    Column("goodput/s", "goodput_per_s"),
    Column("shed", "shed_share", "{:.1%}"),
    Column("TTFT p50 ms", "ttft_p50_s", _MS, 1_000),
    Column("p99 ms", "ttft_p99_s", _MS, 1_000),
)

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "compare": _COMPARE,
    "load-check": (
        Layout(
            "the same requests at the same times, medians of the rounds",
            "fronts[].figures[figure]",
            ("behind", "figure"),
            (
                Column("ours", "ours", "{:,.2f}"),
                Column("aiperf", "aiperf", "{:,.2f}"),
                Column("ours / aiperf", "ratio", "{:.3f}"),
                Column("our lowest round", "ours_lowest", "{:,.2f}"),
                Column("highest", "ours_highest", "{:,.2f}"),
                Column("aiperf's lowest round", "aiperf_lowest", "{:,.2f}"),
                Column("highest", "aiperf_highest", "{:,.2f}"),
            ),
            grouped=True,
        ),
    ),
    "overload": (
        Layout(
            "both arms",
            "arms[]",
            ("arm",),
            (
                *_REQUESTS,
                _GOODPUT,
                *_TTFT,
                Column("refused tries", "figures.refused_tries", _COUNT),
                Column("told to wait", "figures.told_to_wait", _COUNT),
            ),
        ),
        Layout(
            "by lane",
            "arms[].lanes[]",
            ("arm", "lane"),
            (
                Column("requests", "requests", _COUNT),
                Column("served", "served", _COUNT),
                Column("goodput/s", "goodput_per_s"),
                Column("TTFT p50 ms", "ttft_s.p50", _MS, 1_000),
                Column("p99 ms", "ttft_s.p99", _MS, 1_000),
            ),
        ),
    ),
    "overload-sweep": tuple(
        Layout(
            f"{clock}, by times the sustainable rate",
            f"{clock}.factors[][]",
            ("times", "arm"),
            _SWEEP,
        )
        for clock in ("virtual time", "wall clock")
    ),
    "failures": (
        Layout(
            "before, during and after the trouble",
            "arms[].spans[]",
            ("arm", "time"),
            (
                Column("requests", "requests", _COUNT),
                Column("TTFT p50 ms", "ttft_p50_s", _MS, 1_000),
                Column("p99 ms", "ttft_p99_s", _MS, 1_000),
                Column("errors", "errors", _COUNT),
                Column("broken answers", "broken", _COUNT),
            ),
        ),
    ),
    "simulate": (
        Layout("virtual time", "sizes[]", ("workers",), _SIMULATE),
        Layout("cost by workers", "sizes[]", ("workers",), _COSTS),
        Layout("exponents of growth with workers", "growth_with_workers", (), _EXPONENTS),
        Layout("cost by requests waiting", "queues[]", ("waiting",), _COSTS),
        Layout("exponents of growth with requests waiting", "growth_with_queue", (), _EXPONENTS),
    ),
    "validate": (
        Layout(
            "virtual against wall-clock time",
            "validation.differences[]",
            ("figure",),
            (Column("virtual time is off by", "", "{:+.1%}"),),
        ),
    ),
    "overhead": (
        Layout(
            "medians of the rounds",
            "workloads[workload.name].medians[]",
            ("workload", "arm"),
            _OVERHEAD,
            grouped=True,
        ),
        Layout(
            "CPU of kvgate above the bare processor, ms a request",
            "workloads[workload.name].above_bare_cpu_ms",
            ("workload",),
            (Column("median", "median"), Column("lowest", "low"), Column("highest", "high")),
        ),
        Layout(
            "share of each step in kvgate's CPU",
            "workloads[workload.name].shares[]",
            ("workload", "step"),
            (Column("share", "", "{:.1%}"),),
            grouped=True,
        ),
        Layout(
            "idle",
            "idle",
            (),
            (Column("agents", "agents", _COUNT), Column("cores", "cores", "{:.3f}")),
        ),
        Layout(
            "requests held",
            "held",
            (),
            (
                Column("requests", "requests", _COUNT),
                Column("bytes each", "memory_bytes_each", _COUNT),
                Column("cores while held", "cores_while_held", "{:.3f}"),
                Column("s until all are held", "hold_s"),
                Column("s until all are answered", "drain_s"),
                Column("answered", "ended_well", _COUNT),
                Column("left behind", "left", _COUNT),
            ),
        ),
    ),
    "hot-path": (
        Layout(
            "whole decisions",
            "decisions[conversation]",
            ("conversation",),
            (
                Column("workers", "workers", _COUNT),
                Column("median ms", "whole_ms.median"),
                Column("p99 ms", "whole_ms.p99"),
            ),
        ),
        Layout(
            "steps with 10 workers",
            "decisions[workers=10][conversation].steps_ms[]",
            ("conversation", "step"),
            (Column("median ms", "median", "{:.3f}"), Column("p99 ms", "p99", "{:.3f}")),
            grouped=True,
        ),
        Layout(
            "match of 128 blocks that every worker holds",
            "match_128_blocks[workers]",
            ("workers",),
            (
                Column("index median ms", "index_ms.median", "{:.3f}"),
                Column("p99 ms", "index_ms.p99", "{:.3f}"),
                Column("filter by filter ms (extrapolated)", "naive_ms_extrapolated", _COUNT),
            ),
        ),
    ),
    "routing-cost": (
        Layout(
            "CPU of a decision after tokens",
            "results[profile]",
            ("profile",),
            (
                Column("workers", "workers", _COUNT),
                Column("p50 ms", "p50_ms", "{:.3f}"),
                Column("p99 ms", "p99_ms", "{:.3f}"),
                Column("lookup in it ms", "lookup_ms", "{:.3f}"),
            ),
        ),
    ),
    "queue-costs": (
        Layout(
            "CPU and memory of a waiting request",
            "cases[held by]",
            ("held by",),
            (
                Column("tenants", "tenants", _COUNT),
                Column("enqueue ms", "admit_ms", "{:.3f}"),
                Column("dispatch ms", "next_ms", "{:.3f}"),
                Column("leave ms", "leave_ms", "{:.3f}"),
                Column("bytes", "bytes", _COUNT),
            ),
        ),
    ),
    "digest-build": (
        Layout(
            "an agent's whole process",
            "process",
            (),
            (
                Column("share of a core", "cpu_share", "{:.1%}"),
                Column("reports, bytes/s", "bytes_per_s", _COUNT),
                Column("changes/s", "changes_per_s", _COUNT),
                Column("resident MB", "resident_mb", _COUNT),
            ),
        ),
    ),
    "middleware": (
        Layout(
            "added to a request",
            "requests[answer]",
            ("answer",),
            (
                Column("arm", "arm"),
                Column("latency us", "added_latency_us.median", _COUNT),
                Column("CPU us", "added_us.median", _COUNT),
                Column("p90", "added_us.p90", _COUNT),
            ),
        ),
    ),
    "routing-sweep": (
        Layout(
            "replayed without a clock",
            "results[trace]",
            ("trace",),
            (
                Column("workers", "workers", _COUNT),
                Column("policy", "policy"),
                Column("hit ratio", "hit_ratio", "{:.3f}"),
                Column("max/mean work", "max_mean_work"),
                Column("TTFT p99 s", "ttft_p99_s"),
            ),
        ),
    ),
}
