"""Who is next: fairness by work, lanes, promotion, and large requests among small ones."""

from __future__ import annotations

import pytest

from tests.support.crowd import Crowd, request


def weights(**by_tenant: float) -> list[dict[str, object]]:
    return [{"name": name, "weight": weight} for name, weight in by_tenant.items()]


class TestFairness:
    @pytest.mark.parametrize(("weight_a", "weight_b"), [(1, 1), (3, 1)])
    def test_shares_of_work_follow_weights_whatever_the_sizes(
        self, weight_a: float, weight_b: float
    ) -> None:
        """FA1: 20,000-token against 200-token prompts, 60 seconds, both always waiting."""
        crowd = Crowd(tenants=weights(a=weight_a, b=weight_b))
        feed = crowd.keep_waiting(("a", "online", 20_000, 30), ("b", "online", 200, 150))
        feed()
        crowd.run_until(60.0, feed)
        share, _ = crowd.shares([("a", "online"), ("b", "online")])
        assert share == pytest.approx(weight_a / (weight_a + weight_b), rel=0.05)

    def test_a_tenant_that_was_idle_has_saved_nothing_up(self) -> None:
        """FA1."""
        crowd = Crowd()
        feed = crowd.keep_waiting(("a", "online", 500, 40))
        feed()
        crowd.run_until(30.0, feed)
        before = crowd.admitted["a", "online"]
        both = crowd.keep_waiting(("a", "online", 500, 40), ("c", "online", 500, 40))
        crowd.run_until(60.0, both)
        late = crowd.admitted["a", "online"] - before
        assert crowd.admitted["c", "online"] == pytest.approx(late, rel=0.05)

    def test_requests_without_work_still_take_turns(self) -> None:
        """FA1: zero-cost requests do not stall the counter."""
        crowd = Crowd(workers=1, slots=1)
        crowd.send(request("a", output=0), 0)
        for tenant in ("a", "a", "a", "b"):
            crowd.send(request(tenant, output=0), 0)
        crowd.run_until(1.0)
        assert len(crowd.started) == 5
        assert [ticket.lease.cost_tokens for ticket in crowd.started if ticket.lease] == [1] * 5

    def test_what_a_request_really_was_is_paid_for(self) -> None:
        """A tenant whose answers are ten times longer than expected gets fewer of them."""
        crowd = Crowd(admission={"default_output_tokens": 10})
        longer = crowd.keep_waiting(("a", "online", 100, 40), ("b", "online", 100, 40))
        longer()

        def feed() -> None:
            longer()
            for ticket in crowd.started:
                if ticket.lease and not ticket.settled:
                    ticket.settled = True
                    times = 10 if ticket.profile.identity.tenant == "a" else 1
                    crowd.scheduler.admission.settle(ticket.lease, times * ticket.lease.cost_tokens)

        crowd.run_until(20.0, feed)
        assert crowd.admitted["b", "online"] > 5 * crowd.admitted["a", "online"]

    def test_a_tenants_requests_keep_their_order(self) -> None:
        crowd = Crowd(workers=1, slots=2)
        for number in range(40):
            crowd.send(request("ab"[number % 2]), 50 + 37 * (number % 5))
        crowd.run_until(30.0)
        for tenant in "ab":
            mine = [each for each in crowd.started if each.profile.identity.tenant == tenant]
            order = [each.demand.sequence for each in mine if each.demand and each.demand.sequence]
            assert order == sorted(order)
            assert len(mine) == 20


