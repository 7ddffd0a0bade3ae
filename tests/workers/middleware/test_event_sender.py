"""Sending to the agent never blocks and never raises, whatever the agent does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.middleware.asgi import Listener, Time
from workers.event_sender import RETRY_S, EventSender

KERNEL_QUEUE = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 1


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def sender(path: Path, clock: Time) -> Iterator[EventSender]:
    one = EventSender(str(path), clock, backlog=20)
    yield one
    one.close()


def test_without_an_agent_datagrams_are_dropped_and_counted(sender: EventSender) -> None:
    assert not sender.connect()
    sender.send(b"x")
    assert (sender.connected, sender.dropped) == (False, 1)


def test_an_agent_is_looked_for_once_a_second(sender: EventSender, path: Path, clock: Time) -> None:
    assert not sender.connect()
    listener = Listener(path)
    assert not sender.connect()
    clock.now_s += RETRY_S
    assert sender.connect()
    listener.close()


@pytest.mark.parametrize("name", ["missing/s", "x" * 200])
def test_a_path_that_cannot_be_is_an_agent_that_is_not_there(name: str, tmp_path: Path) -> None:
    sender = EventSender(str(tmp_path / name), Time())
    assert not sender.connect()


def test_what_is_sent_arrives_in_order(sender: EventSender, path: Path) -> None:
    listener = Listener(path)
    sender.connect()
    for number in range(5):
        sender.send(b"%d" % number)
    assert list(listener.datagrams()) == [b"0", b"1", b"2", b"3", b"4"]
    listener.close()


async def test_a_slow_agent_gets_a_short_backlog_in_order(sender: EventSender, path: Path) -> None:
    listener = Listener(path)
    sender.connect()
    sent = [b"%d" % number for number in range(KERNEL_QUEUE + 20)]
    for datagram in sent:
        sender.send(datagram)
    assert sender.backlogged
    got: list[bytes] = []
    while len(got) < len(sent):
        got += listener.datagrams()
        await asyncio.sleep(0)
    assert got == sent
    await asyncio.sleep(0)
    assert (sender.backlogged, sender.dropped, sender.lost) == (False, 0, False)
    listener.close()


async def test_beyond_the_backlog_datagrams_are_dropped_at_once(
    sender: EventSender, path: Path
) -> None:
    listener = Listener(path)
    sender.connect()
    began_s = time.monotonic()
    for _ in range(KERNEL_QUEUE + 20 + 7):
        sender.send(b"x")
    assert time.monotonic() - began_s < 0.5
    assert (sender.dropped, sender.lost) == (7, True)
    listener.close()


async def test_an_agent_that_dies_takes_the_backlog_with_it(
    sender: EventSender, path: Path
) -> None:
    listener = Listener(path)
    sender.connect()
    for _ in range(KERNEL_QUEUE + 3):
        sender.send(b"x")
    listener.close()
    await asyncio.sleep(0.05)
    assert (sender.connected, sender.backlogged, sender.dropped) == (False, False, 3)


def test_a_restarted_agent_is_found_again(sender: EventSender, path: Path, clock: Time) -> None:
    Listener(path).close()
    path.unlink()
    first = Listener(path)
    sender.connect()
    first.close()
    path.unlink()
    sender.send(b"lost")
    assert not sender.connected
    second = Listener(path)
    clock.now_s += RETRY_S
    assert sender.connect()
    sender.send(b"heard")
    assert list(second.datagrams()) == [b"heard"]
    second.close()
