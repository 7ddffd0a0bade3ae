from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.decision.ticket import Ticket
from extproc.errors import ModelNotFound, NoReadyWorker, QueueFull, QueueTimeout
from extproc.fleet.worker import (
    EngineError,
    Introduction,
    LoadReport,
    Outcome,
    Worker,
    WorkerState,
)
from extproc.request.profile import Endpoint
from extproc.scheduler import Scheduler
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import (
    MODEL,
    Fleet,
    address,
    delta,
    join,
    pass_through,
    pool_policy,
    profile,
    prompt_keys,
    ready,
    scheduler,
    snapshot,
    text_blocks,
)

X = prompt_keys(text_blocks(1, 20))
Y = prompt_keys(text_blocks(2, 20))
GONE = LoadReport(WorkerState.DOWN)


def decided(ticket: Ticket) -> tuple[str, ...]:
    assert ticket.decision is not None
    return ticket.decision.endpoints


def random_prompt(rng: random.Random, blocks: int = 20) -> PromptKeys:
    return prompt_keys(rng.choices(range(50_000), k=blocks * 4))


class TestModels:
    def models(self) -> Scheduler:
        first = pool_policy(model="a", aliases=["alias"], adapters=["lora"])
        return scheduler(first, pool_policy(model="b"))

    @pytest.mark.parametrize(
        ("name", "pool"), [("a", "a"), ("alias", "a"), ("lora", "a"), ("b", "b")]
    )
    def test_a_model_name_leads_to_its_pool(self, name: str, pool: str) -> None:
        models = self.models()
        assert models.model_for(profile(model=name)) is models.models[pool]

    @pytest.mark.parametrize("name", ["c", "", None])
    def test_another_model_is_not_found(self, name: str | None) -> None:
        with pytest.raises(ModelNotFound) as caught:
            self.models().model_for(profile(model=name))
        assert caught.value.param == "model"

    def test_a_request_without_a_model_goes_to_a_pool_that_can_serve(self) -> None:
        models = self.models()
        with pytest.raises(NoReadyWorker):
            models.model_for(pass_through())
        join(models.models["b"].pool, 1)
        for name in (None, "unknown"):
            assert models.model_for(pass_through(model=name)) is models.models["b"]
        assert models.model_for(pass_through(model="a")) is models.models["a"]

    def test_an_agent_belongs_to_the_pool_of_a_model_it_serves(self) -> None:
        models = self.models()
        assert models.model_of_agent(["other", "lora"]) is models.models["a"]
        assert models.model_of_agent(["other"]) is None
        assert models.model_of_agent([]) is None


class TestStart:
    def test_without_a_worker_there_is_no_service_and_no_crash(self) -> None:
        """SU1: zero workers do not stop the start."""
        fleet = Fleet()
        with pytest.raises(NoReadyWorker) as caught:
            fleet.arrive(X)
        assert caught.value.retry_after_s == 1.0
        assert fleet.scheduler.tick(1.0) == []
        assert fleet.idle()

    def test_the_first_report_makes_a_worker_of_it(self) -> None:
        """SU1."""
        fleet = Fleet()
        worker = fleet.scheduler.hello(fleet.served, Introduction(address(1), (MODEL,), 4), now=0.0)
        assert worker is not None
        with pytest.raises(NoReadyWorker):
            fleet.arrive(X)
        assert fleet.scheduler.report(fleet.served, worker, ready(), now=0.1) == []
        assert decided(fleet.arrive(X)) == (address(1),)

    def test_after_a_restart_the_first_pick_goes_to_the_warm_worker(self) -> None:
        """SU1: agents send all they have when they connect; four warm and busy workers."""
        fleet = Fleet(workers=4)
        for number, worker in enumerate(fleet.workers):
            prompt = prompt_keys(text_blocks(number, 100))
            fleet.scheduler.snapshot(fleet.served, worker, snapshot(prompt.keys), now=0.0)
            fleet.scheduler.report(fleet.served, worker, ready(running=5.0), now=0.0)
        for number in (2, 0, 3, 1):
            assert fleet.picked(prompt_keys(text_blocks(number, 100))) == address(number)

    def test_after_a_restart_no_worker_is_overbooked(self) -> None:
        """SU1: what runs on the workers is learnt from their reports."""
        fleet = Fleet(workers=2, slots=5)
        for worker in fleet.workers:
            fleet.scheduler.report(fleet.served, worker, ready(running=3.0, waiting=1.0), now=0.0)
        tickets = [fleet.arrive(X) for _ in range(4)]
        assert Counter(decided(each)[0] for each in tickets if each.decision) == {
            address(0): 1,
            address(1): 1,
        }
        assert fleet.admission.waiting == 2

    def test_a_full_pool_says_so_to_the_agent(self) -> None:
        some = scheduler(reports={"max_workers": 1})
        served = some.models[MODEL]
        assert some.hello(served, Introduction(address(1), (MODEL,), 0), now=0.0) is not None
        assert some.hello(served, Introduction(address(2), (MODEL,), 0), now=0.0) is None


