"""Workloads are the same for a seed, and have the figures that they say they have."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.report import percentile
from benchmarks.workloads.catalog import KINDS, workload
from benchmarks.workloads.contexts import LongShortMix, Retrieval, SharedPrompts
from benchmarks.workloads.conversations import Agents, Chats
from benchmarks.workloads.plan import PlanError, Planned
from benchmarks.workloads.shapes import Spread, Zipf
from benchmarks.workloads.tenants import BATCH, ONLINE, Tenants

LONG_S = 400.0


def near(values: Iterable[float], p50: float, p90: float) -> None:
    found = list(values)
    assert percentile(found, 0.5) == pytest.approx(p50, rel=0.15)
    assert percentile(found, 0.9) == pytest.approx(p90, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_requests(kind: str) -> None:
    first, again, other = (
        workload(kind, seed=seed, duration_s=10.0).requests() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert [request.at_s for request in first] == sorted(request.at_s for request in first)
    assert first[0].at_s >= 0.0
    assert first[-1].at_s < 10.0


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_share_what_is_shared_and_nothing_else(kind: str) -> None:
    """A warm cache of another seed's run must not serve this one's questions."""
    one, other = (workload(kind, seed=seed, duration_s=20.0).requests() for seed in (1, 2))

    def last_ids(requests: list[Planned]) -> set[int | str]:
        return {request.prompt[-1].id for request in requests}

    assert not last_ids(one) & last_ids(other)


@pytest.mark.parametrize("kind", ["shared", "rag", "mix", "tenants"])
def test_requests_come_at_the_rate(kind: str) -> None:
    requests = workload(kind, rate_per_s=20.0, duration_s=LONG_S).requests()
    assert len(requests) / LONG_S == pytest.approx(20.0, rel=0.1)


def test_system_prompts_are_as_popular_as_zipf_says() -> None:
    workload = SharedPrompts(duration_s=LONG_S)
    requests = workload.requests()
    counts = Counter(request.prompt[0].id for request in requests)
    zipf = Zipf(workload.system_prompts, workload.exponent)
    for rank in (0, 1, 5):
        share = counts[f"shared-{rank}"] / len(requests)
        assert share == pytest.approx(zipf.share(rank), rel=0.1)
    near((r.prompt[1].tokens for r in requests), 100, 400)
    near((r.output_tokens for r in requests), 50, 150)


def test_chats_have_the_turns_and_gaps_of_the_trace() -> None:
    requests = Chats(duration_s=4 * LONG_S, rate_per_s=2.0, most_prompt_tokens=10**6).requests()
    sessions: dict[str, list[Planned]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    whole = [turns for turns in sessions.values() if turns[0].at_s < 2 * LONG_S]
    near((len(turns) for turns in whole), 4, 8)
    gaps = [b.at_s - a.at_s for turns in whole for a, b in itertools.pairwise(turns)]
    near(gaps, 123 / 25, 483 / 25)
    for turns in whole:
        for earlier, later in itertools.pairwise(turns):
            assert later.prompt[: len(earlier.prompt)] == earlier.prompt


def test_agents_share_instructions_and_grow_by_results() -> None:
    workload = Agents(duration_s=LONG_S)
    requests = workload.requests()
    first = {request.prompt[0] for request in requests}
    assert len(first) == workload.kinds
    assert all(request.prompt_tokens <= workload.most_prompt_tokens for request in requests)
    assert percentile((r.prompt_tokens for r in requests), 0.5) > workload.instruction_tokens
    near((r.output_tokens for r in requests), 69, 389)


def test_retrieved_documents_come_best_first_and_once() -> None:
    requests = Retrieval(duration_s=LONG_S).requests()
    for request in requests:
        documents = [str(s.id) for s in request.prompt if str(s.id).startswith("rag-document")]
        ranks = [int(name.rpartition("-")[2]) for name in documents]
        assert ranks == sorted(set(ranks))
        assert 1 <= len(ranks) <= 3
    assert percentile((r.prompt_tokens for r in requests), 0.9) == pytest.approx(4_142, rel=0.15)


def test_the_mix_has_its_share_of_long_prompts_in_bursts() -> None:
    workload = LongShortMix(duration_s=10 * LONG_S)
    requests = workload.requests()
    long = [request for request in requests if len(request.prompt) == 2]
    assert len(long) / len(requests) == pytest.approx(workload.long_share, rel=0.1)
    documents = Counter(request.prompt[0].id for request in long)
    common = sum(count for count in documents.values() if count > 1)
    assert common / len(long) == pytest.approx(workload.shared_share, rel=0.1)
    times = [request.at_s for request in requests]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    cv = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert cv == pytest.approx(workload.cv, rel=0.1)


def test_tenants_have_the_shares_of_servegen() -> None:
    workload = Tenants(duration_s=20 * LONG_S)
    requests = workload.requests()
    counts = Counter(request.tenant for request in requests).most_common()
    assert counts[0][1] / len(requests) == pytest.approx(0.29, abs=0.04)
    ten = sum(count for _, count in counts[:10])
    assert ten / len(requests) == pytest.approx(0.70, abs=0.05)
    mean = statistics.fmean(request.prompt_tokens for request in requests)
    assert 800 < mean < 2_400


def test_every_tenant_keeps_to_its_lane() -> None:
    workload = Tenants()
    lanes = Counter(map(workload.lane, range(workload.tenants)))
    assert lanes[BATCH] / workload.tenants == pytest.approx(workload.batch_share, abs=0.02)
    for request in workload.requests():
        assert request.lane == workload.lane(int(request.tenant.rpartition("-")[2]))
        assert request.lane in (ONLINE, BATCH)


def test_a_yaml_file_names_a_kind_and_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "busy.yaml"
    path.write_text("{kind: rag, rate_per_s: 3, documents: 7, ask_tokens: {p50: 10, p90: 20}}")
    made = workload(str(path), seed=5, rate_per_s=4.0)
    assert made == Retrieval(seed=5, rate_per_s=4.0, documents=7, ask_tokens=Spread(10, 20))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{kind: chat}", "chat"),
        ("{kind: rag, document: 3}", "document"),
        ("{kind: rag, documents: 0}", "documents"),
        ("{kind: rag, ask_tokens: {p50: 20, p90: 10}}", "p50 <= p90"),
        ("[1, 2]", "not a workload"),
        ("{kind: [", "parsing"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(content)
    with pytest.raises(PlanError, match=f"w.yaml.*{word}"):
        workload(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match="shared, chats"):
        workload("chat")
