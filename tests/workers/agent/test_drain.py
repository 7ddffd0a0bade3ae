from __future__ import annotations

import pytest

from workers.agent.drain import Drain, Draining

NOT, UNDER_WAY, DONE = Draining


def drain_after(*looks: tuple[float, float | None], seconds: float = 60.0) -> Drain:
    drain = Drain()
    drain.begin(seconds, 0.0)
    for now_s, in_flight in looks:
        drain.observe(in_flight, now_s)
    return drain


def test_it_waits_for_the_last_request_and_half_a_second_more() -> None:
    assert drain_after((1.0, 3.0), (2.0, 0.0), (2.4, 0.0)).state is UNDER_WAY
    drain = drain_after((1.0, 3.0), (2.0, 0.0), (2.5, 0.0))
    assert (drain.state, drain.cut) == (DONE, False)


def test_a_request_that_was_on_its_way_makes_it_wait_again() -> None:
    assert drain_after((1.0, 0.0), (1.4, 1.0), (1.8, 0.0)).state is UNDER_WAY


@pytest.mark.parametrize("in_flight", [5.0, None])
def test_requests_that_run_or_are_unknown_hold_it_until_the_deadline(
    in_flight: float | None,
) -> None:
    assert drain_after((59.9, in_flight)).state is UNDER_WAY
    drain = drain_after((60.0, in_flight))
    assert (drain.state, drain.cut) == (DONE, True)


def test_it_can_be_undone_unless_it_is_for_good() -> None:
    drain = drain_after((1.0, 0.0), (2.0, 0.0))
    drain.resume()
    assert drain.state is NOT
    drain.observe(0.0, 3.0)
    assert drain.state is NOT
    drain.begin(10.0, 4.0, for_good=True)
    drain.resume()
    assert drain.state is UNDER_WAY


def test_an_earlier_deadline_counts_and_a_later_one_does_not() -> None:
    drain = drain_after((1.0, 3.0), seconds=10.0)
    drain.begin(60.0, 2.0)
    drain.begin(1.0, 3.0)
    drain.observe(3.0, 4.0)
    assert (drain.state, drain.cut) == (DONE, True)


def test_after_being_undone_it_begins_afresh() -> None:
    drain = drain_after((60.0, 3.0))
    drain.resume()
    drain.begin(60.0, 100.0)
    drain.observe(3.0, 101.0)
    assert (drain.state, drain.cut) == (UNDER_WAY, False)