class TestDecisions:
    def test_a_decision_says_where_and_why(self) -> None:
        fleet = Fleet(workers=2)
        fleet.pool.credit(fleet.workers[1], X.keys[:10])
        ticket = fleet.arrive(X, now=3.0)
        decision = ticket.decision
        assert decision is not None
        assert decision.endpoints == (address(1), address(0))
        assert (decision.cached_tokens, decision.prompt_tokens) == (40, 81)
        assert (decision.id, decision.queue_wait_s) == (ticket.id, 0.0)
        assert fleet.held(fleet.workers[1]) == (1, 41)

    def test_followers_of_a_prompt_go_where_it_went(self) -> None:
        """The credit is there at once, before any digest tells of it."""
        fleet = Fleet(workers=8)
        first = fleet.picked(X)
        assert [fleet.picked(X) for _ in range(10)] == [first] * 10

    def test_ids_are_our_own_and_distinct(self) -> None:
        """PR5: whatever the client calls its requests."""
        fleet = Fleet(workers=1)
        ids = {fleet.arrive().id for _ in range(50)}
        assert len(ids) == 50
        assert all(len(each) == 16 and int(each, 16) >= 0 for each in ids)

    def test_equal_requests_hold_two_leases_and_one_ends_without_the_other(self) -> None:
        """PR5."""
        fleet = Fleet(workers=1)
        one, two = fleet.arrive(X), fleet.arrive(X)
        fleet.scheduler.finish(one, 1.0)
        assert fleet.admission.running == 1
        assert fleet.held(fleet.workers[0])[0] == 1
        fleet.scheduler.finish(two, 2.0)
        assert fleet.idle()

    def test_the_same_seed_decides_the_same(self) -> None:
        first, second = (
            [fleet.picked(random_prompt(random.Random(n))) for n in range(20)]
            for fleet in (Fleet(workers=5, seed=9), Fleet(workers=5, seed=9))
        )
        assert first == second


class TestCache:
    def test_a_prompt_goes_where_its_beginning_is(self) -> None:
        """CI3: X on A, Y on B: Y+X is B's, X+Y is A's, Z+X has no preference."""
        fleet = Fleet(workers=2, routing={"weights": {"running": 0}})
        x, y, z = (text_blocks(seed, 20) for seed in (1, 2, 3))
        for worker, ids in zip(fleet.workers, (x, y), strict=True):
            made = snapshot(prompt_keys(ids).keys)
            fleet.scheduler.snapshot(fleet.served, worker, made, now=0.0)
        assert fleet.picked(prompt_keys(y + x)) == address(1)
        assert fleet.picked(prompt_keys(x + y)) == address(0)
        ticket = fleet.arrive(prompt_keys(z + x))
        assert ticket.decision is not None
        assert ticket.decision.cached_tokens == 0

    def test_a_worker_that_cleared_its_cache_is_not_preferred(self) -> None:
        """CI1: an empty snapshot of a new epoch, and A is one of two equals."""
        first = Counter[str]()
        for seed in range(40):
            fleet = Fleet(workers=2, seed=seed)
            worker = fleet.workers[0]
            fleet.scheduler.snapshot(fleet.served, worker, snapshot(X.keys), now=0.0)
            assert fleet.picked(X) == address(0)
            cleared = snapshot(epoch=2, sequence=2)
            fleet.scheduler.snapshot(fleet.served, worker, cleared, now=1.0)
            first[fleet.picked(X, now=1.0)] += 1
        assert min(first[address(0)], first[address(1)]) > 8

    def test_deltas_move_the_preference(self) -> None:
        fleet = Fleet(workers=2)
        for number, worker in enumerate(fleet.workers):
            made = snapshot(X.keys[:5] if number == 0 else None)
            fleet.scheduler.snapshot(fleet.served, worker, made, now=0.0)
        fleet.scheduler.delta(fleet.served, fleet.workers[1], delta(X.keys), now=0.0)
        assert fleet.picked(X) == address(1)


