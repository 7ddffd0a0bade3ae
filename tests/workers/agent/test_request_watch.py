from __future__ import annotations

import pytest

from extproc.generated.kvgate.v1 import agent_pb2
from tests.workers.agent.told import Told
from workers.agent.engine_metrics import Total
from workers.agent.request_watch import ERRORS, WORKERS_FAULT, RequestWatch
from workers.agent.signals import RequestSums
from workers.engine_errors import EngineError

OTHER = "fedcba9876543210"


def test_nothing_is_known_before_the_middleware_speaks() -> None:
    watch = RequestWatch()
    watch.engine_died()
    assert (watch.known, watch.count, watch.leases()) == (False, 0, [])
    told = Told()
    assert not told.watch.known
    told.start(1, "a")
    assert not told.watch.known


def test_it_is_known_once_a_process_says_as_many_as_are_known_here() -> None:
    told = Told()
    told.hello(reset=True)
    told.start(1, "a")
    told.start(2, None)
    assert not told.watch.known
    told.hello(in_flight=2)
    assert (told.watch.known, told.watch.count, told.watch.leases()) == (True, 2, ["a"])


def test_a_lost_datagram_makes_it_unknown_until_all_is_told_again() -> None:
    told = Told()
    told.hello()
    told.hello(in_flight=1)
    assert not told.watch.known
    told.hello(reset=True)
    told.start(1, "a")
    told.hello(in_flight=1)
    assert told.watch.known


def test_every_process_must_be_known() -> None:
    told = Told()
    told.hello()
    told.start(1, "b", instance=OTHER)
    assert not told.watch.known
    told.hello(in_flight=1, instance=OTHER)
    assert told.watch.known


def test_a_dead_engine_has_no_requests_and_nothing_is_known() -> None:
    told = Told()
    told.start(1, "a")
    told.hello(in_flight=1)
    told.watch.engine_died()
    assert (told.watch.known, told.watch.count) == (False, 0)


def test_the_end_of_a_request_with_a_lease_is_told() -> None:
    told = Told()
    told.start(1, "a")
    told.start(2, None)
    told.first_chunk(1, 0.5)
    told.end(1, "a", ttft_s=0.5, prompt_tokens=90, output_tokens=7, cached_tokens=64)
    told.end(2, status=503, error=EngineError.QUEUE_FULL)
    assert told.outcomes == [
        agent_pb2.Outcome(
            lease="a",
            status=200,
            error=agent_pb2.ENGINE_ERROR_NONE,
            ttft_s=0.5,
            duration_s=2.0,
            prompt_tokens=90,
            output_tokens=7,
            cached_tokens=64,
        )
    ]
    assert told.watch.progress == (1.0, 2.0)
    assert told.watch.sums == RequestSums(Total(0.5, 1), 0)


def test_what_is_unknown_of_an_end_is_absent() -> None:
    told = Told()
    told.end(1, "a")
    (outcome,) = told.outcomes
    assert not any(map(outcome.HasField, ("ttft_s", "prompt_tokens", "cached_tokens")))


@pytest.mark.parametrize("error", list(EngineError))
def test_only_the_engines_own_faults_count_as_errors(error: EngineError) -> None:
    """HE1: neither callers' mistakes nor back-pressure nor a client that left."""
    told = Told()
    told.end(1, "a", error=error)
    harmless = {"none", "client", "too_long", "queue_full", "client_gone"}
    assert told.watch.sums.errors == (error.value not in harmless)
    assert (error in WORKERS_FAULT) is (error.value not in harmless)


def test_every_class_of_error_has_a_number_of_its_own() -> None:
    assert set(ERRORS) == set(EngineError)
    assert len(set(ERRORS.values())) == len(ERRORS)
