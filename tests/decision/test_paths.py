"""Ways through the core that few requests take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc import scheduler as scheduler_module
from extproc.admission import quotas
from extproc.admission.demand import Demand
from extproc.admission.lane import Lane, Verdict
from extproc.decision.judgement import met_budgets
from extproc.decision.room import Room
from extproc.fleet.worker import EngineError, Outcome, engine_error
from extproc.policy import LanePolicy
from tests.support.builders import MODEL, Fleet, policy, pool_policy
from tests.support.crowd import AMPLE, Crowd, request


def outcome(lease: str, **changes: object) -> Outcome:
    facts = {
        "status": 200,
        "error": EngineError.NONE,
        "duration_s": 1.0,
        "ttft_s": 0.1,
        "output_tokens": 10,
        "prompt_tokens": 100,
        "cached_tokens": 40,
    }
    return Outcome(lease=lease, **(facts | changes))  # type: ignore[arg-type]


class ScriptedGate:
    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.claims = 0

    def check(self, demand: Demand) -> Verdict:
        return self.verdicts.pop(0)

    def claim(self, demand: Demand) -> None:
        self.claims += 1


def lane_of_one(comebacks: int = 0) -> Lane:
    lane = Lane(LanePolicy(name="online"), quantum_tokens=10)
    demand = Demand("1", MODEL, MODEL, "", "t", "c", "online", 1.0, 5, 1, arrived_at=0.0)
    demand.comebacks = comebacks
    lane.add(demand, 0.0)
    return lane


class TestReturned:
    def test_who_came_back_and_is_too_large_for_now_is_kept_room(self) -> None:
        lane = lane_of_one(comebacks=1)
        gate = ScriptedGate(Verdict.LATER, Verdict.NO)
        assert lane.candidate(gate) is None
        assert gate.claims == 1
        assert lane.candidate(ScriptedGate(Verdict.RUN)) is not None

    def test_nobody_is_looked_at_where_nobody_can_run(self) -> None:
        gate = ScriptedGate(Verdict.NOBODY)
        assert lane_of_one(comebacks=1).candidate(gate) is None
        assert gate.verdicts == []


class TestHolders:
    def test_who_holds_a_turn_keeps_it_while_nobody_can_run(self) -> None:
        lane = lane_of_one()
        gate = ScriptedGate(Verdict.LATER, Verdict.NOBODY, Verdict.RUN)
        assert lane.candidate(gate) is None
        assert gate.claims == 1
        assert lane.candidate(gate) is None
        assert lane.candidate(gate) is not None

    def test_who_lacks_something_else_gives_it_up(self) -> None:
        lane = lane_of_one()
        gate = ScriptedGate(Verdict.LATER, Verdict.NO, Verdict.NO, Verdict.RUN)
        assert lane.candidate(gate) is None
        assert lane.candidate(gate) is None
        assert lane.candidate(gate) is not None


class TestRoom:
    def test_less_fits_where_more_did_and_more_fails_where_less_did(self) -> None:
        fleet = Fleet(workers=1, slots=1)
        room = Room(fleet.pool, 0.0)
        demand = Demand("1", MODEL, MODEL, "", "t", "c", "online", 1.0, 50, 1, arrived_at=0.0)
        small, large = replace(demand, uncached_tokens=5), replace(demand, uncached_tokens=90)
        assert [room(each) for each in (demand, small)] == [True, True]
        fleet.arrive()
        full = Room(fleet.pool, 0.0)
        assert [full(each) for each in (demand, large, small)] == [False, False, False]


class TestShadow:
    def test_a_refusal_is_told_and_not_acted_on(self) -> None:
        rules = [{"name": "r", "concurrency": 1, "max_queue": 0}]
        crowd = Crowd(slots=64, admission={"rules": rules}, rollout={"admission": "shadow"})
        made = [crowd.send(request(), 10) for _ in range(2)]
        assert [ticket.shadow for ticket in made] == [None, "queue_full"]


class TestReload:
    def test_a_lane_that_is_gone_becomes_the_first(self) -> None:
        crowd = Crowd(workers=1, slots=1)
        running, waiting = (crowd.send(request(lane="batch"), 10) for _ in range(2))
        lanes = {"lanes": [{"name": "online"}]}
        crowd.scheduler.reload(policy(pool_policy(admission=AMPLE), admission=lanes), now=0.0)
        assert waiting.demand is not None
        assert waiting.demand.lane == "online"
        crowd.leave(running)
        assert waiting.decision is not None

    def test_what_ended_in_a_lane_that_is_gone_is_settled_all_the_same(self) -> None:
        crowd = Crowd(workers=1, slots=1)
        ended = crowd.send(request(lane="batch"), 10)
        crowd.leave(ended)
        lanes = {"lanes": [{"name": "online"}]}
        crowd.scheduler.reload(policy(pool_policy(admission=AMPLE), admission=lanes), now=0.0)
        worker = crowd.workers[0]
        assert crowd.scheduler.outcome(crowd.served, worker, outcome(ended.id), 1.0) == []
        assert ended.settled

    def test_rates_of_tokens_alone_go_on_too(self) -> None:
        rule = {"name": "r", "tokens_per_minute": 600, "burst_s": 10}
        crowd = Crowd(workers=1, slots=64, admission={"rules": [rule]})
        crowd.send(request(), 90)
        changed = policy(pool_policy(admission=AMPLE), admission={"rules": [rule]})
        crowd.scheduler.reload(changed, now=0.0)
        assert crowd.send(request(), 90).decision is None


class TestEviction:
    def test_only_who_shares_the_full_queue_gives_up_a_place(self) -> None:
        rules = [{"name": "online", "match": {"lanes": ["online"]}, "max_queue": 1}]
        crowd = Crowd(workers=1, slots=1, admission={"rules": rules})
        crowd.send(request(), 10)
        batch = crowd.send(request(lane="batch"), 10)
        crowd.send(request(), 10)
        refusal = crowd.try_send(request(), 10)
        assert getattr(refusal, "code", None) == "queue_full"
        crowd.run_until(0.06)
        assert batch.refusal is None

    def test_counters_in_use_are_never_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quotas, "MAX_COUNTERS", 1)
        crowd = Crowd(slots=64, admission={"rules": [{"name": "r", "per": ["tenant"]}]})
        for tenant in "abc":
            crowd.send(request(tenant), 10)
        rule = next(rule for _, rule in crowd.scheduler.admission.rules() if rule.name == "r")
        assert len(rule.counters) == 3


class TestLadder:
    def test_steps_that_change_nothing_are_passed_over(self) -> None:
        steps = [{"lane": "online"}, {"model": MODEL}, {"lane": "batch"}]
        rule = {"name": "r", "match": {"lanes": ["online"]}, "concurrency": 1, "max_queue": 0}
        crowd = Crowd(slots=64, admission={"rules": [rule | {"degrade": steps}]})
        crowd.send(request(), 10)
        second = crowd.send(request(), 10)
        assert second.decision is not None
        assert second.decision.degraded == ("lane=batch",)

    def test_a_request_keeps_its_own_ttft_budget_in_another_lane(self) -> None:
        lanes = [{"name": "online"}, {"name": "batch", "priority": 1, "ttft_budget_s": 9.0}]
        rule = {"name": "r", "match": {"lanes": ["online"]}, "concurrency": 1, "max_queue": 0}
        step = {"degrade": [{"lane": "batch"}]}
        crowd = Crowd(slots=64, admission={"lanes": lanes, "rules": [rule | step]})
        crowd.send(request(), 10)
        own = crowd.send(request(ttft_budget_s=3.0), 10)
        lanes_own = crowd.send(request(), 10)
        assert own.demand is not None
        assert lanes_own.demand is not None
        assert (own.demand.ttft_budget_s, lanes_own.demand.ttft_budget_s) == (3.0, 9.0)


class TestGoodput:
    @pytest.mark.parametrize(
        ("at", "status", "told", "good"),
        [
            (0.5, 200, None, True),
            (2.0, 200, None, False),
            (0.5, 503, None, False),
            (0.5, 200, {}, True),
            (0.5, 200, {"status": 500}, False),
            (0.5, 200, {"error": EngineError.STREAM}, False),
            (0.5, 200, {"output_tokens": 1}, True),
            (0.5, 200, {"output_tokens": 5}, False),
        ],
        ids=str,
    )
    def test_what_counts(
        self, at: float, status: int, told: dict[str, object] | None, good: bool
    ) -> None:
        lane = LanePolicy(name="online", ttft_budget_s=1.0, tpot_budget_s=0.15)
        crowd = Crowd(admission={"lanes": [lane.model_dump()]})
        ticket = crowd.send(request(), 10)
        assert not met_budgets(ticket, lane)
        assert ticket.decision is not None
        crowd.scheduler.response_started(ticket, ticket.decision.endpoints[0], 1, at, status=status)
        ticket.outcome = None if told is None else outcome(ticket.id, **told)
        assert met_budgets(ticket, lane) is good


class TestOutcomes:
    def test_a_failed_answer_teaches_no_length(self) -> None:
        crowd = Crowd()
        ticket = crowd.send(request(), 10)
        assert ticket.booking is not None
        failed = outcome(ticket.id, error=EngineError.STREAM, output_tokens=900)
        crowd.scheduler.outcome(crowd.served, ticket.booking.worker, failed, 1.0)
        assert crowd.scheduler.work.output_tokens(MODEL, "online", 10, None) == 256

    def test_one_told_twice_counts_once(self) -> None:
        crowd = Crowd()
        ticket = crowd.send(request(), 10)
        assert ticket.booking is not None
        for tokens in (700, 5):
            told = outcome(ticket.id, output_tokens=tokens)
            crowd.scheduler.outcome(crowd.served, ticket.booking.worker, told, 1.0)
        assert crowd.scheduler.work.output_tokens(MODEL, "online", 10, None) == 700

    def test_requests_that_wait_to_be_told_of_are_bounded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scheduler_module, "_MAX_RECENT", 3)
        crowd = Crowd()
        tickets = [crowd.send(request(), 10) for _ in range(5)]
        for ticket in tickets:
            crowd.leave(ticket)
        worker = tickets[0].booking.worker if tickets[0].booking else crowd.workers[0]
        crowd.scheduler.outcome(crowd.served, worker, outcome(tickets[0].id), 1.0)
        assert not tickets[0].settled


def test_the_workers_word_for_an_error() -> None:
    assert engine_error(None) is None
    assert engine_error("queue_full") is EngineError.QUEUE_FULL
    assert engine_error("something new") is EngineError.OTHER