class TestQueue:
    def test_who_finds_no_room_waits_and_runs_in_turn(self) -> None:
        fleet = Fleet(workers=1, admission={"max_concurrency": 1})
        running, *waiting = [fleet.arrive(X, now=float(n)) for n in range(4)]
        assert [each.decision for each in waiting] == [None] * 3
        for number, expected in enumerate(waiting):
            assert fleet.scheduler.finish(running, 10.0 + number) == [expected]
            assert expected.decision is not None
            assert expected.decision.queue_wait_s == 9.0
            running = expected
        assert fleet.scheduler.finish(running, 20.0) == []
        assert fleet.idle()

    def test_full_workers_keep_requests_waiting_until_a_report_frees_a_slot(self) -> None:
        fleet = Fleet(workers=1, slots=2)
        worker = fleet.workers[0]
        fleet.scheduler.report(fleet.served, worker, ready(running=2.0), now=0.0)
        ticket = fleet.arrive(X)
        assert ticket.decision is None
        assert fleet.scheduler.report(fleet.served, worker, ready(running=1.0), now=1.0) == [ticket]
        assert decided(ticket) == (address(0),)

    def test_a_full_queue_refuses(self) -> None:
        fleet = Fleet(workers=1, slots=1, admission={"max_queue": 1})
        fleet.arrive()
        fleet.arrive()
        with pytest.raises(QueueFull):
            fleet.arrive()
        assert (fleet.admission.running, fleet.admission.waiting) == (1, 1)

    def test_who_leaves_the_queue_is_not_run(self) -> None:
        """LE1: cancelled while waiting."""
        fleet = Fleet(workers=1, slots=1)
        running, gone, next_one = [fleet.arrive() for _ in range(3)]
        assert fleet.scheduler.finish(gone, 1.0) == []
        assert fleet.scheduler.finish(running, 2.0) == [next_one]
        assert (gone.decision, gone.lease, gone.booking) == (None, None, None)

    def test_who_waited_too_long_is_refused_by_the_tick(self) -> None:
        fleet = Fleet(workers=1, slots=1, admission={"max_queue_time_s": 5.0})
        running, waiting = fleet.arrive(), fleet.arrive(now=1.0)
        assert fleet.scheduler.tick(5.9) == []
        assert fleet.scheduler.tick(6.0) == [waiting]
        assert isinstance(waiting.refusal, QueueTimeout)
        assert (waiting.decision, waiting.ended) == (None, True)
        assert fleet.scheduler.finish(waiting, 7.0) == []
        fleet.scheduler.finish(running, 8.0)
        assert fleet.idle()

    def test_an_expired_request_never_runs(self) -> None:
        """QU3: also when room comes before the tick, and the next fresh one goes first."""
        fleet = Fleet(workers=1, slots=1, admission={"max_queue_time_s": 0.2, "max_queue": 2_000})
        running = fleet.arrive()
        late = [fleet.arrive() for _ in range(1_000)]
        fresh = fleet.arrive(now=0.25)
        assert fleet.scheduler.finish(running, 0.3) == [*late, fresh]
        assert all(isinstance(each.refusal, QueueTimeout) for each in late)
        assert not any(each.decision for each in late)
        assert decided(fresh) == (address(0),)

    def test_when_the_last_worker_goes_nobody_waits_in_vain(self) -> None:
        fleet = Fleet(workers=1, slots=1)
        running, *waiting = [fleet.arrive() for _ in range(3)]
        woken = fleet.scheduler.report(fleet.served, fleet.workers[0], GONE, now=1.0)
        assert woken == waiting
        assert all(isinstance(each.refusal, NoReadyWorker) for each in waiting)
        fleet.scheduler.finish(running, 2.0)
        assert fleet.idle()

    def test_a_lost_worker_wakes_who_waits_for_it(self) -> None:
        fleet = Fleet(workers=1, slots=1)
        running, waiting = fleet.arrive(), fleet.arrive(now=14.0)
        assert fleet.scheduler.tick(16.0) == [waiting]
        assert isinstance(waiting.refusal, NoReadyWorker)
        assert fleet.scheduler.finish(running, 17.0) == []
        assert fleet.idle()


