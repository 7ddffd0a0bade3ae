"""Clients that wait as told find their place kept."""

from __future__ import annotations

import math
import random

import pytest

from extproc.admission.demand import Demand
from extproc.admission.returns import Returns
from extproc.decision.ticket import Ticket
from extproc.errors import DeadlineUnreachable, QueueFull, QueueTimeout, Refusal, WouldWait
from tests.support.crowd import Crowd, request


def demand(number: int = 1, tenant: str = "t", cost_tokens: int = 100) -> Demand:
    return Demand(
        str(number), "m", "m", "", tenant, "", "online", 1.0, cost_tokens, 0, 0.0,
        fingerprint=number, sequence=number,
    )  # fmt: skip


class TestReturns:
    def test_a_place_is_there_from_its_time_on_until_its_grace_is_over(self) -> None:
        returns = Returns()
        assert returns.promise(demand(), "online", 4.0, now=10.0) == 4.0
        assert returns.take_up("t", 1, now=13.0) is None
        for now in (14.0, 16.9):
            place = returns.take_up("t", 1, now)
            assert place is not None
            assert place.sequence == 1
        assert returns.take_up("t", 1, now=17.1) is None
        returns.expire(now=17.1)
        assert (len(returns), returns.kept, returns.lost) == (0, 0, 1)

    def test_it_is_the_tenants_alone(self) -> None:
        returns = Returns()
        returns.promise(demand(), "online", 1.0, now=0.0)
        assert returns.take_up("other", 1, now=1.0) is None
        assert returns.take_up("t", 2, now=1.0) is None

    def test_who_comes_too_early_is_told_what_is_left(self) -> None:
        returns = Returns()
        returns.promise(demand(), "online", 4.0, now=0.0)
        assert returns.promise(demand(), "online", 9.0, now=1.0) == pytest.approx(3.0)
        assert len(returns) == 1

    def test_who_was_in_vain_there_again_keeps_its_place_in_line(self) -> None:
        returns = Returns()
        returns.promise(demand(), "online", 1.0, now=0.0)
        assert returns.promise(demand(), "online", 2.0, now=1.5) == 2.0
        assert returns.take_up("t", 1, now=2.0) is None
        place = returns.take_up("t", 1, now=3.5)
        assert place is not None
        assert place.sequence == 1

    def test_work_counts_by_the_share_that_comes_back(self) -> None:
        returns = Returns()
        for number in range(1, 401):
            returns.promise(demand(number), "online", 1.0, now=0.0)
            if number % 4 == 0:
                returns.settle("t", number)
        assert returns.tokens("online") == pytest.approx(returns.share * 30_000)
        assert returns.tokens_of("online", "t") == returns.tokens("online")
        returns.expire(now=10.0)
        assert returns.tokens("online") == 0.0

    def test_the_share_follows_what_clients_do(self) -> None:
        returns = Returns()
        now = 0.0
        for number in range(1, 1_001):
            returns.promise(demand(number), "online", 1.0, now)
            if number % 4 == 0:
                returns.settle("t", number)
            now += 10.0
            returns.expire(now)
        assert returns.share == pytest.approx(0.25, abs=0.12)

    def test_what_is_due_soon_is_less_than_all(self) -> None:
        returns = Returns()
        for number, wait_s in enumerate((0.5, 2.0, 8.0, 40.0), start=1):
            returns.promise(demand(number), "online", wait_s, now=100.0)
        due = [returns.tokens_due("online", within_s, 100.0) for within_s in (0.0, 0.6, 3.0, 9.0)]
        assert due == [0.0, *(returns.share * tokens for tokens in (100, 200, 300))]
        assert returns.tokens_due("online", math.inf, 100.0) == returns.share * 400
        assert returns.tokens_due("batch", math.inf, 100.0) == 0.0

    def test_places_are_bounded(self) -> None:
        returns = Returns()
        for number in range(1, 9_001):
            assert returns.promise(demand(number), "online", 1.0, now=0.0) == 1.0
        assert len(returns) == 8_192

    def test_places_taken_up_leave_nothing_behind(self) -> None:
        returns = Returns()
        for number in range(1, 1_001):
            returns.promise(demand(number), "online", 60.0, now=0.0)
            returns.settle("t", number)
        returns.expire(now=0.0)
        assert len(returns._ends) <= 64

    def test_a_request_without_a_body_of_its_own_gets_none(self) -> None:
        returns = Returns()
        assert returns.promise(demand(0), "online", 1.0, now=0.0) == 1.0
        assert len(returns) == 0


