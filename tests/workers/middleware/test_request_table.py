"""The agent's list of requests in flight is what the engine is really serving."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from workers.engine_errors import EngineError
from workers.request_events import Ended, Event, FirstChunk, Hello, Started, encode
from workers.request_table import MAX_INSTANCES, SILENT_AFTER_S, RequestTable, Window

A, B = "a" * 16, "b" * 16


def hello(instance: str = A, *, reset: bool = False, in_flight: int = 0, dropped: int = 0) -> Hello:
    return Hello(instance, 7, reset, in_flight, dropped)


def started(number: int, instance: str = A, lease: str | None = "") -> Started:
    return Started(instance, number, f"l{number}" if lease == "" else lease, "chat", 1.0)


def ended(number: int, instance: str = A, **fields: object) -> Ended:
    usual = Ended(
        *(instance, number, f"l{number}", 200, EngineError.NONE, 1.0),
        *(None, None, None, None, False),
    )
    return usual._replace(**fields)  # type: ignore[arg-type]


def told(table: RequestTable, *events: Event, now_s: float = 0.0) -> list[Event]:
    """What the table hands on."""
    news = [table.take(encode(event), now_s) for event in events]
    return [event for event in news if event is not None]


def test_a_request_is_in_flight_from_its_start_to_its_end() -> None:
    table = RequestTable()
    told(table, started(1), started(2))
    assert table.in_flight_leases() == ["l1", "l2"]
    told(table, ended(1))
    assert table.in_flight_leases() == ["l2"]
    assert table.in_flight == 1


def test_every_event_is_handed_on_once() -> None:
    table = RequestTable()
    events = [hello(), started(1), FirstChunk(A, 1, 0.5), ended(1)]
    assert told(table, *events) == events


def test_a_request_without_a_lease_is_counted_only() -> None:
    table = RequestTable()
    told(table, started(1, lease=None))
    assert table.in_flight_leases() == []
    assert table.in_flight == 1


def test_processes_side_by_side_do_not_mix() -> None:
    table = RequestTable()
    told(table, started(1, A), started(1, B), ended(1, A))
    assert table.instances == (A, B)
    assert table.in_flight == 1
    assert table.drop_instance(B) == ["l1"]
    assert table.drop_instance(B) == []
    assert (table.in_flight, table.instances) == (0, (A,))


def test_a_dead_engine_takes_all_its_requests_with_it() -> None:
    table = RequestTable()
    told(table, started(1, A), started(2, B))
    assert sorted(table.drop_all()) == ["l1", "l2"]
    assert (table.in_flight, table.instances) == (0, ())


def test_a_process_that_says_nothing_for_three_beats_is_given_up() -> None:
    table = RequestTable()
    told(table, started(1, A), now_s=0.0)
    told(table, started(2, B), now_s=10.0)
    assert table.expire(SILENT_AFTER_S) == []
    assert table.expire(SILENT_AFTER_S + 0.1) == ["l1"]
    assert table.in_flight_leases() == ["l2"]
    assert table.counts.silent == 1


def test_telling_everything_again_is_no_news() -> None:
    table = RequestTable()
    told(table, started(1), started(2))
    again = [hello(reset=True), started(1), started(2), hello(in_flight=2)]
    assert told(table, *again) == [again[0], again[3]]
    assert table.in_flight_leases() == ["l1", "l2"]
    assert table.counts.started == 2
    assert table.counts.mismatches == 0


def test_a_request_whose_end_got_lost_leaves_when_everything_is_told_again() -> None:
    table = RequestTable()
    told(table, started(1), started(2), hello(reset=True), started(2))
    assert table.in_flight == 2
    told(table, hello(in_flight=1))
    assert table.in_flight_leases() == ["l2"]
    assert table.counts.unheard_ends == 1


def test_an_end_while_everything_is_told_again_counts_once() -> None:
    table = RequestTable()
    told(table, started(1), hello(reset=True), ended(1), hello())
    assert table.in_flight == 0
    assert (table.counts.ended, table.counts.unheard_ends, table.counts.mismatches) == (1, 0, 0)


def test_the_end_of_an_unknown_request_is_handed_on() -> None:
    table = RequestTable()
    assert told(table, ended(9)) == [ended(9)]
    assert table.counts.unknown_ends == 1
    assert table.take_window().finished == ("l9",)


def test_a_greeting_that_does_not_match_is_counted() -> None:
    table = RequestTable()
    told(table, started(1), hello(in_flight=1), hello(in_flight=3))
    assert table.counts.mismatches == 1


def test_what_the_engine_could_not_send_is_summed_over_processes() -> None:
    table = RequestTable()
    told(table, hello(dropped=5), hello(B, dropped=1), hello(dropped=7))
    assert table.counts.dropped_by_engine == 8


def test_garbage_is_counted_and_changes_nothing() -> None:
    table = RequestTable()
    assert table.take(b"\xff", 0.0) is None
    assert (table.counts.received, table.counts.garbage, table.instances) == (1, 1, ())


def test_the_table_is_bounded() -> None:
    table = RequestTable(max_in_flight=3)
    news = told(table, *(started(number) for number in range(5)))
    assert len(news) == 5
    assert table.in_flight == 3
    assert table.counts.overflowed == 2
    told(table, *(ended(number) for number in range(5)))
    assert table.in_flight == 0


def test_the_list_of_processes_is_bounded_and_the_most_silent_one_leaves() -> None:
    table = RequestTable()
    for number in range(MAX_INSTANCES + 1):
        told(table, started(1, f"{number:016x}"), now_s=float(number))
    assert len(table.instances) == table.in_flight == MAX_INSTANCES
    assert f"{0:016x}" not in table.instances


def test_a_window_sums_what_happened_in_it() -> None:
    table = RequestTable()
    told(
        table,
        *(started(1), started(2), FirstChunk(A, 1, 0.2), FirstChunk(A, 2, 0.4)),
        ended(1, prompt_tokens=100, cached_tokens=80),
        ended(2, error=EngineError.TOO_LONG, lease=None, prompt_tokens=50),
    )
    window = table.take_window()
    assert window == Window(
        started=2,
        ended=2,
        first_chunks=2,
        ttft_mean_s=window.ttft_mean_s,
        errors={EngineError.TOO_LONG: 1},
        finished=("l1",),
        prompt_tokens=100,
        cached_tokens=80,
    )
    assert abs((window.ttft_mean_s or 0) - 0.3) < 1e-9
    assert table.take_window() == Window()


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_after_any_loss_telling_everything_again_gives_the_truth(seed: int, steps: int) -> None:
    """LE1: datagrams get lost in any pattern; one complete telling puts it right."""
    rng, table, truth, number = random.Random(seed), RequestTable(), list[int](), 0
    for _ in range(steps):
        if truth and rng.random() < 0.5:
            event: Event = ended(truth.pop(rng.randrange(len(truth))))
        else:
            number += 1
            truth.append(number)
            event = started(number)
        if rng.random() < 0.6:
            told(table, event)
    told(table, hello(reset=True), *map(started, truth), hello(in_flight=len(truth)))
    assert sorted(table.in_flight_leases()) == sorted(f"l{one}" for one in truth)
    assert table.in_flight == len(truth)
    assert table.counts.mismatches == 0