class TestPages:
    """LD5: what takes no part in admission is booked all the same."""

    def test_a_page_needs_no_quota_and_no_slot(self) -> None:
        fleet = Fleet(workers=1, slots=1, admission={"max_concurrency": 1, "max_queue": 0})
        fleet.arrive()
        page = fleet.arrive(profile=pass_through(counted=False))
        assert decided(page) == (address(0),)
        assert page.lease is None
        assert fleet.held(fleet.workers[0])[0] == 2
        fleet.scheduler.finish(page, 1.0)
        assert fleet.held(fleet.workers[0])[0] == 1

    def test_a_page_without_a_worker_is_refused(self) -> None:
        with pytest.raises(NoReadyWorker):
            Fleet().arrive(profile=pass_through(counted=False))


def spread(fleet: Fleet, tickets: list[Ticket]) -> Counter[str]:
    return Counter(decided(each)[0] for each in tickets)


class TestSpread:
    """LD5: eight equal workers and no report while the requests arrive."""

    @pytest.mark.parametrize(
        "what",
        [
            profile(),
            profile(endpoint=Endpoint.EMBEDDINGS),
            pass_through(),
            pass_through(counted=False),
        ],
        ids=["chat", "embeddings", "unknown path", "page"],
    )
    def test_requests_without_a_prefix_are_spread_evenly(self, what: Any) -> None:
        fleet = Fleet(workers=8)
        counts = spread(fleet, [fleet.arrive(profile=what, now=4.0) for _ in range(480)])
        assert sorted(counts.values()) == [60] * 8

    def test_random_prompts_are_spread_evenly(self) -> None:
        fleet = Fleet(workers=8)
        rng = random.Random(4)
        counts = spread(fleet, [fleet.arrive(random_prompt(rng)) for _ in range(480)])
        assert len(counts) == 8
        assert max(counts.values()) <= 1.2 * 60

    def test_identical_prompts_without_cache_weight_are_spread_evenly(self) -> None:
        fleet = Fleet(workers=8, routing={"weights": {"uncached": 0.0}})
        counts = spread(fleet, [fleet.arrive(X) for _ in range(1_000)])
        assert len(counts) == 8
        assert max(counts.values()) <= 1.2 * 125

    def test_identical_prompts_lean_by_no_more_than_the_prefix_is_worth(self) -> None:
        """The holder's lead in requests is what the prefix costs over what a request costs."""
        prompt = prompt_keys(text_blocks(1, 150))
        fleet = Fleet(workers=8)
        counts = spread(fleet, [fleet.arrive(prompt) for _ in range(480)])
        worth = (3.0 + 1.0) * prompt.tokens / 120.0
        values = [counts[address(number)] for number in range(8)]
        assert max(values) - min(values) <= worth + 1
        assert min(values) > 0

    def test_a_hot_prefix_never_drives_a_worker_past_its_slots(self) -> None:
        prompt = prompt_keys(text_blocks(1, 400))
        fleet = Fleet(workers=8, slots=70)
        tickets = [fleet.arrive(prompt) for _ in range(600)]
        counts = spread(fleet, [each for each in tickets if each.decision])
        assert sorted(counts.values()) == [70] * 8
        assert fleet.admission.waiting == 600 - 560

    def test_ties_are_broken_at_random(self) -> None:
        firsts = Counter(Fleet(workers=8, seed=seed).picked(X) for seed in range(400))
        assert len(firsts) == 8
        assert max(firsts.values()) < 100


class TestStaleReports:
    def test_a_silent_worker_gets_nothing_while_others_speak(self) -> None:
        """LD3: A reported idle and fell silent, B and C report medium load; 100 requests."""
        fleet = Fleet(workers=3)
        fleet.pool.credit(fleet.workers[0], X.keys)
        for worker in fleet.workers[1:]:
            fleet.scheduler.report(fleet.served, worker, ready(running=20.0), now=5.0)
        tickets = [fleet.arrive(X, now=5.0) for _ in range(100)]
        assert set(spread(fleet, tickets)) == {address(1), address(2)}
        assert {decided(each)[-1] for each in tickets} == {address(0)}

    def test_all_silent_still_serve_and_spread(self) -> None:
        """LD3: then the three share by what we have on them."""
        fleet = Fleet(workers=3)
        tickets = [fleet.arrive(now=9.0) for _ in range(99)]
        assert sorted(spread(fleet, tickets).values()) == [33, 33, 33]

    def test_load_rises_between_reports(self) -> None:
        """LD3: in-flight requests are added to the last report."""
        fleet = Fleet(workers=2)
        fleet.scheduler.report(fleet.served, fleet.workers[1], ready(running=10.0), now=0.0)
        assert sorted(spread(fleet, [fleet.arrive() for _ in range(30)]).values()) == [10, 20]


