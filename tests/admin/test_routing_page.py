from __future__ import annotations

import json

from extproc.admin.routing import routing_page
from tests.support.builders import Fleet, join, prompt_keys, text_blocks

SYSTEM = text_blocks(1, 20)


def test_it_shows_the_profile_and_how_many_workers_hold_each_hot_prefix() -> None:
    fleet = Fleet(workers=3, routing={"profile": "finish", "weights": {"finish": 2.0}})
    join(fleet.pool, 9, sends_digests=False)
    for number in range(30):
        fleet.picked(prompt_keys(SYSTEM + text_blocks(100 + number, 2)))
    page = routing_page(fleet.served, 0.0)
    json.dumps(page)
    assert (page["profile"], page["weights"]["finish"]) == ("finish", 2.0)
    assert page["keys"] == "text"
    assert page["approximate"] == [fleet.pool.workers["10.0.0.9:8000"].address]
    first = page["hot_prefixes"][0]
    assert first["key"] == f"{int(prompt_keys(SYSTEM).keys[-1]):016x}"
    assert 1 <= first["replicas"] <= 4
    assert first["max_replicas"] == 3
    assert page["conversations"]["known"] == 30


def test_a_new_policy_takes_effect_with_the_next_request() -> None:
    fleet = Fleet(workers=2)
    fleet.picked(prompt_keys(SYSTEM))
    changed = {"profile": "round_robin", "health": {"recovery_points_per_s": 1.0}}
    routing = fleet.pool.policy.routing.model_validate(changed)
    fleet.pool.policy = fleet.pool.policy.model_copy(update={"routing": routing})
    assert fleet.picked(prompt_keys(SYSTEM)) != fleet.picked(prompt_keys(SYSTEM))
    assert fleet.pool.health.scores(1.0)[0] == 41.0
