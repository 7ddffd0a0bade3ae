from __future__ import annotations

import random
from collections import Counter

import pytest

from extproc.fleet.pool import Pool
from extproc.fleet.worker import WorkerState
from extproc.routing.prediction import cached_tokens
from extproc.routing.profiles import PROFILES
from extproc.routing.router import Asked, Route, Router
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import BLOCK, join, pool, prompt_keys, snapshot, text_blocks

RNG = random.Random(3)
X = text_blocks(1, 20)
Y = text_blocks(2, 20)


def routed(pool: Pool, *token_ids: list[int], now: float = 0.0, needs_slot: bool = True) -> Route:
    prompts = [prompt_keys(ids) for ids in token_ids]
    return Router(pool, RNG).route(prompts, now, Asked(needs_slot=needs_slot))


def warm(pool: Pool, number: int, ids: list[int]) -> None:
    pool.credit(list(pool.workers.values())[number], prompt_keys(ids).keys)


def joined(workers: int = 3, slots: int = 0, **changes: object) -> Pool:
    some = pool(**changes)
    for number in range(workers):
        join(some, number, slots=slots)
    return some


class TestCost:
    def test_the_worker_with_the_prefix_is_best_and_its_share_is_told(self) -> None:
        some = joined()
        warm(some, 1, X[: 10 * BLOCK])
        chosen = routed(some, X)
        assert chosen.columns[0] == 1
        assert (chosen.cached_tokens, chosen.uncached_tokens) == (40, 41)
        assert chosen.prompt_tokens == 81

    def test_a_busy_holder_loses_to_an_idle_worker(self) -> None:
        """Weights 4 and 160: 80 cached tokens are worth less than three running requests."""
        some = joined(2)
        warm(some, 0, X)
        some.book(0, 0, "lease")
        assert routed(some, X).columns == [0, 1]
        some.book(0, 0, "lease")
        some.book(0, 0, "lease")
        assert routed(some, X).columns == [1, 0]

    def test_pending_prefill_counts_until_the_first_token(self) -> None:
        some = joined(2, routing={"weights": {"running": 0, "recent_work": 0}})
        booking = some.book(0, 1_000, "lease")
        assert [routed(some, X).columns[0] for _ in range(20)] == [1] * 20
        some.first_token(booking)
        assert {routed(some, X).columns[0] for _ in range(20)} == {0, 1}

    def test_several_prompts_add_up(self) -> None:
        some = joined(2)
        warm(some, 1, X)
        warm(some, 0, Y[: 5 * BLOCK])
        chosen = routed(some, X, Y)
        assert chosen.columns[0] == 1
        assert (chosen.cached_tokens, chosen.prompt_tokens) == (80, 162)
        assert cached_tokens(some, [prompt_keys(X), prompt_keys(Y)], 0.0)[:2].tolist() == [20, 80]

    def test_prompts_without_keys_are_balanced_by_load(self) -> None:
        some = joined(2)
        some.book(0, 0, "lease")
        chosen = Router(some, random.Random(3)).route([PromptKeys(500)], 0.0)
        assert (chosen.columns[0], chosen.cached_tokens, chosen.uncached_tokens) == (1, 0, 500)

    @pytest.mark.parametrize(("minimum", "credit"), [(39, 40), (40, 40), (41, 0)])
    def test_short_prefixes_can_be_ignored(self, minimum: int, credit: int) -> None:
        some = joined(1, routing={"min_prefix_tokens": minimum})
        warm(some, 0, X[: 10 * BLOCK])
        assert routed(some, X).cached_tokens == credit

    def test_an_old_digest_gives_no_credit(self) -> None:
        """CI1: neither its keys nor what was routed beside them."""
        digest = {"capacity_blocks": 500, "error_rate": 0.001, "max_age_s": 10}
        some = joined(2, digest=digest)
        worker = some.worker_at(1)
        some.snapshot(worker, snapshot(prompt_keys(X).keys), now=0.0)
        some.credit(worker, prompt_keys(Y).keys)
        assert routed(some, X, now=9.9).cached_tokens == 80
        assert routed(some, X, now=10.0).cached_tokens == 0
        assert routed(some, Y, now=10.0).cached_tokens == 0


class TestSlots:
    def test_the_first_has_a_slot_and_later_ones_may_be_full(self) -> None:
        """RT1: a retry must land somewhere."""
        some = joined(3, slots=1)
        warm(some, 0, X)
        some.book(0, 0, "lease")
        chosen = routed(some, X)
        assert chosen.columns[0] in (1, 2)
        assert set(chosen.columns) == {0, 1, 2}

    def test_pages_need_no_slot(self) -> None:
        some = joined(1, slots=1)
        some.book(0, 0, "lease")
        assert routed(some, needs_slot=False).columns == [0]

    def test_workers_that_are_not_ready_are_in_no_list(self) -> None:
        some = joined(3)
        join(some, 1, state=WorkerState.DOWN)
        for _ in range(20):
            assert set(routed(some, X).columns) == {0, 2}

    @pytest.mark.parametrize(("endpoints", "length"), [(1, 1), (2, 2), (3, 3), (16, 5)])
    def test_the_list_is_as_long_as_the_policy_says(self, endpoints: int, length: int) -> None:
        some = joined(5, routing={"endpoints": endpoints})
        columns = routed(some, X).columns
        assert len(columns) == len(set(columns)) == length


LONG = text_blocks(3, 1_000)
"""4,001 tokens: computing them again costs more than waiting for a slot or two."""


