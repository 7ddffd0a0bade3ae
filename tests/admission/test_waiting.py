"""Deadlines, degrade ladders, reload and rollout: what happens to those who cannot run."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from extproc.decision.ticket import ServeInstead, Ticket
from extproc.errors import DeadlineUnreachable, PolicyError, QueueFull, QueueTimeout, Refusal
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import MODEL, policy, pool_policy
from tests.support.crowd import AMPLE, Crowd, request


def one_slot(**changes: Any) -> Crowd:
    return Crowd(workers=1, slots=1, service_s=lambda _: 0.3, **changes)


class TestDeadlines:
    def test_expired_requests_never_run_and_the_fresh_one_goes_first(self) -> None:
        """QU3: 1,000 with a deadline of 200 ms, room after 300 ms."""
        crowd = one_slot()
        crowd.send(request(), 10)
        for _ in range(1_000):
            crowd.send(request(deadline_s=0.2), 10)
        crowd.run_until(0.29)
        fresh = crowd.send(request(), 10)
        crowd.run_until(0.35)
        assert len(crowd.refused) == 1_000
        assert all(isinstance(each.refusal, QueueTimeout) for each in crowd.refused)
        assert crowd.started[1:] == [fresh]

    def test_it_is_one_absolute_time_from_arrival(self) -> None:
        """QU3: the clock starts when the request came, not when its text was tokenised."""
        crowd = one_slot()
        crowd.send(request(), 10)
        late = crowd.scheduler.arrive(
            crowd.served, request(deadline_s=0.2), (), now=0.15, arrived_at=0.0
        )
        assert late.demand is not None
        assert late.demand.expires_at == pytest.approx(0.2)

    def test_what_cannot_be_met_is_refused_at_the_door(self) -> None:
        crowd = one_slot()
        for _ in range(20):
            crowd.send(request(), 10)
        crowd.run_until(1.0)
        refusal = crowd.try_send(request(deadline_s=1.0), 10)
        assert isinstance(refusal, DeadlineUnreachable)
        assert refusal.http_status == 429
        assert refusal.retry_after_s == pytest.approx(len(crowd.waiting) * 0.3, rel=0.35)
        assert isinstance(crowd.try_send(request(deadline_s=30.0), 10), Ticket)

    def test_a_lanes_ttft_budget_counts_only_if_the_request_must_wait(self) -> None:
        lanes = [{"name": "online", "ttft_budget_s": 0.5}]
        crowd = one_slot(admission={"lanes": lanes})
        assert crowd.send(request(), 50_000).decision is not None
        waits = crowd.send(request(), 10)
        assert waits.demand is not None
        assert waits.demand.expires_at == pytest.approx(0.5)

    def test_the_request_may_shorten_its_own_wait(self) -> None:
        crowd = one_slot()
        crowd.send(request(), 10)
        crowd.send(request(), 10)
        short = crowd.send(request(max_queue_time_s=0.1), 10)
        crowd.run_until(0.2)
        assert isinstance(short.refusal, QueueTimeout)
        assert short.refusal.reason == f"capacity:{MODEL}"

    def test_late_first_tokens_make_the_door_earlier(self) -> None:
        """What a prefill takes beside others is learned, and a budget leaves room for it."""
        lanes = [{"name": "online", "ttft_budget_s": 1.0}]
        crowd = one_slot(admission={"lanes": lanes})
        for _ in range(20):
            ticket = crowd.send(request(), 10)
            assert ticket.decision is not None
            crowd.scheduler.response_started(
                ticket, ticket.decision.endpoints[0], 1, crowd.now + 0.6
            )
            crowd.run_until(crowd.now + 1.0)
        crowd.send(request(), 10)
        waits = crowd.send(request(), 10)
        assert waits.demand is not None
        assert waits.demand.expires_at - crowd.now == pytest.approx(0.4, abs=0.1)


class TestDegrade:
    def ladder(self, *steps: dict[str, Any], **rule: Any) -> Crowd:
        limits: dict[str, Any] = {"concurrency": 1, "max_queue": 0} | rule
        rule_ = {"name": "r", "match": {"lanes": ["online"]}, "degrade": list(steps)} | limits
        return Crowd(slots=64, admission={"rules": [rule_]})

    def test_another_lane(self) -> None:
        crowd = self.ladder({"lane": "batch"})
        crowd.send(request(), 10)
        second = crowd.send(request(), 10)
        assert second.decision is not None
        assert (second.decision.lane, second.decision.degraded) == ("batch", ("lane=batch",))

    def test_a_shorter_answer(self) -> None:
        crowd = self.ladder({"max_output_tokens": 50}, concurrency=10, tokens_in_flight=1_000)
        crowd.send(request(output=500), 400)
        second = crowd.send(request(output=500), 200)
        assert second.decision is not None
        assert second.decision.max_output_tokens == 50
        assert second.lease is not None
        assert second.lease.cost_tokens == 250

    def test_a_shorter_answer_is_no_step_for_a_short_one(self) -> None:
        crowd = self.ladder({"max_output_tokens": 50})
        crowd.send(request(), 10)
        assert isinstance(crowd.try_send(request(output=20), 10), QueueFull)

    def test_steps_add_up(self) -> None:
        crowd = self.ladder({"max_output_tokens": 50}, {"lane": "batch"})
        crowd.send(request(), 10)
        second = crowd.send(request(output=500), 10)
        assert second.decision is not None
        assert second.decision.degraded == ("max_output_tokens=50", "lane=batch")

    def test_another_model_is_asked_with_its_own_tokens(self) -> None:
        rule = {"name": "r", "match": {"models": [MODEL]}, "concurrency": 1, "max_queue": 0}
        whole = policy(
            pool_policy(admission=AMPLE, workers=["10.0.0.1:1"]),
            pool_policy(model="small", workers=["10.0.0.2:1"]),
            admission={"rules": [rule | {"degrade": [{"model": "small"}]}]},
        )
        from tests.support.builders import scheduler

        some = scheduler(*whole.pools, admission=whole.admission.model_dump())
        served = some.models[MODEL]
        some.arrive(served, request(), (), now=0.0)
        with pytest.raises(ServeInstead) as caught:
            some.arrive(served, request(), (), now=0.0)
        assert (caught.value.model, caught.value.steps) == ("small", ("model=small",))
        ticket = some.arrive(
            some.models["small"], request(model="small"), (), now=0.0, steps=caught.value.steps
        )
        assert ticket.decision is not None
        assert (ticket.decision.model, ticket.decision.endpoints) == ("small", ("10.0.0.2:1",))

    def test_a_body_that_cannot_be_changed_takes_no_step_that_would(self) -> None:
        from msgspec.structs import replace

        crowd = self.ladder({"max_output_tokens": 5}, {"lane": "batch"})
        crowd.send(request(), 10)
        second = crowd.send(replace(request(output=500), editable=False), 10)
        assert second.decision is not None
        assert second.decision.degraded == ("lane=batch",)

    def test_without_a_way_out_the_first_refusal_is_told(self) -> None:
        crowd = self.ladder({"lane": "batch"})
        crowd.send(request(), 10)
        rules = crowd.scheduler.policy.admission.rules
        assert rules[0].degrade
        assert isinstance(crowd.try_send(request(lane="online", max_queue_time_s=0), 10), Ticket)


class TestReload:
    def changed(self, **admission: Any) -> Any:
        return policy(pool_policy(admission=AMPLE), admission=admission)

    def test_a_lower_limit_binds_from_the_next_on(self) -> None:
        """CO1: quota usage survives a limit change."""
        crowd = Crowd(workers=1, slots=64, admission={"rules": [{"name": "r", "concurrency": 4}]})
        running = [crowd.send(request(), 10) for _ in range(4)]
        waiting = crowd.send(request(), 10)
        crowd.scheduler.reload(self.changed(rules=[{"name": "r", "concurrency": 2}]), now=0.0)
        for ticket in running[:2]:
            crowd.leave(ticket)
            assert waiting.decision is None
        crowd.leave(running[2])
        assert waiting.decision is not None

    def test_a_higher_limit_wakes_who_waits(self) -> None:
        crowd = Crowd(workers=1, slots=64, admission={"rules": [{"name": "r", "concurrency": 1}]})
        made = [crowd.send(request(), 10) for _ in range(3)]
        woken = crowd.scheduler.reload(self.changed(), now=0.0)
        assert woken == made[1:]

    def test_rates_remember_what_was_used(self) -> None:
        rule = {"name": "r", "requests_per_minute": 60, "burst_s": 10}
        crowd = Crowd(workers=1, slots=64, admission={"rules": [rule]})
        for _ in range(10):
            assert crowd.send(request(), 10).decision is not None
        crowd.scheduler.reload(self.changed(rules=[rule | {"burst_s": 20}]), now=0.0)
        assert crowd.send(request(), 10).decision is None

    def test_what_was_learned_survives(self) -> None:
        crowd = Crowd()
        for _ in range(20):
            crowd.scheduler.work.observe(MODEL, "online", 100, 700)
        crowd.scheduler.reload(self.changed(), now=0.0)
        assert crowd.scheduler.work.output_tokens(MODEL, "online", 100, None) == 700

    def test_what_needs_a_restart_is_refused_and_nothing_changes(self) -> None:
        """CO1."""
        crowd = Crowd()
        before = crowd.scheduler.policy
        with pytest.raises(PolicyError, match="pools"):
            crowd.scheduler.reload(policy(pool_policy(model="other")), now=0.0)
        assert crowd.scheduler.policy is before

    def test_six_hundred_reloads_leak_nothing(self) -> None:
        """CO1."""
        rules = [{"name": "r", "per": ["tenant"], "concurrency": 1}]
        crowd = Crowd(workers=1, slots=2, admission={"rules": rules})
        for number in range(10):
            crowd.send(request(f"t{number}"), 10)
        for number in range(600):
            limits = [{"name": "r", "per": ["tenant"], "concurrency": 1 + number % 2}]
            crowd.scheduler.reload(self.changed(rules=limits), now=0.0)
        admission = crowd.scheduler.admission
        assert (admission.running, admission.waiting) == (2, 8)
        crowd.run_until(10.0)
        assert len(crowd.started) == 10
        for _, rule in admission.rules():
            assert sum(counter.requests for counter in rule.counters.values()) == 0


class TestRollout:
    def test_off_runs_everything_at_once(self) -> None:
        crowd = one_slot(rollout={"admission": "off"})
        made = [crowd.send(request(), 10) for _ in range(20)]
        assert all(each.decision is not None for each in made)
        told = crowd.scheduler.estimate(crowd.served, request(), (PromptKeys(10),), crowd.now)
        assert (told.verdict, told.expected_wait_s) == ("allow", 0.0)
        crowd.run_until(5.0)
        assert crowd.scheduler.admission.running == 0

    def test_shadow_tells_what_it_would_have_done_and_does_nothing(self) -> None:
        rules = [{"name": "r", "concurrency": 1, "max_queue": 1}]
        crowd = Crowd(slots=64, admission={"rules": rules}, rollout={"admission": "shadow"})
        made = [crowd.send(request(), 10) for _ in range(3)]
        assert all(each.decision is not None for each in made)
        assert [each.shadow for each in made] == [None, "waits", "waits"]
        assert crowd.scheduler.admission.waiting == 0
        crowd.run_until(5.0)
        for _, rule in crowd.scheduler.admission.rules():
            assert all(counter.requests == 0 for counter in rule.counters.values())


class TestRetryAfter:
    @pytest.mark.parametrize("clients", [60, 120])
    def test_it_is_what_a_returning_client_then_waits(self, clients: int) -> None:
        """Closed loop over a full queue of 40: told and then waited are mostly within a factor
        of 2, and equal in the middle."""
        crowd = Crowd(service_s=lambda _: 1.0, pool={"max_queue": 40})
        told: dict[int, float] = {}
        back: list[tuple[float, int]] = []
        ratios: list[float] = []
        asked: dict[Ticket, int] = {}

        def ask(client: int) -> None:
            made: Refusal | Ticket = crowd.try_send(request(f"t{client % 5}"), 100)
            if isinstance(made, Refusal):
                assert made.retry_after_s is not None
                told[client] = made.retry_after_s
                back.append((crowd.now + made.retry_after_s, client))
            else:
                asked[made] = client

        def feed() -> None:
            for ticket in [each for each in asked if each.decision is not None]:
                client = asked.pop(ticket)
                assert ticket.decision is not None
                waited = ticket.decision.queue_wait_s
                if client in told and crowd.now > 10.0 and waited > 0:
                    ratios.append(told.pop(client) / waited)
                back.append((crowd.now + 0.5, client))
            due = [each for each in back if each[0] <= crowd.now]
            back[:] = [each for each in back if each[0] > crowd.now]
            for _, client in sorted(due):
                ask(client)

        back.extend((0.01 * client, client) for client in range(clients))
        crowd.run_until(60.0, feed)
        within = sum(0.5 <= ratio <= 2.0 for ratio in ratios) / len(ratios)
        assert len(ratios) > 100
        assert within > 0.7
        assert 0.8 < median(ratios) < 1.25