class TestPrefillsThatOutliveTheirCredit:
    """A prompt is expected on its worker until the engine's digest can tell of it."""

    def expected(self, started_at: float, looked_at: float) -> int:
        """Cached tokens predicted for the second request of a prompt."""
        fleet = Fleet(workers=1, overlay={"ttl_s": 2.0, "ttl_without_digest_s": 2.0})
        now = 0.0
        first = fleet.arrive(X, now=now)
        while now < looked_at:
            now += 0.5
            fleet.scheduler.report(fleet.served, fleet.workers[0], ready(), now=now)
            if now >= started_at:
                fleet.scheduler.response_started(first, address(0), 1, now)
            fleet.scheduler.tick(now)
        second = fleet.arrive(X, now=now)
        assert second.decision is not None
        return second.decision.cached_tokens

    @pytest.mark.parametrize("prefill_s", [0.5, 3.5, 11.0, 29.0])
    def test_it_is_expected_for_a_while_after_the_first_token(self, prefill_s: float) -> None:
        assert self.expected(prefill_s, prefill_s + 1.5) > 0

    def test_then_the_digest_must_tell(self) -> None:
        assert self.expected(11.0, 17.0) == 0

    def test_an_answer_that_takes_longer_is_no_prefill(self) -> None:
        assert self.expected(60.0, 36.0) == 0


class TestResponses:
    def test_the_first_token_ends_the_prefill(self) -> None:
        fleet = Fleet(workers=1)
        ticket = fleet.arrive(X)
        fleet.scheduler.response_started(ticket, address(0), 1, 2.0)
        assert fleet.held(fleet.workers[0]) == (1, 0)
        assert (ticket.started_at, ticket.served_by) == (2.0, address(0))

    def test_an_unknown_server_is_taken_for_the_pick(self) -> None:
        fleet = Fleet(workers=2)
        ticket = fleet.arrive(X)
        fleet.scheduler.response_started(ticket, None, 1, 1.0)
        assert ticket.served_by == decided(ticket)[0]
        assert not fleet.pool.table.last_resort(1.0)[[0, 1]].any()

    def test_load_and_credit_move_to_the_worker_that_served(self) -> None:
        """RT1: the first refused, the second served; counts end at (0,1) and then (0,0)."""
        fleet = Fleet(workers=3)
        fleet.pool.credit(fleet.workers[0], X.keys)
        ticket = fleet.arrive(X)
        first, second, _ = decided(ticket)
        assert first == address(0)
        fleet.scheduler.response_started(ticket, second, 2, 1.0)
        by_address = {worker.address: worker for worker in fleet.workers}
        assert (fleet.held(by_address[first]), fleet.held(by_address[second])) == ((0, 0), (1, 0))
        assert int(fleet.pool.index.longest_runs(X.keys)[by_address[second].column]) == 20
        assert fleet.picked(X, now=1.0) == second
        fleet.scheduler.finish(ticket, 3.0)
        assert fleet.idle()

    def test_workers_that_were_retried_away_from_are_the_last_resort_for_a_while(self) -> None:
        """RT1: marks expire."""
        fleet = Fleet(workers=3)
        ticket = fleet.arrive(X)
        endpoints = decided(ticket)
        fleet.scheduler.response_started(ticket, endpoints[2], 3, 1.0)
        suspects = fleet.pool.table.last_resort(1.0)
        columns = [fleet.pool.workers[each].column for each in endpoints]
        assert suspects[columns].tolist() == [True, True, False]
        for worker in fleet.workers:
            fleet.scheduler.report(fleet.served, worker, ready(), now=2.0)
        assert fleet.pool.table.last_resort(2.9)[columns].any()
        assert not fleet.pool.table.last_resort(3.0)[columns].any()

    def test_a_worker_that_served_at_its_second_try_is_no_suspect(self) -> None:
        fleet = Fleet(workers=2)
        ticket = fleet.arrive(X)
        first = decided(ticket)[0]
        fleet.scheduler.response_started(ticket, first, 2, 1.0)
        assert not fleet.pool.table.last_resort(1.0)[fleet.pool.workers[first].column]

    @pytest.mark.parametrize("attempts", [-1, 0, 1, 99])
    def test_odd_numbers_of_attempts_do_no_harm(self, attempts: int) -> None:
        fleet = Fleet(workers=1)
        ticket = fleet.arrive(X)
        fleet.scheduler.response_started(ticket, address(0), attempts, 1.0)
        assert fleet.held(fleet.workers[0]) == (1, 0)

    def test_a_server_outside_the_pool_moves_nothing(self) -> None:
        fleet = Fleet(workers=1)
        ticket = fleet.arrive(X)
        fleet.scheduler.response_started(ticket, "10.9.9.9:1", 2, 1.0)
        assert fleet.held(fleet.workers[0]) == (1, 0)
        assert ticket.served_by == "10.9.9.9:1"

    def test_a_suspect_that_has_left_meanwhile_is_no_harm(self) -> None:
        fleet = Fleet(workers=2)
        ticket = fleet.arrive(X)
        first, second = decided(ticket)
        other = fleet.pool.workers[second]
        fleet.scheduler.report(fleet.served, other, ready(), now=10.0)
        fleet.scheduler.tick(16.0)
        assert first not in fleet.pool.workers
        fleet.scheduler.response_started(ticket, second, 2, 16.0)
        assert fleet.held(other) == (1, 0)

    def test_nothing_starts_before_the_decision_or_after_the_end(self) -> None:
        fleet = Fleet(workers=1, slots=1)
        running, waiting = fleet.arrive(), fleet.arrive()
        fleet.scheduler.response_started(waiting, address(0), 1, 1.0)
        assert waiting.started_at is None
        fleet.scheduler.finish(running, 2.0)
        fleet.scheduler.response_started(running, address(0), 1, 3.0)
        assert running.started_at is None

    def test_the_list_holds_ipv6_in_brackets(self) -> None:
        """RT1."""
        fleet = Fleet()
        worker = fleet.scheduler.hello(
            fleet.served, Introduction("[fd00::5]:8000", (MODEL,), 0), now=0.0
        )
        assert worker is not None
        fleet.scheduler.report(fleet.served, worker, ready(), now=0.0)
        assert decided(fleet.arrive(X)) == ("[fd00::5]:8000",)