class TestOverSlots:
    def full(self, workers: int = 2, over: int = 0, **routing: object) -> Pool:
        """A has the long prompt and all its slots taken, and ``over`` requests more."""
        some = joined(workers, slots=4, routing=routing)
        warm(some, 0, LONG)
        warm(some, 0, X)
        for _ in range(4 + over):
            some.book(0, 0, "lease")
        return some

    def test_a_full_worker_leads_for_much_that_it_holds(self) -> None:
        some = self.full()
        assert routed(some, LONG).columns[0] == 0
        assert routed(some, X).columns[0] == 1

    def test_each_request_more_costs_more(self) -> None:
        prompt = LONG[: 500 * BLOCK]
        assert routed(self.full(over=0), prompt).columns[0] == 0
        assert routed(self.full(over=1), prompt).columns[0] == 0
        dear = {"weights": {"over_slots": 4_000.0}}
        assert routed(self.full(over=0, **dear), prompt).columns[0] == 0
        assert routed(self.full(over=1, **dear), prompt).columns[0] == 1

    @pytest.mark.parametrize(
        ("most", "over", "leads"), [(0, 0, 1), (1, 0, 0), (1, 1, 1), (2, 1, 0)]
    )
    def test_there_is_a_bound(self, most: int, over: int, leads: int) -> None:
        assert routed(self.full(over=over, max_over_slots=most), LONG).columns[0] == leads

    def test_admission_counts_slots_as_ever(self) -> None:
        """Somebody must have room: who waits for a slot waits here, where order is kept."""
        assert not self.full(workers=1).has_room(None, 1).any()

    def test_a_suspect_holder_does_not_lead(self) -> None:
        some = self.full(workers=3)
        some.suspect(some.worker_at(0), now=0.0)
        assert routed(some, LONG).columns[0] in (1, 2)

    def test_a_suspect_with_room_comes_before_sound_ones_over_their_slots(self) -> None:
        some = self.full()
        some.suspect(some.worker_at(1), now=0.0)
        assert routed(some, LONG).columns[0] == 1

    @pytest.mark.parametrize("profile", ["linear", "finish", "least_requests", "health"])
    def test_profiles_without_the_term_keep_to_slots(self, profile: str) -> None:
        assert routed(self.full(profile=profile), LONG).columns[0] == 1


class TestLastResort:
    def silent_a(self) -> Pool:
        """A reported idle and fell silent; B and C report medium load."""
        some = joined(3)
        warm(some, 0, X)
        for number in (1, 2):
            join(some, number, now=10.0, running=20.0)
        return some

    def test_a_silent_worker_is_never_preferred_to_one_that_speaks(self) -> None:
        """LD3: not even for a prompt that it holds."""
        some = self.silent_a()
        lists = [routed(some, X, now=10.0).columns for _ in range(100)]
        assert not any(columns[0] == 0 for columns in lists)
        assert all(columns[2] == 0 for columns in lists)

    def test_when_all_are_silent_requests_spread_by_our_own_counts(self) -> None:
        """LD3."""
        some = self.silent_a()
        firsts: Counter[int] = Counter()
        for _ in range(160):
            column = routed(some, Y, now=100.0).columns[0]
            firsts[column] += 1
            some.book(column, 0, "lease")
        running = some.table.running()[:3]
        assert running.max() - running.min() <= 1
        assert set(firsts) == {0, 1, 2}

    def test_a_silent_worker_with_a_slot_beats_speaking_ones_without(self) -> None:
        """LD3: used when no fresh worker can take the request."""
        some = joined(2, slots=1)
        join(some, 1, now=10.0, slots=1)
        some.book(1, 0, "lease")
        assert routed(some, X, now=10.0).columns == [0, 1]

    def test_a_suspect_comes_last_until_its_mark_expires(self) -> None:
        """RT1."""
        some = joined(2)
        warm(some, 0, X)
        some.suspect(some.worker_at(0), now=0.0)
        assert routed(some, X, now=1.9).columns == [1, 0]
        assert routed(some, X, now=2.0).columns == [0, 1]


class TestSubset:
    def test_only_workers_that_the_gateway_allows_are_listed(self) -> None:
        some = joined(4)
        warm(some, 0, X)
        router = Router(some, RNG)
        asked = Asked(subset={some.worker_at(1).address, some.worker_at(2).address})
        for _ in range(20):
            assert set(router.route([prompt_keys(X)], 0.0, asked).columns) == {1, 2}


def test_a_route_says_what_each_term_cost() -> None:
    some = joined(2)
    warm(some, 1, X)
    terms = routed(some, X).terms
    assert set(terms) == set(PROFILES["balanced"].weights) - {"session", "adapter_cold", "zone"}
    assert terms["uncached"][:2].tolist() == [4 * 81, 4 * 1]


def test_routing_alone_remembers_nothing() -> None:
    some = joined(2)
    router = Router(some, RNG)
    route = router.route([prompt_keys(X)], 0.0, Asked(session="s"))
    assert (len(router.conversations), len(router.sessions), len(router.hot)) == (0, 0, 0)
    router.note(route, 0.0)
    assert (len(router.conversations), len(router.sessions), len(router.hot)) == (1, 1, 0)


def test_where_nobody_has_room_a_slot_will_do() -> None:
    """A request that has waited its patience for KV blocks goes where there is a slot."""
    some = joined(2, slots=4)
    for number in range(2):
        join(some, number, slots=4)
    some.table.foreign[:2] = (4, 3)
    some.table.engine_queue[:2] = 9
    assert routed(some, X).columns[0] == 1
    some.table.foreign[:2] = 4
    assert set(routed(some, X).columns) == {0, 1}
