from __future__ import annotations

import random
from collections import Counter
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from extproc.fleet.pool import Pool
from extproc.policy import Profile, RoutingPolicy
from extproc.routing.profiles import PROFILES, weights_of
from extproc.routing.router import Router
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import join, pool, prompt_keys, text_blocks


def joined(workers: int = 4, slots: int = 0, **routing: Any) -> tuple[Pool, Router]:
    some = pool(routing=routing)
    for number in range(workers):
        join(some, number, slots=slots)
    return some, Router(some, random.Random(1))


def led(pool: Pool, router: Router, prompt: PromptKeys, now: float = 10.0) -> int:
    """The leader of a request that goes on running."""
    route = router.route([prompt], now)
    column = route.columns[0]
    pool.book(column, route.uncached_tokens, f"{random.random()}", now=now)
    router.note(route, now)
    return column


def cold(seed: int) -> PromptKeys:
    return prompt_keys(text_blocks(seed, 5))


class TestPolicy:
    def test_every_profile_is_there(self) -> None:
        assert set(PROFILES) == set(get_args(Profile))

    def test_weights_replace_the_profiles_and_add_to_them(self) -> None:
        changed = RoutingPolicy(profile="linear", weights={"switch": 0, "health": 2, "load": 9})
        assert weights_of(changed) == {"load": 9, "miss_share": 0.7, "health": 2}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("profile", "best"),
            ("weights.luck", 1.0),
            ("weights.load", -1.0),
            ("weights.load", float("inf")),
            ("weights.load", float("nan")),
            ("weights.load", "much"),
            ("picker", "first"),
            ("affinity.stickyness", 1),
            ("replicas.max_holders", 0),
            ("warmup.share", 1.1),
            ("health.first_score", 101),
        ],
    )
    def test_what_is_unknown_or_wrong_is_named(self, field: str, value: object) -> None:
        section, _, name = field.partition(".")
        given = {section: {name: value}} if name else {section: value}
        with pytest.raises(ValidationError) as caught:
            RoutingPolicy.model_validate(given)
        place = ".".join(str(part) for part in caught.value.errors()[0]["loc"])
        assert place.startswith(field)


class TestBaselines:
    def test_round_robin_takes_turns(self) -> None:
        some, router = joined(profile="round_robin")
        order = [led(some, router, cold(1)) for _ in range(12)]
        assert order[:4] == order[4:8] == order[8:]
        assert sorted(order[:4]) == [0, 1, 2, 3]

    def test_random_takes_each_about_as_often_whatever_its_load(self) -> None:
        some, router = joined(profile="random")
        counts = Counter(led(some, router, cold(1)) for _ in range(800))
        assert all(150 < counts[column] < 250 for column in range(4))

    def test_least_requests_takes_the_least_loaded(self) -> None:
        some, router = joined(profile="least_requests")
        for _ in range(40):
            led(some, router, cold(1))
        assert some.table.in_flight[:4].tolist() == [10] * 4

    def test_power_of_two_never_takes_the_most_loaded(self) -> None:
        some, router = joined(profile="power_of_two")
        for _ in range(5):
            some.book(2, 0, f"{random.random()}")
        leaders = {router.route([cold(1)], 10.0).columns[0] for _ in range(200)}
        assert leaders == {0, 1, 3}

    def test_consistent_hash_keeps_a_beginning_on_its_worker_up_to_a_bound(self) -> None:
        some, router = joined(profile="consistent_hash")
        first = {router.route([cold(1)], 10.0).columns[0] for _ in range(50)}
        assert len(first) == 1
        assert len({router.route([cold(seed)], 10.0).columns[0] for seed in range(50)}) == 4
        for _ in range(100):
            led(some, router, cold(1))
        assert max(some.table.in_flight[:4]) <= 1.25 * 25 + 1

    def test_baselines_do_not_look_at_caches(self) -> None:
        some, router = joined(profile="least_requests", replicas={"hot_per_s": 0.01})
        some.credit(some.worker_at(1), cold(1).keys)
        counts = Counter(router.route([cold(1)], 10.0).columns[0] for _ in range(400))
        assert all(60 < counts[column] < 140 for column in range(4))


@pytest.mark.parametrize("profile", ["balanced", "linear", "finish"])
def test_profiles_that_know_caches_go_where_the_prefix_is(profile: str) -> None:
    some, router = joined(profile=profile)
    some.credit(some.worker_at(2), cold(1).keys)
    assert {router.route([cold(1)], 10.0).columns[0] for _ in range(50)} == {2}


@pytest.mark.parametrize("profile", ["balanced", "health", "finish", "linear"])
def test_a_thundering_herd_is_split(profile: str) -> None:
    """Workers at health 98 and 70, 100 simultaneous requests: neither gets more than 60%."""
    some, router = joined(2, profile=profile)
    some.table.health_base[:2] = some.table.health_target[:2] = (98.0, 70.0)
    counts = Counter(led(some, router, PromptKeys(100)) for _ in range(100))
    assert max(counts.values()) <= 60
    if profile in ("balanced", "health"):
        assert counts[0] > counts[1]


def test_softmax_prefers_the_cheap_by_as_much_as_the_temperature_says() -> None:
    some, router = joined(
        2, picker="softmax", softmax_temperature=160.0, weights={"recent_work": 0}
    )
    some.book(1, 0, "a")
    counts = Counter(router.route([PromptKeys(0)], 10.0).columns[0] for _ in range(4_000))
    assert 2.2 < counts[0] / counts[1] < 3.3
