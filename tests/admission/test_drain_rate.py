from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.drain_rate import DrainRate


def steady(per_s: float, seconds: float = 60.0) -> DrainRate:
    rate = DrainRate()
    for number in range(int(per_s * seconds)):
        rate.release(number / per_s)
    return rate


@pytest.mark.parametrize("per_s", [2.0, 50.0])
def test_a_steady_flow_settles_at_its_rate(per_s: float) -> None:
    assert steady(per_s).per_s(60.0) == pytest.approx(per_s, rel=0.06)


def test_it_fades_when_nothing_drains() -> None:
    rate = steady(10.0)
    assert rate.per_s(70.0) == pytest.approx(rate.per_s(60.0) / 2.718, rel=0.01)


def test_before_the_first_release_there_is_no_rate() -> None:
    assert DrainRate().per_s(5.0) == 0.0
    assert DrainRate().wait_s(1, 5.0, longest_s=60.0) == 60.0


def test_the_wait_is_the_queue_over_the_rate_and_bounded() -> None:
    rate = steady(10.0)
    assert rate.wait_s(20, 60.0, longest_s=60.0) == pytest.approx(2.0, rel=0.06)
    assert rate.wait_s(10_000, 60.0, longest_s=60.0) == 60.0


@given(times=st.lists(st.floats(0, 1e6), max_size=30), now=st.floats(0, 2e6))
def test_no_order_of_times_makes_it_negative_or_infinite(times: list[float], now: float) -> None:
    rate = DrainRate()
    for time in times:
        rate.release(time)
    assert 0.0 <= rate.per_s(now) <= len(times) / 10.0 + 1e-9
    assert 0.0 <= rate.wait_s(3, now, longest_s=60.0) <= 60.0