class TestEnding:
    def test_a_request_ends_once(self) -> None:
        """LE1."""
        fleet = Fleet(workers=1)
        ticket, other = fleet.arrive(X), fleet.arrive(X)
        for _ in range(3):
            fleet.scheduler.finish(ticket, 1.0)
        assert fleet.admission.running == 1
        assert fleet.held(fleet.workers[0])[0] == 1
        fleet.scheduler.finish(other, 2.0)
        assert fleet.idle()

    def test_a_request_outlives_its_worker(self) -> None:
        """LE1: worker death while it runs."""
        fleet = Fleet(workers=1)
        ticket = fleet.arrive(X)
        fleet.scheduler.tick(100.0)
        join(fleet.pool, 0, now=100.0)
        fleet.scheduler.finish(ticket, 101.0)
        assert fleet.idle()


class SchedulerMachine(RuleBasedStateMachine):
    """LE1: any order of what can happen to requests and workers."""

    SLOTS = 3
    LIMIT = 5

    @initialize(seed=st.integers(0, 5))
    def start(self, seed: int) -> None:
        self.now = 0.0
        limits = {"max_concurrency": self.LIMIT, "max_queue": 6, "max_queue_time_s": 20.0}
        self.fleet = Fleet(seed=seed, admission=limits)
        self.scheduler, self.served = self.fleet.scheduler, self.fleet.served
        self.tickets: list[Ticket] = []
        self.finished: list[Ticket] = []
        self.queue: list[Ticket] = []
        self.cancelled: list[Ticket] = []
        for number in range(2):
            self.speak(number)

    # What happens

    @rule(blocks=st.integers(0, 8), seed=st.integers(0, 3), counted=st.booleans())
    def arrive(self, blocks: int, seed: int, counted: bool) -> None:
        prompts = (prompt_keys(text_blocks(seed, blocks)),)
        what = profile() if counted else pass_through(counted=False)
        usable = self.served.pool.table.usable().any()
        try:
            ticket = self.fleet.arrive(*prompts, now=self.now, profile=what)
        except NoReadyWorker:
            assert not usable
        except QueueFull:
            assert len(self.queue) == 6
        else:
            assert usable
            self.tickets.append(ticket)
            if ticket.decision is None:
                self.queue.append(ticket)
            elif counted:
                self.check_slot(ticket)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Of a running or a waiting request."""
        self.finish_one(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.finished))
        assert self.scheduler.finish(ticket, self.now) == []

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), attempts=st.integers(0, 4), served=st.integers(-1, 4))
    def respond(self, data: st.DataObject, attempts: int, served: int) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        by = None if served < 0 else address(served)
        self.woken(self.scheduler.response_started(ticket, by, attempts, self.now))

    @rule(number=st.integers(0, 3), foreign=st.integers(0, 4), is_ready=st.booleans())
    def speak(self, number: int, foreign: int = 0, is_ready: bool = True) -> None:
        """An agent's hello and report."""
        worker = self.scheduler.hello(
            self.served, Introduction(address(number), (MODEL,), self.SLOTS), self.now
        )
        assert worker is not None
        load = LoadReport(
            WorkerState.READY if is_ready else WorkerState.DOWN, running=float(foreign)
        )
        self.woken(self.scheduler.report(self.served, worker, load, self.now))

    @rule(number=st.integers(0, 3), seed=st.integers(0, 3), epoch=st.integers(1, 3))
    def digest(self, number: int, seed: int, epoch: int) -> None:
        worker = self.served.pool.workers.get(address(number))
        if worker is not None:
            made = snapshot(prompt_keys(text_blocks(seed, 8)).keys, epoch=epoch)
            self.scheduler.snapshot(self.served, worker, made, self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 16.0, 25.0]))
    def tick(self, seconds: float) -> None:
        """Silent workers become stale, then lost; waits expire."""
        self.now += seconds
        self.woken(self.scheduler.tick(self.now))

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def wait(self, seconds: float) -> None:
        """Time passes and nothing happens yet."""
        self.now += seconds

    # What is checked on the way

    def woken(self, woken: list[Ticket]) -> None:
        for ticket in woken:
            assert ticket is self.queue.pop(0), "first in, first out"
            assert (ticket.decision is None) != (ticket.refusal is None)
            if ticket.refusal is not None:
                self.finished.append(ticket)
            else:
                waited = self.now - ticket.arrived_at
                assert waited < 20.0
                self.check_slot(ticket)

    def check_slot(self, ticket: Ticket) -> None:
        """At routing time the pick had a slot."""
        assert ticket.booking is not None
        column = ticket.booking.worker.column
        assert self.served.pool.table.in_flight[column] <= self.SLOTS + self.pages(column)

    def pages(self, column: int) -> int:
        return sum(
            not each.profile.counted and each.booking.worker.column == column
            for each in self.running()
            if each.booking is not None
        )

    def live(self) -> list[Ticket]:
        return [each for each in self.tickets if each not in self.finished]

    def running(self) -> list[Ticket]:
        return [each for each in self.live() if each not in self.queue]

    def holds(self, worker: Worker) -> bool:
        return self.served.pool.workers.get(worker.address) is worker

    @invariant()
    def counters_are_those_of_live_requests(self) -> None:
        table = self.served.pool.table
        all_booked = [each.booking for each in self.running() if each.booking is not None]
        booked = [each for each in all_booked if not each.released]
        held = [each for each in booked if self.holds(each.worker)]
        assert int(table.in_flight.sum()) == len(held)
        pending = sum(each.uncached_tokens for each in held if each.prefilling)
        assert int(table.pending_prefill_tokens.sum()) == pending
        for array in (table.in_flight, table.foreign, table.pending_prefill_tokens):
            assert array.min(initial=0) >= 0

    @invariant()
    def the_limit_holds(self) -> None:
        """The leases of a worker that was lost are free, whatever Envoy still says."""
        leases = [each.lease for each in self.running() if each.lease is not None]
        held = sum(not lease.released for lease in leases)
        assert self.fleet.admission.running == held <= self.LIMIT

    @invariant()
    def the_queue_is_what_waits(self) -> None:
        assert self.fleet.admission.waiting == len(self.queue) <= 6
        waiting = self.fleet.admission.pools[MODEL].queue
        assert [demand.id for demand in waiting] == [ticket.id for ticket in self.queue]

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        room = self.fleet.admission.running < self.LIMIT and self.served.pool.table.has_slot().any()
        assert not (self.queue and room)
        assert not (self.queue and not self.served.pool.table.usable().any())

    @invariant()
    def a_ticket_has_one_outcome(self) -> None:
        for ticket in self.tickets:
            assert ticket.decision is None or ticket.refusal is None
            assert (ticket in self.queue) <= (ticket.decision is None)
            assert ticket.ended == (ticket in self.finished)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        while live := self.live():
            self.finish_one(live[0])
        assert self.fleet.idle()
        for ticket in self.tickets:
            cancelled = ticket.decision is None and ticket.refusal is None
            assert ticket.ended
            assert not cancelled or ticket in self.cancelled

    def finish_one(self, ticket: Ticket) -> None:
        if ticket in self.queue:
            self.queue.remove(ticket)
            self.cancelled.append(ticket)
        self.finished.append(ticket)
        self.woken(self.scheduler.finish(ticket, self.now))


