from __future__ import annotations

from typing import Any

import pytest

from extproc.admission.controller import AdmissionController
from extproc.admission.lease import Lease
from extproc.errors import QueueFull, QueueTimeout
from extproc.policy import AdmissionPolicy


def anywhere(_request_id: str) -> bool:
    return True


def controller(**changes: Any) -> AdmissionController:
    limits = {"max_concurrency": 2, "max_queue": 3, "max_queue_time_s": 10.0, **changes}
    return AdmissionController(AdmissionPolicy(**limits))


def admit(some: AdmissionController, name: str, now: float = 0.0, capacity: bool = True) -> Any:
    return some.admit(name, now, has_capacity=capacity)


def filled(**changes: Any) -> tuple[AdmissionController, list[Lease]]:
    """A controller whose quota is taken."""
    some = controller(**changes)
    leases = [admit(some, f"r{number}") for number in range(some.policy.max_concurrency)]
    return some, leases


class TestAdmitting:
    def test_a_lease_is_granted_while_there_is_quota_and_capacity(self) -> None:
        some, leases = filled()
        assert [(lease.id, lease.granted_at, lease.released) for lease in leases] == [
            ("r0", 0.0, False),
            ("r1", 0.0, False),
        ]
        assert (some.running, some.granted, some.waiting) == (2, 2, 0)

    def test_one_over_the_limit_waits(self) -> None:
        some, _ = filled()
        assert admit(some, "late") is None
        assert (some.running, some.waiting) == (2, 1)

    def test_without_capacity_it_waits_whatever_the_quota(self) -> None:
        some = controller()
        assert admit(some, "a", capacity=False) is None
        assert (some.running, some.waiting) == (0, 1)

    def test_nobody_overtakes_who_waits(self) -> None:
        some = controller()
        admit(some, "first", capacity=False)
        assert admit(some, "second") is None
        granted = some.next_waiting(1.0, anywhere)
        assert granted is not None
        assert (granted[0], granted[1].id) == ("first", "first")

    @pytest.mark.parametrize("max_queue", [0, 1, 3])
    def test_the_queue_takes_exactly_its_limit(self, max_queue: int) -> None:
        """AD1: one below, at, and one above."""
        some, _ = filled(max_queue=max_queue)
        for number in range(max_queue):
            assert admit(some, f"w{number}") is None
        with pytest.raises(QueueFull):
            admit(some, "over")
        assert (some.waiting, some.refused_full, some.running) == (max_queue, 1, 2)


class TestWaiting:
    def test_the_queue_is_first_in_first_out(self) -> None:
        some, leases = filled()
        for name in "abc":
            admit(some, name)
        for lease in leases:
            some.release(lease, 1.0)
        order = [
            granted[0]
            for _ in range(3)
            if (granted := some.next_waiting(1.0, anywhere)) is not None
        ]
        assert order == ["a", "b"]
        assert (some.running, some.waiting) == (2, 1)

    def test_next_is_nobody_without_a_queue_or_quota(self) -> None:
        some = controller()
        assert some.next_waiting(0.0, anywhere) is None
        some, _ = filled()
        admit(some, "a")
        assert some.next_waiting(0.0, anywhere) is None
        assert some.waiting == 1

    def test_the_oldest_wait_is_the_heads(self) -> None:
        some, _ = filled()
        assert some.oldest_wait_s(5.0) == 0.0
        admit(some, "a", now=1.0)
        admit(some, "b", now=3.0)
        assert some.oldest_wait_s(5.0) == 4.0
        some.leave("a")
        assert some.oldest_wait_s(5.0) == 2.0

    def test_who_leaves_frees_a_place_once(self) -> None:
        some, _ = filled(max_queue=1)
        admit(some, "a")
        assert some.leave("a")
        assert not some.leave("a")
        assert not some.leave("stranger")
        assert (some.waiting, some.left_queue) == (0, 1)
        assert admit(some, "b") is None

    def test_abandoning_empties_the_queue_in_order(self) -> None:
        some, _ = filled()
        for name in "abc":
            admit(some, name)
        assert some.abandon() == ["a", "b", "c"]
        assert (some.waiting, some.abandon()) == (0, [])


class TestExpiry:
    def test_who_waited_the_whole_time_is_taken_out_oldest_first(self) -> None:
        some, _ = filled()
        for number, name in enumerate("abc"):
            admit(some, name, now=float(number))
        assert list(some.expired(9.9)) == []
        out = list(some.expired(11.0))
        assert [name for name, _ in out] == ["a", "b"]
        assert all(isinstance(refusal, QueueTimeout) for _, refusal in out)
        assert out[0][1].message == "No capacity within 10 s."
        assert (some.waiting, some.refused_timeout) == (1, 2)

    def test_the_last_one_leaves_an_empty_queue(self) -> None:
        some, _ = filled()
        admit(some, "a")
        assert [name for name, _ in some.expired(10.0)] == ["a"]
        assert list(some.expired(99.0)) == []


class TestReleasing:
    def test_a_lease_is_given_back_once(self) -> None:
        """LE1."""
        some, leases = filled()
        for _ in range(3):
            some.release(leases[0], 1.0)
        assert leases[0].released
        assert some.running == 1
        some.release(leases[1], 1.0)
        assert some.running == 0

    def test_the_wait_to_retry_comes_from_the_drain_rate(self) -> None:
        some, leases = filled(max_concurrency=20, max_queue=0)
        with pytest.raises(QueueFull) as caught:
            admit(some, "x")
        assert caught.value.retry_after_s == 60.0
        for lease in leases[:5]:
            some.release(lease, 0.0)
        for number in range(5):
            admit(some, f"again{number}")
        with pytest.raises(QueueFull) as caught:
            admit(some, "x")
        assert caught.value.retry_after_s == pytest.approx(2.0)

    def test_it_is_a_second_at_least(self) -> None:
        some, leases = filled(max_concurrency=100, max_queue=0)
        for lease in leases:
            some.release(lease, 0.0)
        for number in range(100):
            admit(some, f"again{number}")
        with pytest.raises(QueueFull) as caught:
            admit(some, "x")
        assert caught.value.retry_after_s == 1.0
