from __future__ import annotations

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from extproc.errors import NoReadyWorker
from extproc.fleet.worker import WorkerState
from extproc.request.subset import KEY, NAMESPACE, subset_hint
from tests.support.builders import Fleet, address, join, profile


def hint(value: object) -> frozenset[str] | None:
    return subset_hint({NAMESPACE: ParseDict({KEY: value}, Struct())})


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (["10.0.0.1:8000", "10.0.0.2"], {"10.0.0.1:8000", "10.0.0.2"}),
        ("10.0.0.1:8000, 10.0.0.2 ,", {"10.0.0.1:8000", "10.0.0.2"}),
        ("10.0.0.1", {"10.0.0.1"}),
        ([], set()),
        ("", set()),
        (None, set()),
        (7, set()),
        ([7, {}], set()),
    ],
)
def test_lists_and_texts_with_commas_are_read(value: object, allowed: set[str]) -> None:
    """Anything else allows nobody: an unreadable rule is not no rule."""
    assert hint(value) == allowed


def test_without_the_key_all_are_allowed() -> None:
    assert subset_hint({}) is None
    assert subset_hint({NAMESPACE: Struct()}) is None
    assert subset_hint({"envoy.lb": ParseDict({KEY: "10.0.0.1"}, Struct())}) is None


def test_a_request_goes_only_where_its_gateway_allows() -> None:
    fleet = Fleet(workers=4)
    asked = profile(subset=frozenset({"10.0.0.2", address(3)}))
    for _ in range(20):
        ticket = fleet.arrive(profile=asked)
        assert ticket.decision is not None
        assert set(ticket.decision.endpoints) == {address(2), address(3)}


@pytest.mark.parametrize("subset", [frozenset(), frozenset({"10.9.9.9"})])
def test_nobody_eligible_is_a_503_at_once(subset: frozenset[str]) -> None:
    fleet = Fleet(workers=2)
    with pytest.raises(NoReadyWorker):
        fleet.arrive(profile=profile(subset=subset))
    assert fleet.idle()


def test_a_subset_whose_last_worker_leaves_is_refused_and_holds_nobody_up() -> None:
    fleet = Fleet(workers=2, slots=1)
    running = [fleet.arrive() for _ in range(2)]
    first = fleet.arrive(profile=profile(subset=frozenset({address(0)})))
    second = fleet.arrive()
    assert first.decision is second.decision is None
    join(fleet.pool, 0, state=WorkerState.DRAINING, now=1.0)
    onto = next(t for t in running if t.decision and t.decision.endpoints[0] == address(1))
    woken = fleet.scheduler.finish(onto, 1.0)
    assert set(woken) == {first, second}
    assert isinstance(first.refusal, NoReadyWorker)
    assert second.decision is not None