class TestLanes:
    def test_online_goes_first(self) -> None:
        crowd = Crowd(workers=1, slots=1)
        crowd.send(request(), 100)
        late = [crowd.send(request(lane=lane), 100) for lane in ("batch", "online", "online")]
        crowd.run_until(1.0)
        order = [crowd.started.index(ticket) for ticket in late]
        assert order == [3, 1, 2]

    def test_batch_gets_its_minimum_share_under_endless_online_load(self) -> None:
        lanes = [{"name": "online"}, {"name": "batch", "priority": 1, "min_share": 0.1}]
        crowd = Crowd(admission={"lanes": lanes})
        feed = crowd.keep_waiting(("a", "online", 2_000, 40), ("b", "batch", 300, 40))
        feed()
        crowd.run_until(60.0, feed)
        _, batch = crowd.shares([("a", "online"), ("b", "batch")])
        assert batch == pytest.approx(0.1, rel=0.1)

    def test_without_a_minimum_share_batch_waits_for_the_valley(self) -> None:
        lanes = [{"name": "online"}, {"name": "batch", "priority": 1}]
        crowd = Crowd(admission={"lanes": lanes})
        feed = crowd.keep_waiting(("a", "online", 500, 40), ("b", "batch", 500, 5))
        crowd.keep_waiting(("a", "online", 500, 40))()
        crowd.run_until(20.0, feed)
        assert crowd.admitted["b", "batch"] == 0
        crowd.run_until(60.0)
        assert crowd.queued("b", "batch") == 0

    def test_lanes_of_one_priority_share_by_weight(self) -> None:
        lanes = [{"name": "online", "weight": 3}, {"name": "batch", "weight": 1}]
        crowd = Crowd(admission={"lanes": lanes})
        feed = crowd.keep_waiting(("a", "online", 500, 40), ("b", "batch", 500, 40))
        feed()
        crowd.run_until(60.0, feed)
        online, _ = crowd.shares([("a", "online"), ("b", "batch")])
        assert online == pytest.approx(0.75, rel=0.05)

    def test_a_request_is_promoted_at_its_time(self) -> None:
        lanes = [{"name": "online"}, {"name": "batch", "priority": 1, "promote_after_s": 5.0}]
        crowd = Crowd(workers=1, slots=1, admission={"lanes": lanes})
        feed = crowd.keep_waiting(("a", "online", 400, 10))
        feed()
        aged = crowd.send(request("b", "batch"), 400)
        crowd.run_until(4.9, feed)
        assert aged.demand is not None
        assert aged.demand.lane == "batch"
        crowd.run_until(5.2, feed)
        assert aged.decision is not None or aged.demand.lane == "online"
        crowd.run_until(6.0, feed)
        assert aged.decision is not None, "a new tenant of its lane has its turn at once"


class TestLargeAmongSmall:
    def test_a_large_request_is_not_passed_for_ever(self) -> None:
        """Small ones fill a rule's tokens again and again; the large one keeps its turn."""
        rule = {"name": "all", "tokens_in_flight": 4_000}
        crowd = Crowd(slots=64, admission={"rules": [rule]})
        feed = crowd.keep_waiting(("small", "online", 190, 50))
        feed()
        large = crowd.send(request("large"), 3_900)
        crowd.run_until(10.0, feed)
        assert large.decision is not None
        assert crowd.admitted["small", "online"] > 20_000

    def test_a_claim_ends_with_the_request(self) -> None:
        rule = {"name": "all", "tokens_in_flight": 4_000}
        crowd = Crowd(workers=1, slots=64, admission={"rules": [rule]})
        crowd.send(request("long"), 2_000)
        large = crowd.send(request("large"), 3_000)
        small = crowd.send(request("small"), 100)
        assert (large.decision, small.decision) == (None, None)
        crowd.leave(large)
        assert small.decision is not None

    def test_other_rules_go_on_meanwhile(self) -> None:
        rules = [
            {"name": "shared", "match": {"tenants": ["x", "y"]}, "tokens_in_flight": 4_000},
            {"name": "own", "match": {"tenants": ["z"]}, "tokens_in_flight": 4_000},
        ]
        crowd = Crowd(workers=1, slots=64, admission={"rules": rules})
        crowd.send(request("x"), 2_000)
        assert crowd.send(request("x"), 3_000).decision is None
        assert crowd.send(request("y"), 100).decision is None
        assert crowd.send(request("z"), 100).decision is not None
