"""An agent knows what is in flight, whenever it comes and whatever it missed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.middleware.asgi import Listener, Time
from workers.engine_errors import EngineError
from workers.event_sender import EventSender
from workers.request_events import Ended, Event, FirstChunk, Hello, Started, encode
from workers.request_reporter import BEAT_S, RETELL_BEATS, NoReporter, Outcome, RequestReporter
from workers.request_table import RequestTable
from workers.response_scan import Usage

OUTCOME = Outcome(200, EngineError.NONE, 1.0, None, Usage(), False)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def sender(path: Path, clock: Time) -> EventSender:
    return EventSender(str(path), clock, backlog=4)


@pytest.fixture
def reporter(sender: EventSender, clock: Time) -> Iterator[RequestReporter]:
    one = RequestReporter(sender, clock=clock, wall_clock=lambda: 5.0)
    yield one
    one.close()


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    one = Listener(path)
    yield one
    one.close()


def kinds(events: list[Event]) -> list[str]:
    names = {Started: "started", FirstChunk: "first", Ended: "ended"}
    return [
        ("reset" if event.reset else "hello") if isinstance(event, Hello) else names[type(event)]
        for event in events
    ]


def table_of(events: list[Event]) -> RequestTable:
    table = RequestTable()
    for event in events:
        table.take(encode(event), 0.0)
    assert table.counts.mismatches == 0
    return table


def test_requests_are_numbered_and_told(listener: Listener, reporter: RequestReporter) -> None:
    first, second = reporter.started("a", "chat"), reporter.started(None, "chat")
    reporter.first_chunk(second, 0.5)
    reporter.ended(first, OUTCOME)
    events = listener.events()
    assert kinds(events) == ["reset", "hello", "started", "started", "first", "ended"]
    assert table_of(events).in_flight == 1


def test_an_agent_that_comes_later_is_told_what_is_in_flight(
    reporter: RequestReporter, path: Path, clock: Time
) -> None:
    gone, stays = reporter.started("a", "chat"), reporter.started("b", "chat")
    reporter.first_chunk(stays, 0.5)
    reporter.ended(gone, OUTCOME)
    listener = Listener(path)
    clock.now_s += BEAT_S
    reporter.beat()
    events = listener.events()
    assert kinds(events) == ["reset", "started", "hello"]
    assert table_of(events).in_flight_leases() == ["b"]
    assert isinstance(events[-1], Hello)
    assert events[-1].dropped == 0
    listener.close()


def test_an_agent_found_by_an_end_hears_of_the_request_first(
    reporter: RequestReporter, path: Path, clock: Time
) -> None:
    number = reporter.started("a", "chat")
    clock.now_s += 2
    listener = Listener(path)
    reporter.ended(number, OUTCOME)
    events = listener.events()
    assert kinds(events) == ["reset", "started", "hello", "ended"]
    assert table_of(events).in_flight == 0
    listener.close()


def test_a_beat_is_one_greeting(listener: Listener, reporter: RequestReporter, clock: Time) -> None:
    reporter.started("a", "chat")
    listener.events()
    reporter.beat()
    clock.now_s += BEAT_S
    reporter.beat()
    [hello, again] = listener.events()
    assert isinstance(hello, Hello)
    assert hello == again
    assert (hello.reset, hello.in_flight) == (False, 1)


def test_everything_is_told_again_once_a_minute(
    listener: Listener, reporter: RequestReporter, clock: Time
) -> None:
    reporter.started("a", "chat")
    heard: list[Event] = []
    for _ in range(RETELL_BEATS):
        clock.now_s += BEAT_S
        reporter.beat()
        heard += listener.events()
    assert kinds(heard)[-3:] == ["reset", "started", "hello"]
    assert kinds(heard).count("reset") == 2


def test_a_process_that_was_frozen_tells_everything_again(
    listener: Listener, reporter: RequestReporter, clock: Time
) -> None:
    reporter.started("a", "chat")
    reporter.beat()
    listener.events()
    clock.now_s += 3 * BEAT_S
    reporter.beat()
    assert kinds(listener.events()) == ["reset", "started", "hello"]


async def test_after_a_loss_everything_is_told_again(
    listener: Listener, reporter: RequestReporter, sender: EventSender
) -> None:
    numbers = [reporter.started(f"l{number}", "chat") for number in range(30)]
    assert sender.lost
    for number in numbers[1:]:
        reporter.ended(number, OUTCOME)
    reporter.beat()
    assert sender.lost, "the agent is still behind"
    heard = listener.events()
    sender._flush()
    heard += listener.events()
    reporter.beat()
    assert not sender.lost
    table = table_of(heard + listener.events())
    assert table.in_flight_leases() == ["l0"]
    assert table.counts.dropped_by_engine == sender.dropped > 0


async def test_the_timer_beats(
    listener: Listener, reporter: RequestReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter.start()
    reporter.start()
    assert kinds(listener.events()) == ["reset", "hello"]
    timer = reporter._timer
    assert timer is not None
    reporter._on_timer()
    timer.cancel()
    assert kinds(listener.events()) == ["hello"]
    assert reporter._timer is not timer


def test_instances_differ(sender: EventSender, clock: Time) -> None:
    one, other = (
        RequestReporter(sender, clock=clock, wall_clock=clock)._instance for _ in range(2)
    )
    assert one != other


def test_where_no_socket_is_configured_nothing_happens() -> None:
    nobody = NoReporter()
    nobody.start()
    nobody.first_chunk(nobody.started(None, "chat"), 1.0)
    nobody.ended(0, OUTCOME)
    nobody.close()
