from __future__ import annotations

import random
from collections import Counter

from extproc.routing.adapters import AdapterHomes
from extproc.routing.router import Asked, Router
from tests.support.builders import MODEL, address, join, pool, prompt_keys, text_blocks

ADAPTERS = ("french", "sql", "legal")


def test_an_adapter_stays_where_it_is_loaded_while_load_allows() -> None:
    some = pool(adapters=ADAPTERS, routing={"weights": {"recent_work": 0}})
    for number in range(4):
        join(some, number)
    router = Router(some, random.Random(1))

    def sent(adapter: str) -> int:
        route = router.route([prompt_keys(text_blocks(1, 5))], 10.0, Asked(model=adapter))
        router.note(route, 10.0)
        return route.columns[0]

    home = sent("sql")
    assert {sent("sql") for _ in range(20)} == {home}
    others = Counter(sent(MODEL) for _ in range(200))
    assert set(others) == {0, 1, 2, 3}
    some.table.foreign[home] = 20
    assert sent("sql") != home


def test_a_worker_holds_as_many_as_its_engine_says_and_drops_the_longest_unused() -> None:
    some = pool()
    told, untold = join(some, 1, max_adapters=2), join(some, 2)
    homes = AdapterHomes()
    for adapter in ("a", "b", "a", "c"):
        homes.note(some, told.address, adapter)
    held = [homes.loaded(some, name)[told.column] for name in "abc"]
    assert held == [True, False, True]
    for adapter in "vwxyz":
        homes.note(some, untold.address, adapter)
    held = [homes.loaded(some, name)[untold.column] for name in "vwxyz"]
    assert held == [False, True, True, True, True]


def test_workers_that_left_are_forgotten() -> None:
    """MM1."""
    some = pool()
    homes = AdapterHomes()
    for number in range(50):
        join(some, number, now=100.0 * number)
        some.tick(100.0 * number)
        homes.note(some, address(number), "a")
        assert len(homes) <= 2
    some.tick(1e6)
    assert not homes.loaded(some, "a").any()
