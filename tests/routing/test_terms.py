from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from extproc.fleet.table import WorkerTable
from extproc.policy import Term
from extproc.routing.terms import TERMS, Candidates, Places, hash_order

NAN = float("nan")


def table(**columns: list[float]) -> WorkerTable:
    """Three workers; what is not given is blank."""
    made = WorkerTable()
    made.resize(3)
    made.present[:] = True
    made.slots[:] = 10
    made.health_base[:] = 100.0, 50.0, 0.0
    for name, values in columns.items():
        getattr(made, name)[:] = values
    return made


def request(workers: WorkerTable | None = None, **changes: Any) -> Candidates:
    defaults: dict[str, Any] = {
        "table": workers or table(),
        "usable": np.ones(3, dtype=bool),
        "prompt_tokens": 100,
        "output_tokens": 0,
        "cached": np.array([0.0, 50.0, 100.0]),
        "running": np.array([0.0, 1.0, 5.0]),
        "pending_prefill": np.array([10.0, 0.0, 30.0]),
        "new": None,
    }
    return Candidates(**{**defaults, **changes})


def cost(term: Term, workers: WorkerTable | None = None, **changes: Any) -> list[float] | None:
    values = TERMS[term](request(workers, **changes))
    return None if values is None else [round(value, 6) for value in values.tolist()]


def test_every_term_of_the_policy_is_there() -> None:
    assert set(TERMS) == set(get_args(Term))


def test_no_term_changes_what_it_reads() -> None:
    asked = request(table(kv_usage=[0.5, NAN, 0.9], prefill_tokens_per_s=[1.0, NAN, 2.0]))
    before = {name: array.copy() for name, array in vars(asked.table).items()}
    arrays = (asked.cached.copy(), asked.running.copy(), asked.pending_prefill.copy())
    for term in TERMS.values():
        term(asked)
    for name, array in vars(asked.table).items():
        assert np.array_equal(array, before[name], equal_nan=array.dtype.kind == "f"), name
    assert np.array_equal(arrays, (asked.cached, asked.running, asked.pending_prefill))


def test_the_plain_terms_are_their_signals() -> None:
    workers = table(output_tokens=[1, 2, 3], picked_at=[7, 8, 9], recent_tokens=[5, 0, 1])
    assert cost("uncached") == [100, 50, 0]
    assert cost("pending_prefill") == [10, 0, 30]
    assert cost("running") == [0, 1, 5]
    assert cost("queued_tokens", workers) == [11, 2, 33]
    assert cost("recent_work", workers) == [5, 0, 1]
    assert cost("last_pick", workers) == [7, 8, 9]
    assert cost("prefix_locality") == [0, -50, -100]


def test_over_slots_counts_who_must_end_first() -> None:
    workers = table(in_flight=[8, 6, 12], foreign=[1, 4, 0])
    assert cost("over_slots", workers) == [0, 1, 3]


def test_the_linear_profiles_terms_are_shares() -> None:
    assert cost("load") == [0, 0.1, 0.5]
    assert cost("miss_share") == [1, 0.5, 0]
    assert cost("miss_share", prompt_tokens=0, cached=np.zeros(3)) == [0, 0, 0]


def test_health_costs_more_and_more_as_it_falls() -> None:
    assert cost("health") == [0, 1, 99]
    assert cost("health_loss") == [0, 50, 100]


class TestFinish:
    def test_a_slow_worker_takes_longer(self) -> None:
        workers = table(slowness=[1.0, 1.0, 2.0])
        assert cost("finish", workers) == [110, 50, 60]
        assert cost("slow_prefill", workers) == [0, 0, 30]
        assert cost("slow_prefill", table(slowness=[0.5, 1.0, 1.0])) == [0, 0, 0]

    def test_the_output_takes_its_time_too(self) -> None:
        workers = table(ready=[1] * 3, prefill_tokens_per_s=[1_000.0] * 3, tpot_s=[0.01, NAN, 0.03])
        assert cost("finish", workers, output_tokens=10) == [210, 250, 330]
        assert cost("finish", table(tpot_s=[0.01, NAN, 0.03]), output_tokens=10) == [110, 50, 30]


def test_kv_pressure_is_what_the_table_says() -> None:
    assert cost("kv_pressure", table(kv_pressure=[0.0, 0.5, 1.0])) == [0, 0.5, 1]


def test_another_zone_costs() -> None:
    assert cost("zone", table(elsewhere=[0.0, 1.0, 0.0])) == [0, 1, 0]


@pytest.mark.parametrize(
    ("term", "known"),
    [("kv_pressure", "pressed"), ("slow_prefill", "slow"), ("zone", "zoned")],
)
def test_what_is_known_to_be_nothing_is_left_out(term: Term, known: str) -> None:
    assert cost(term, **{known: False}) is None


@pytest.mark.parametrize(("term", "field"), [("switch", "last"), ("session", "session")])
def test_leaving_the_last_worker_costs(term: Term, field: str) -> None:
    assert cost(term, places=Places(**{field: 1})) == [1, 0, 1]
    assert cost(term) is None


def test_an_adapter_that_is_not_loaded_costs() -> None:
    assert cost("adapter_cold", places=Places(adapter_loaded=np.array([True, False, True]))) == [
        0,
        1,
        0,
    ]
    assert cost("adapter_cold") is None


class TestHashRank:
    def workers(self, count: int) -> WorkerTable:
        made = WorkerTable()
        made.resize(count)
        rng = np.random.default_rng(1)
        made.seed[:] = rng.integers(0, 2**64, size=count, dtype=np.uint64)
        return made

    def test_keys_spread_evenly(self) -> None:
        seeds = self.workers(8).seed
        leaders = [int(hash_order(seeds, key).argmin()) for key in range(8_000)]
        counts = np.bincount(leaders, minlength=8)
        assert counts.min() > 850
        assert counts.max() < 1_150

    def test_a_worker_more_moves_its_share_of_keys_only(self) -> None:
        seeds = self.workers(9).seed
        before = [int(hash_order(seeds[:8], key).argmin()) for key in range(2_000)]
        after = [int(hash_order(seeds, key).argmin()) for key in range(2_000)]
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {8}
        assert 150 < len(moved) < 300

    def test_a_full_worker_ranks_after_all_others(self) -> None:
        ranks = cost(
            "hash_rank",
            self.workers(3),
            places=Places(hash_key=5),
            running=np.array([0.0, 0.0, 9.0]),
        )
        assert ranks[2] > 1 > max(ranks[:2])

    def test_without_a_key_load_alone_decides(self) -> None:
        assert cost("hash_rank", self.workers(3), running=np.array([0.0, 0.0, 9.0])) == [0, 0, 1]