class TestComingBack:
    """Two workers of eight slots, about one second a request; little wait is in the budget."""

    def crowd(self, max_queue: int = 1_000) -> Crowd:
        rng = random.Random(5)
        return Crowd(service_s=lambda _: rng.uniform(0.5, 1.5), pool={"max_queue": max_queue})

    def ask(self, crowd: Crowd, number: int, tenant: str = "t") -> Refusal | Ticket:
        profile = request(tenant, fingerprint=number, ttft_budget_s=0.5)
        return crowd.try_send(profile, 100)

    def test_every_client_that_waits_as_told_is_served_at_its_first_return(self) -> None:
        """Three times what the workers can do, every fifth client comes back."""
        crowd = self.crowd()
        told: list[tuple[float, int, float, float]] = []
        ratios: list[float] = []
        returned: list[Refusal | Ticket] = []
        began: dict[int, tuple[float, float]] = {}
        number = 0

        def feed() -> None:
            nonlocal number
            while number < crowd.now * 48 and crowd.now < 30:
                number += 1
                made = self.ask(crowd, number, f"t{number % 7}")
                if isinstance(made, DeadlineUnreachable) and number % 5 == 0:
                    assert made.retry_after_s is not None
                    due = crowd.now + made.retry_after_s
                    told.append((due, number, crowd.now, made.retry_after_s))
            for entry in [each for each in told if each[0] <= crowd.now]:
                told.remove(entry)
                _, back, refused_at, announced_s = entry
                returned.append(self.ask(crowd, back, f"t{back % 7}"))
                began[back] = (refused_at, announced_s)

        crowd.run_until(60.0, feed)
        assert len(returned) > 100
        tickets = [each for each in returned if isinstance(each, Ticket)]
        served = [each for each in tickets if each.decision is not None]
        assert len(served) >= 0.98 * len(returned)
        assert len(told) == 0
        for ticket in served:
            assert ticket.decision is not None
            refused_at, announced_s = began[ticket.profile.fingerprint]
            ran_at = ticket.arrived_at + ticket.decision.queue_wait_s
            ratios.append(announced_s / (ran_at - refused_at))
        within = sum(0.5 <= ratio <= 2.0 for ratio in ratios)
        assert within >= 0.9 * len(ratios)

    def test_it_goes_before_what_its_tenant_asked_later(self) -> None:
        crowd = self.crowd(max_queue=20)
        for number in range(1, 17):
            self.ask(crowd, number)
        first = self.refused(crowd, 100)
        assert first.retry_after_s is not None
        crowd.run_until(first.retry_after_s)
        for number in range(200, 230):
            crowd.try_send(request("t", fingerprint=number), 100)
        later = list(crowd.waiting)
        back = self.ask(crowd, 100)
        assert isinstance(back, Ticket)
        crowd.run_until(crowd.now + 5.0)
        assert len(later) > 5
        order = crowd.started
        assert order.index(back) < min(order.index(each) for each in later)

    def test_one_that_waited_in_vain_is_told_and_kept_a_place_too(self) -> None:
        crowd = self.crowd()
        for number in range(1, 17):
            self.ask(crowd, number)
        waits = crowd.send(request("t", fingerprint=50, max_queue_time_s=0.2), 100)
        crowd.run_until(0.3)
        assert isinstance(waits.refusal, QueueTimeout)
        [pool] = crowd.scheduler.admission.pools.values()
        assert [place.sequence for place in pool.returns.places] == [waits.demand.sequence]  # type: ignore[union-attr]

    def test_a_prompt_too_large_for_its_budget_is_late_rather_than_sent_away_for_ever(
        self,
    ) -> None:
        crowd = self.crowd()
        number = 0

        def feed() -> None:
            nonlocal number
            while number < crowd.now * 48:
                number += 1
                self.ask(crowd, number, f"t{number % 7}")

        crowd.run_until(10.0, feed)
        large = request("t9", fingerprint=10**6, ttft_budget_s=1e-6)
        for _ in range(4):
            made = crowd.try_send(large, 100)
            if isinstance(made, Ticket):
                crowd.run_until(crowd.now + 2.0, feed)
            refusal = made.refusal if isinstance(made, Ticket) else made
            if refusal is None:
                break
            assert refusal.retry_after_s is not None
            crowd.run_until(crowd.now + refusal.retry_after_s, feed)
        assert isinstance(made, Ticket)
        assert made.decision is not None

    def test_who_does_not_want_to_wait_gets_no_place(self) -> None:
        crowd = self.crowd()
        for number in range(1, 17):
            self.ask(crowd, number)
        made = crowd.try_send(request("t", fingerprint=60, max_queue_time_s=0.0), 100)
        assert isinstance(made, WouldWait)
        [pool] = crowd.scheduler.admission.pools.values()
        assert len(pool.returns) == 0

    def test_a_reload_keeps_places(self) -> None:
        crowd = self.crowd(max_queue=20)
        for number in range(1, 17):
            self.ask(crowd, number)
        self.refused(crowd, 100)
        crowd.scheduler.reload(crowd.scheduler.policy, crowd.now)
        [pool] = crowd.scheduler.admission.pools.values()
        assert len(pool.returns) == 1

    def refused(self, crowd: Crowd, number: int) -> Refusal:
        """Fill the queue until this one is told to come back."""
        for other in range(1_000, 1_020):
            self.ask(crowd, other)
        made = self.ask(crowd, number)
        assert isinstance(made, QueueFull)
        return made
