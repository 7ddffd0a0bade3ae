"""Workers by role and zone: who leads, and who prefills for another."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.errors import NoReadyWorker
from extproc.fleet.worker import EngineError, Outcome, Worker
from extproc.policy import RoutingPolicy
from extproc.request.profile import Endpoint, RequestProfile
from tests.support.builders import (
    BLOCK,
    MODEL,
    Fleet,
    address,
    hello,
    keys_of,
    prompt_keys,
    ready,
    snapshot,
    text_blocks,
)

LONG = prompt_keys(text_blocks(1, 50))
SHORT = prompt_keys(text_blocks(2, 5))
OFFLOAD = {"min_uncached_tokens": 100}


def fleet(*roles: str, **routing: Any) -> Fleet:
    """Workers 0, 1, ... of these roles; an empty one is not labelled."""
    made = Fleet(routing=routing)
    for number, role in enumerate(roles):
        labelled(made, number, **({"role": role} if role else {}))
    return made


def labelled(fleet: Fleet, number: int, **labels: str) -> Worker:
    worker = fleet.pool.hello(hello(number, labels=labels), 0.0)
    assert worker is not None
    fleet.pool.report(worker, ready(), 0.0)
    return worker


class TestRoles:
    def test_a_worker_that_only_prefills_never_leads(self) -> None:
        workers = fleet("prefill", "decode", "both", "")
        tickets = [workers.arrive(SHORT) for _ in range(60)]
        led = {ticket.decision.endpoints[0] for ticket in tickets if ticket.decision}
        assert led == {address(1), address(2), address(3)}
        assert address(0) not in {e for t in tickets if t.decision for e in t.decision.endpoints}

    def test_prefill_alone_serves_nobody(self) -> None:
        with pytest.raises(NoReadyWorker):
            fleet("prefill", "prefill").arrive(SHORT)

    def test_a_role_that_nobody_knows_is_none(self) -> None:
        assert fleet("writer").arrive(SHORT).decision is not None

    def test_a_label_may_change_with_the_next_hello(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        labelled(workers, 0, role="both")
        assert workers.pool.table.usable().tolist()[:2] == [True, True]


class TestHandoff:
    def test_a_long_prompt_is_computed_elsewhere(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        workers.scheduler.tick(0.0)
        decision = workers.arrive(LONG).decision
        assert decision is not None
        assert (decision.endpoints, decision.prefiller) == ((address(1),), address(0))

    @pytest.mark.parametrize(
        ("roles", "prompt", "routing"),
        [
            (("prefill", "decode"), SHORT, {"disaggregation": OFFLOAD}),
            (("prefill", "decode"), LONG, {}),
            (("prefill", ""), LONG, {"disaggregation": OFFLOAD}),
            (("decode", "decode"), LONG, {"disaggregation": OFFLOAD}),
            (("both",), LONG, {"disaggregation": OFFLOAD}),
        ],
        ids=["short", "off", "no sidecar", "only decoders", "alone"],
    )
    def test_else_the_first_worker_does_it(self, roles: Any, prompt: Any, routing: Any) -> None:
        decision = fleet(*roles, **routing).arrive(prompt).decision
        assert decision is not None
        assert decision.prefiller == ""

    def test_a_dry_run_names_who_would_compute_it(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        profile = RequestProfile(Endpoint.CHAT, MODEL)
        named = [
            workers.scheduler.estimate(workers.served, profile, [prompt], 0.0).prefiller
            for prompt in (LONG, SHORT)
        ]
        assert named == [address(0), ""]

    def test_what_is_cached_on_the_leader_is_not_handed_over(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        worker = workers.pool.workers[address(1)]
        workers.pool.snapshot(worker, snapshot(keys_of(text_blocks(1, 50))), 0.0)
        decision = workers.arrive(LONG).decision
        assert decision is not None
        assert (decision.cached_tokens, decision.prefiller) == (50 * BLOCK, "")

    def test_the_prefiller_with_the_least_to_do_is_chosen(self) -> None:
        workers = fleet("prefill", "prefill", "decode", disaggregation=OFFLOAD)
        prompts = [prompt_keys(text_blocks(seed, 50)) for seed in range(10, 14)]
        picked = [t.decision.prefiller for t in map(workers.arrive, prompts) if t.decision]
        assert sorted(picked) == [address(0), address(0), address(1), address(1)]

    @pytest.mark.parametrize(("transfer_cost", "hands_over"), [(0.1, True), (2.0, False)])
    def test_a_worker_of_both_roles_hands_over_what_is_done_sooner_so(
        self, transfer_cost: float, hands_over: bool
    ) -> None:
        workers = fleet("both", disaggregation={**OFFLOAD, "transfer_cost": transfer_cost})
        assert workers.arrive(LONG).decision is not None
        labelled(workers, 1, role="prefill")
        decision = workers.arrive(prompt_keys(text_blocks(3, 50))).decision
        assert decision is not None
        assert decision.prefiller == (address(1) if hands_over else "")

    def test_a_subset_holds_for_prefillers_too(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        profile = RequestProfile(Endpoint.CHAT, model=MODEL, subset=frozenset({address(1)}))
        decision = workers.arrive(LONG, profile=profile).decision
        assert decision is not None
        assert decision.prefiller == ""

    def test_a_silent_prefiller_is_passed_over(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        workers.pool.suspect(workers.pool.workers[address(0)], 0.0)
        decision = workers.arrive(LONG).decision
        assert decision is not None
        assert decision.prefiller == ""


class TestBookings:
    def test_the_work_is_booked_where_it_is_done_until_the_first_token(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        first, second = (workers.pool.workers[address(n)] for n in range(2))
        ticket = workers.arrive(LONG)
        assert workers.held(first) == (1, LONG.tokens)
        assert workers.held(second) == (1, 0)
        assert not workers.pool.health.stalled(100.0)[second.column], "it owes nothing yet"
        workers.scheduler.response_started(ticket, address(1), 1, 1.0)
        assert workers.held(first) == (0, 0)
        assert workers.held(second) == (1, 0)
        workers.scheduler.finish(ticket, 2.0)
        assert workers.idle()

    def test_a_request_that_never_began_gives_all_back(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        workers.scheduler.finish(workers.arrive(LONG), 1.0)
        assert workers.idle()

    def test_both_are_expected_to_hold_the_prompt_afterwards(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        workers.scheduler.finish(workers.arrive(LONG), 0.0)
        assert workers.pool.cached_blocks(LONG.keys)[:2].tolist() == [50, 50]

    def test_the_prefillers_own_word_ends_nothing_and_is_no_leak(self) -> None:
        workers = fleet("prefill", "decode", disaggregation=OFFLOAD)
        scheduler, first = workers.scheduler, workers.pool.workers[address(0)]
        ticket = workers.arrive(LONG)
        scheduler.report(workers.served, first, ready(leases=frozenset({ticket.id})), 1.0)
        assert scheduler.leases.mismatch([address(0)]) == 0
        done = Outcome(ticket.id, 200, EngineError.NONE, 1.0, output_tokens=1, cached_tokens=0)
        scheduler.outcome(workers.served, first, done, 1.0)
        assert ticket.lease is not None
        assert not ticket.lease.released
        assert workers.pool.table.cache_credit[first.column] == 1.0


class TestZones:
    def test_an_idle_worker_next_door_is_preferred_and_a_busy_one_is_not(self) -> None:
        workers = Fleet(routing={"zone": "a", "warmup": {"duration_s": 0}})
        near, far = labelled(workers, 0, zone="a"), labelled(workers, 1, zone="b")
        seeds = iter(range(100, 200))
        led = [workers.arrive(prompt_keys(text_blocks(next(seeds), 2))) for _ in range(12)]
        held = (workers.held(near)[0], workers.held(far)[0])
        assert sum(held) == len(led)
        assert held[0] > held[1] >= 4, "a bounded cost, not a rule"

    def test_without_zones_or_labels_nothing_changes(self) -> None:
        for zone, labels in (("", {"zone": "b"}), ("a", {}), ("a", {"rack": "b"})):
            workers = Fleet(routing={"zone": zone})
            column = labelled(workers, 0, **labels).column
            assert not workers.pool.table.elsewhere[column]

    def test_the_label_can_have_another_name(self) -> None:
        name = "topology.kubernetes.io/zone"
        workers = Fleet(routing=RoutingPolicy(zone="a", zone_label=name).model_dump())
        worker = workers.pool.hello(hello(0, labels={name: "b"}), 0.0)
        assert worker is not None
        assert workers.pool.table.elsewhere[worker.column]
