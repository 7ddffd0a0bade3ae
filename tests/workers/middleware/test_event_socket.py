"""The agent's socket: its file, what it survives, what it tells."""

# ruff: noqa: ASYNC240 - a test may touch its own few files

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.middleware.asgi import Listener, Time
from workers.event_sender import EventSender
from workers.event_socket import EventSocket
from workers.request_events import Event, FirstChunk, Started, encode
from workers.request_reporter import RequestReporter
from workers.request_table import SILENT_AFTER_S, Window

A = "a" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def client() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.setblocking(False)
        yield one


def ignore(event: Event) -> None:
    """No one cares."""


async def send(client: socket.socket, path: Path, *datagrams: bytes) -> None:
    for datagram in datagrams:
        while True:
            try:
                client.sendto(datagram, str(path))
                break
            except BlockingIOError:
                await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)


async def test_events_are_handed_on_as_they_arrive(path: Path, client: socket.socket) -> None:
    heard: list[Event] = []
    events = [Started(A, 1, "l", "chat", 1.0), FirstChunk(A, 1, 0.5)]
    async with EventSocket(path, heard.append) as events_socket:
        await send(client, path, *map(encode, events))
        assert heard == events
        assert events_socket.in_flight_leases() == ["l"]
        assert (events_socket.in_flight, events_socket.instances) == (1, (A,))
        window = events_socket.take_window()
        assert (window.started, window.ttft_mean_s) == (1, 0.5)
        assert events_socket.take_window() == Window()
        assert events_socket.drop_instance(A) == ["l"]
        assert events_socket.drop_all() == []


async def test_garbage_of_any_size_is_survived(path: Path, client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    good = encode(Started(A, 1, "l", "chat", 1.0))
    async with EventSocket(path, ignore) as events_socket:
        garbage = [b"", b"\xff" * 9, b"[" * 5_000, b"x" * 60_000, good + b" " * 600]
        await send(client, path, *garbage, good)
        assert events_socket.counts.garbage == len(garbage)
        assert events_socket.in_flight_leases() == ["l"]


async def test_a_flood_is_read_in_turns(path: Path, client: socket.socket) -> None:
    async with EventSocket(path, ignore) as events_socket:
        await send(client, path, *[encode(FirstChunk(A, 1, 0.5))] * 2_000)
        assert events_socket.counts.received == 2_000


async def test_the_file_is_for_its_owner_alone_and_goes_at_the_end(path: Path) -> None:
    async with EventSocket(path, ignore):
        mode = path.lstat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert not path.exists()


async def test_another_mode_can_be_asked_for(path: Path) -> None:
    async with EventSocket(path, ignore, mode=0o660):
        assert stat.S_IMODE(path.lstat().st_mode) & 0o600 == 0o600


async def test_a_stale_file_is_replaced(path: Path) -> None:
    Listener(path).close()
    async with EventSocket(path, ignore):
        assert path.is_socket()


async def test_a_live_agent_is_not_robbed(path: Path) -> None:
    async with EventSocket(path, ignore) as first:
        with pytest.raises(OSError, match="another agent"):
            await EventSocket(path, ignore).__aenter__()
        assert path.is_socket()
        assert first.instances == ()


async def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        await EventSocket(path, ignore).__aenter__()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["missing/s", "x" * 200])
async def test_a_path_that_cannot_be_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"directory|too long"):
        await EventSocket(tmp_path / name, ignore).__aenter__()


async def test_a_socket_that_somebody_removed_is_made_again(
    path: Path, client: socket.socket
) -> None:
    async with EventSocket(path, ignore) as events_socket:
        await send(client, path, encode(Started(A, 1, "l", "chat", 1.0)))
        path.unlink()
        events_socket.check()
        assert events_socket.instances == (), "nobody has found the new one yet"
        await send(client, path, encode(Started(A, 2, "m", "chat", 1.0)))
        assert events_socket.in_flight_leases() == ["m"]


async def test_a_socket_that_somebody_replaced_is_left_to_them(path: Path) -> None:
    async with EventSocket(path, ignore) as events_socket:
        path.unlink()
        other = Listener(path)
        events_socket.check()
        events_socket.check()
        assert path.is_socket()
        other.close()
        events_socket.check()
    assert not path.exists()


async def test_processes_that_fell_silent_are_given_up(path: Path, client: socket.socket) -> None:
    clock = Time()
    async with EventSocket(path, ignore, clock=clock) as events_socket:
        await send(client, path, encode(Started(A, 1, "l", "chat", 1.0)))
        clock.now_s += SILENT_AFTER_S + 1
        events_socket.check()
        assert events_socket.instances == ()


async def test_an_agent_that_restarts_learns_what_is_in_flight(path: Path) -> None:
    clock = Time()
    sender = EventSender(str(path), clock)
    reporter = RequestReporter(sender, clock=clock, wall_clock=clock)
    async with EventSocket(path, ignore) as first:
        reporter.started("l1", "chat")
        await asyncio.sleep(0.01)
        assert first.in_flight_leases() == ["l1"]
    reporter.started("l2", "chat")
    async with EventSocket(path, ignore) as second:
        clock.now_s += 5
        reporter.beat()
        await asyncio.sleep(0.01)
        assert second.in_flight_leases() == ["l1", "l2"]
        assert second.counts.mismatches == 0
    reporter.close()
