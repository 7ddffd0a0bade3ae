"""The simulation agrees with the simulator step by step, and survives its scripts."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster import MODEL, Cluster
from benchmarks.load.figures import figures
from benchmarks.load.sample import BROKEN, Budgets, Sample
from benchmarks.simulation.chains import KeyMaker, PlannedChain
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.cluster import VirtualCluster
from benchmarks.simulation.engine import FastEngine
from benchmarks.simulation.growth import exponent
from benchmarks.simulation.run import Simulate, run
from benchmarks.simulation.script import Trouble, read_script
from benchmarks.workloads.catalog import workload
from benchmarks.workloads.plan import PlanError, Planned, Segment
from extproc.policy import parse_policy
from workers.simulator.config import EngineConfig
from workers.simulator.engine import Engine
from workers.simulator.requests import EngineRequest

POLICY = parse_policy({"pools": [{"model": MODEL, "digest": {"capacity_blocks": 8_192}}]})
CLUSTER = Cluster(workers=3, max_num_seqs=8)


def simulate(*script: Trouble, duration_s: float = 40.0, seed: int = 1) -> VirtualCluster:
    plan = workload("chats", rate_per_s=1.5, duration_s=duration_s, seed=seed).requests()
    cluster = VirtualCluster(POLICY, CLUSTER, 0.002, script)
    cluster.run(plan)
    assert [sample.number for sample in cluster.samples] == list(range(len(plan)))
    return cluster


def at_rest(cluster: VirtualCluster) -> bool:
    """Nothing is booked, running or held."""
    table = cluster.scheduler.models[MODEL].pool.table
    return not table.in_flight.any() and not any(w.engine.busy for w in cluster.workers)


# Keys


def test_prompts_share_keys_up_to_where_they_part() -> None:
    maker = KeyMaker(16)
    one = maker.keys([Segment("s", 100), Segment("a", 60)])
    other = maker.keys([Segment("s", 100), Segment("b", 60)])
    assert len(one) == len(other) == 10
    assert one[:6] == other[:6]
    assert not set(one[6:]) & set(other[6:])


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    cut=st.integers(1, 90),
)
def test_a_shorter_segment_is_the_beginning_of_a_longer_one(sizes: list[int], cut: int) -> None:
    maker = KeyMaker(16)
    prompt = [Segment(number, size) for number, size in enumerate(sizes)]
    shorter = [*prompt[:-1], Segment(len(sizes) - 1, min(cut, sizes[-1]))]
    whole, part = maker.keys(prompt), maker.keys(shorter)
    assert len(whole) == sum(sizes) // 16
    assert whole[: len(part)] == part


# Engine


def engine_requests(seed: int, count: int) -> list[tuple[float, EngineRequest]]:
    rng = random.Random(seed)
    maker = KeyMaker(16)
    made = []
    now = 0.0
    for number in range(count):
        prompt = [Segment(f"s{rng.randrange(3)}", 200), Segment(number, rng.randint(10, 300))]
        tokens, answer = sum(s.tokens for s in prompt), rng.randint(1, 120)
        chain = PlannedChain(maker.keys(prompt), tokens + answer, 16, number)
        made.append((now, EngineRequest(str(number), chain, tokens, answer)))
        now += rng.expovariate(4.0)
    return made


def by_steps(config: EngineConfig, seed: int) -> dict[str, tuple[float, int]]:
    """End and cached tokens of each request, step by step."""
    engine, now = Engine(config), 0.0
    coming = engine_requests(seed, 40)
    ended: dict[str, tuple[float, int]] = {}
    while coming or engine.busy:
        if not engine.busy:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            engine.add(coming.pop(0)[1], now)
        step = engine.begin(now)
        assert step is not None
        end = now + step.duration_s
        # Who comes during a step is there when it ends.
        while coming and coming[0][0] < end:
            engine.add(coming.pop(0)[1], coming[0][0] if coming else end)
        now = end
        for output in engine.complete(step).outputs:
            if output.finish_reason:
                ended[output.request.request_id] = (now, output.request.cached_tokens)
    return ended


def by_skipping(config: EngineConfig, seed: int) -> dict[str, tuple[float, int]]:
    from benchmarks.simulation.worker import VirtualWorker

    clock = VirtualClock()
    ended: dict[str, tuple[float, int]] = {}

    def outputs(made: Any) -> None:
        for output in made:
            if output.finish_reason:
                ended[output.request.request_id] = (clock.now, output.request.cached_tokens)

    worker = VirtualWorker("10.0.0.1:1", config, POLICY.pools[0], clock, outputs, lambda _: None)
    worker.start()
    for at_s, request in engine_requests(seed, 40):
        clock.at(at_s, lambda request=request: worker.add(request))
    clock.run(lambda: False)
    assert isinstance(worker.engine, FastEngine)
    return ended


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("blocks", [4_096, 120], ids=["room", "preemption"])
def test_skipping_ends_every_request_when_stepping_does(seed: int, blocks: int) -> None:
    config = EngineConfig(num_blocks=blocks, max_model_len=1_024, max_num_seqs=8)
    stepped, skipped = by_steps(config, seed), by_skipping(config, seed)
    assert stepped.keys() == skipped.keys()
    if blocks == 4_096:
        for name, (end, cached) in stepped.items():
            assert skipped[name] == (pytest.approx(end, abs=1e-6), cached)


# Cluster


def test_the_same_seed_gives_the_same_run() -> None:
    def told(sample: Sample) -> tuple[Any, ...]:
        return (sample.ttft_s, sample.e2e_s, sample.worker, sample.cached_tokens)

    first, again = simulate(), simulate()
    assert list(map(told, first.samples)) == list(map(told, again.samples))


def test_all_is_served_and_given_back() -> None:
    cluster = simulate()
    found = figures(cluster.samples, Budgets())
    assert found.outcomes == {"200": found.requests}
    assert 0.3 < found.hit_ratio < 0.9
    assert at_rest(cluster)


def test_a_killed_worker_costs_only_answers_under_way() -> None:
    cluster = simulate(Trouble(20.0, "kill", worker=0, seconds=5.0))
    lost = [sample for sample in cluster.samples if not sample.served]
    assert lost
    for sample in lost:
        assert sample.code == BROKEN
        assert sample.due_s < 20.0 <= sample.due_s + sample.e2e_s + 1e-9
        assert sample.worker == cluster.workers[0].address
    back = [s for s in cluster.samples if s.worker == cluster.workers[0].address and s.due_s > 26]
    assert back
    assert at_rest(cluster)


def test_a_frozen_worker_answers_when_it_thaws() -> None:
    cluster = simulate(Trouble(20.0, "freeze", worker=0, seconds=6.0))
    assert all(sample.served for sample in cluster.samples)
    address = cluster.workers[0].address
    held = [
        sample.e2e_s - calm.e2e_s
        for sample, calm in zip(cluster.samples, simulate().samples, strict=True)
        if calm.worker == address and calm.due_s < 20.0 < calm.due_s + calm.e2e_s
    ]
    assert held
    assert all(extra_s == pytest.approx(6.0, abs=0.5) for extra_s in held)


def test_a_rolling_restart_loses_nothing_where_answers_are_short_enough() -> None:
    cluster = simulate(Trouble(10.0, "roll", seconds=60.0, restart_s=1.0), duration_s=60.0)
    assert all(sample.served for sample in cluster.samples)
    assert [worker.epoch for worker in cluster.workers] == [2, 2, 2]


def test_added_workers_take_their_share() -> None:
    cluster = simulate(Trouble(10.0, "add", count=2), duration_s=60.0)
    served = {sample.worker for sample in cluster.samples if sample.due_s > 15}
    assert len(cluster.workers) == 5
    assert served == {worker.address for worker in cluster.workers}


@pytest.mark.parametrize("in_flight", [1, 6])
def test_a_closed_loop_keeps_so_many_in_flight(in_flight: int) -> None:
    plan = [Planned(0.0, (Segment(n, 100),), 50) for n in range(30)]
    cluster = VirtualCluster(POLICY, CLUSTER, 0.002)
    cluster.run(plan, in_flight=in_flight)
    spans = [(sample.sent_s, sample.sent_s + sample.e2e_s) for sample in cluster.samples]
    assert len(spans) == len(plan)
    for sent_s, _ in spans[in_flight:]:
        assert sum(began <= sent_s < end for began, end in spans) == in_flight


def test_whoever_cannot_run_or_wait_is_refused() -> None:
    pool = {"model": MODEL, "admission": {"max_concurrency": 2, "max_queue": 1}}
    policy = parse_policy({"pools": [pool]})
    plan = [Planned(0.0, (Segment(n, 100),), 50) for n in range(5)]
    cluster = VirtualCluster(policy, CLUSTER, 0.002)
    cluster.run(plan)
    found = figures(cluster.samples, Budgets())
    assert found.served == 3
    assert found.refused_tries == found.told_to_wait == 2
    assert cluster.waiting_most == 1


# Command


def test_a_run_writes_every_size_and_its_script(tmp_path: Path, model_dir: Path) -> None:
    settings = Simulate(
        workers=(2, 4),
        duration_s=12.0,
        rate_per_worker=0.3,
        queued=(0, 40),
        script=(Trouble(4.0, "kill", worker=1, seconds=2.0),),
        output=tmp_path,
    )
    run(settings, model_dir)
    result = json.loads((tmp_path / "simulate.json").read_text())
    assert set(result["sizes"]) == {"2", "4"}
    for found in result["sizes"].values():
        assert found["decision_cpu_ms"]["p50"] > 0
        assert found["simulated_s"] > 10
        assert found["end_cpu_ms"]["p99"] >= found["end_cpu_ms"]["p50"] > 0
        assert 0 < found["memory_mb"] < found["peak_memory_mb"]
    assert set(result["growth_with_workers"]) == set(result["growth_with_queue"])
    waiting = {queued: found["waiting_most"] for queued, found in result["queues"].items()}
    assert waiting["0"] == 0
    assert waiting["40"] >= 40
    assert (tmp_path / "2-workers.jsonl").read_bytes().count(b"\n") > 0
    assert (tmp_path / "4-workers-ttft-p99.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_a_power_law(power: float) -> None:
    sizes = [0, 8, 64, 250, 1_000]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_one_point_has_no_exponent() -> None:
    assert math.isnan(exponent([0, 5], [1.0, 2.0]))


@pytest.mark.bench
def test_it_is_near_the_wall_clock(tmp_path: Path, model_dir: Path) -> None:
    settings = Simulate(
        workers=(2,), duration_s=8.0, rate_per_worker=0.5, validate=True, output=tmp_path
    )
    found = run(settings, model_dir)["validation"]
    assert found["wall clock"]["served"] == found["wall clock"]["requests"]
    # Times are the machine's own business here; what is cached is not.
    assert found["differences"]["hit ratio"] == pytest.approx(0.0, abs=0.15)


@pytest.mark.parametrize(
    "content",
    ["- {at_s: 1, action: explode}", "- {action: kill}", "- {at_s: 1, action: add, count: 0}", "1"],
)
def test_a_wrong_script_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"script\.yaml"):
        read_script(path)
