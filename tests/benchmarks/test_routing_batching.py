"""Prefix batching: the order that it tries, and a tiny run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.routing.batching import BatchingFlow, Settings, run
from extproc.admission.demand import Demand


def demand(number: int) -> Demand:
    return Demand(
        id=str(number),
        pool="pool",
        name=None,
        adapter="",
        tenant="tenant",
        tenant_class="",
        lane="lane",
        weight=1.0,
        uncached_tokens=1,
        output_tokens=1,
        arrived_at=0.0,
        fingerprint=number,
        sequence=number,
    )


@pytest.mark.parametrize(
    ("most_passed", "expected"), [(0, "abababa"), (1, "aabbbaa"), (9, "aaaabbb")]
)
def test_requests_that_begin_alike_follow_one_another_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, most_passed: int, expected: str
) -> None:
    begins = dict(enumerate("abababa", 1))
    monkeypatch.setattr(BatchingFlow, "prefixes", {n: (each,) for n, each in begins.items()})
    monkeypatch.setattr(BatchingFlow, "most_passed", most_passed)
    flow = BatchingFlow(1.0)
    for number in begins:
        flow.add(demand(number))
    gone = ""
    while flow.kinds:
        [head] = flow.heads()
        gone += begins[head.fingerprint]
        flow.remove(head)
    assert gone == expected


def test_every_order_serves_everything(tmp_path: Path) -> None:
    output = tmp_path / "batching.json"
    settings = Settings(
        workers=1,
        duration_s=3.0,
        shared_rate_per_s=20.0,
        rag_rate_per_s=8.0,
        orders=(0, 4),
        seeds=(1,),
        output=output,
    )
    run(settings)
    results = json.loads(output.read_text())["results"]
    assert [(each["workload"], each["most_passed"]) for each in results] == [
        ("shared", 0),
        ("shared", 4),
        ("rag", 0),
        ("rag", 4),
    ]
    assert all(each["served"] == each["requests"] > 0 for each in results)
    assert all(each["waiting_most"] > 0 for each in results)
    first, second = results[:2]
    assert first["ttft_p50_s"] != second["ttft_p50_s"]