TestAnyOrder = SchedulerMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_slot_that_a_retry_left_goes_to_who_waits() -> None:
    fleet = Fleet(workers=1, slots=1)
    running, waiting = fleet.arrive(X), fleet.arrive(Y)
    assert waiting.decision is None
    second = join(fleet.pool, 1, slots=1, state=WorkerState.DRAINING)
    assert fleet.scheduler.response_started(running, second.address, 2, now=1.0) == [waiting]
    fleet.scheduler.finish(running, now=2.0)
    fleet.scheduler.finish(waiting, now=2.0)
    assert fleet.idle()


class TestOutcomes:
    """What an engine's middleware tells ends a lease, once."""

    def outcome(self, ticket: Ticket, error: EngineError = EngineError.NONE) -> Outcome:
        return Outcome(ticket.id, 200, error, duration_s=1.0, cached_tokens=32)

    def test_a_finished_request_frees_its_slot_before_envoy_says_so(self) -> None:
        fleet = Fleet(workers=1, slots=1)
        first, second = fleet.arrive(X), fleet.arrive(Y)
        assert second.decision is None
        woken = fleet.scheduler.outcome(
            fleet.served, fleet.workers[0], self.outcome(first), now=1.0
        )
        assert woken == [second]
        assert first.outcome is not None
        assert fleet.scheduler.finish(first, now=2.0) == []
        fleet.scheduler.finish(second, now=3.0)
        assert fleet.idle()

    def test_a_worker_that_does_not_hold_the_request_frees_nothing(self) -> None:
        fleet = Fleet(workers=2, slots=1)
        first = fleet.arrive(X)
        assert first.booking is not None
        other = next(w for w in fleet.workers if w is not first.booking.worker)
        assert fleet.scheduler.outcome(fleet.served, other, self.outcome(first), now=1.0) == []
        assert fleet.admission.running == 1

    def test_an_error_that_envoy_retries_keeps_the_lease(self) -> None:
        fleet = Fleet(workers=2, slots=1)
        first = fleet.arrive(X)
        assert first.booking is not None
        failed = first.booking.worker
        dead = self.outcome(first, EngineError.ENGINE_DEAD)
        fleet.scheduler.outcome(fleet.served, failed, dead, now=1.0)
        assert fleet.admission.running == 1
        fleet.scheduler.response_started(first, None, 1, now=2.0)
        fleet.scheduler.outcome(fleet.served, failed, dead, now=3.0)
        assert fleet.admission.running == 0, "after the first token nothing is retried"
        fleet.scheduler.finish(first, now=4.0)
        assert fleet.idle()

    def test_the_engine_may_tell_after_envoy(self) -> None:
        fleet = Fleet(workers=1)
        first = fleet.arrive(X)
        fleet.scheduler.finish(first, now=1.0)
        told = self.outcome(first)
        for _ in range(2):
            assert fleet.scheduler.outcome(fleet.served, fleet.workers[0], told, now=2.0) == []
            assert first.outcome is told
            assert fleet.idle()


class TestAdapters:
    def test_an_adapter_loaded_at_run_time_finds_its_pool_and_worker(self) -> None:
        fleet = Fleet(workers=2)
        with pytest.raises(ModelNotFound):
            fleet.scheduler.model_for(profile(model="lora"))
        fleet.scheduler.report(fleet.served, fleet.workers[1], ready(adapters=("lora",)), now=1.0)
        assert fleet.scheduler.model_for(profile(model="lora")) is fleet.served
        for _ in range(5):
            ticket = fleet.arrive(X, profile=profile(model="lora"))
            assert decided(ticket) == (address(1),)

    def test_an_adapter_without_room_does_not_hold_up_others(self) -> None:
        fleet = Fleet(workers=2, slots=1)
        fleet.scheduler.report(fleet.served, fleet.workers[0], ready(adapters=("lora",)), now=0.0)
        lora = profile(model="lora")
        running = fleet.arrive(X, profile=lora)
        waiting, behind = (fleet.arrive(X, profile=lora) for _ in range(2))
        other = fleet.arrive(Y)
        assert (waiting.decision, behind.decision) == (None, None)
        assert decided(other)[0] == address(1)
        assert fleet.scheduler.finish(running, now=2.0) == [waiting]
