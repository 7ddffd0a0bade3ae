from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.engine import FakePublisher, running
from workers.agent.kv_events import Removed
from workers.agent.kv_source import Gap, Item, KvEventSource, Numbered, Reset

EVENT = {"type": "BlockRemoved", "block_hashes": [1]}


@contextlib.asynccontextmanager
async def heard_from(source: KvEventSource) -> AsyncIterator[asyncio.Queue[Item]]:
    """Items of a source as a queue, while the block runs."""
    items: asyncio.Queue[Item] = asyncio.Queue()

    async def follow() -> None:
        async with contextlib.aclosing(source.items()) as stream:
            async for item in stream:
                items.put_nowait(item)

    task = asyncio.create_task(follow())
    try:
        yield items
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def take(items: asyncio.Queue[Item], count: int) -> list[Any]:
    """The next items: a number for a batch, the item itself otherwise."""
    async with asyncio.timeout(10):
        taken = [await items.get() for _ in range(count)]
    return [item.seq if isinstance(item, Numbered) else item for item in taken]


def source_of(publisher: FakePublisher, *, replay: bool = True) -> KvEventSource:
    return KvEventSource(
        publisher.events, publisher.replay if replay else "", replay_timeout_s=2.0, poll_s=0.02
    )


@pytest.fixture
async def publisher() -> AsyncIterator[FakePublisher]:
    publisher = FakePublisher()
    async with running(publisher):
        yield publisher


async def test_batches_come_in_order_with_their_events(publisher: FakePublisher) -> None:
    async with heard_from(source_of(publisher)) as items:
        await publisher.subscribed()
        for _ in range(40):
            await publisher.publish(EVENT)
        async with asyncio.timeout(10):
            first = await items.get()
        assert isinstance(first, Numbered)
        assert first.batch.events == [Removed([1])]
        assert await take(items, 39) == list(range(1, 40))


async def test_an_agent_younger_than_its_engine_hears_the_past(publisher: FakePublisher) -> None:
    for _ in range(1_500):
        await publisher.publish(EVENT)
    async with heard_from(source_of(publisher)) as items:
        assert await take(items, 1_500) == list(range(1_500))
        await publisher.publish(EVENT)
        assert await take(items, 1) == [1_500]


async def test_without_replay_the_past_is_told_as_a_gap(publisher: FakePublisher) -> None:
    for _ in range(5):
        await publisher.publish(EVENT)
    async with heard_from(source_of(publisher, replay=False)) as items:
        await publisher.subscribed()
        await publisher.publish(EVENT)
        assert await take(items, 2) == [Gap(0, 4), 5]


async def test_a_replay_that_does_not_reach_back_is_told_as_a_gap() -> None:
    publisher = FakePublisher(keep=3)
    async with running(publisher):
        for _ in range(10):
            await publisher.publish(EVENT)
        async with heard_from(source_of(publisher)) as items:
            assert await take(items, 4) == [Gap(0, 6), 7, 8, 9]


async def test_a_gap_is_closed_by_replay(publisher: FakePublisher) -> None:
    async with heard_from(source_of(publisher)) as items:
        await publisher.subscribed()
        await publisher.publish(EVENT)
        for _ in range(3):
            await publisher.publish(EVENT, heard=False)
        await publisher.publish(EVENT)
        await publisher.publish(EVENT)
        assert await take(items, 6) == [0, 1, 2, 3, 4, 5]


async def test_a_lost_last_batch_is_asked_for_once_it_is_quiet(publisher: FakePublisher) -> None:
    source = KvEventSource(publisher.events, publisher.replay, poll_s=0.02, quiet_s=0.1)
    async with heard_from(source) as items:
        await publisher.subscribed()
        await publisher.publish(EVENT)
        await publisher.publish(EVENT, heard=False)
        assert await take(items, 2) == [0, 1]
        await publisher.publish(EVENT, heard=False)
        assert await take(items, 1) == [2]


async def test_without_replay_a_gap_is_told(publisher: FakePublisher) -> None:
    async with heard_from(source_of(publisher, replay=False)) as items:
        await publisher.subscribed()
        await publisher.publish(EVENT)
        await publisher.publish(EVENT, heard=False)
        await publisher.publish(EVENT)
        assert await take(items, 3) == [0, Gap(1, 1), 2]


async def test_numbers_that_go_back_are_a_new_engine(publisher: FakePublisher) -> None:
    async with heard_from(source_of(publisher)) as items:
        await publisher.subscribed()
        for _ in range(3):
            await publisher.publish(EVENT)
        assert await take(items, 3) == [0, 1, 2]
        await publisher.stop()
        await publisher.start()
        await publisher.subscribed()
        await publisher.publish(EVENT)
        await publisher.publish(EVENT)
        assert await take(items, 3) == [Reset(engine_restarted=True), 0, 1]


async def test_a_new_engine_is_seen_even_if_the_old_one_was_only_replayed(
    publisher: FakePublisher,
) -> None:
    for _ in range(5):
        await publisher.publish(EVENT)
    async with heard_from(source_of(publisher)) as items:
        assert await take(items, 5) == [0, 1, 2, 3, 4]
        await publisher.stop()
        await publisher.start()
        await publisher.subscribed()
        await publisher.publish(EVENT, heard=False)
        await publisher.publish(EVENT)
        assert await take(items, 3) == [Reset(engine_restarted=True), 0, 1]


async def test_a_rewind_tells_everything_again(publisher: FakePublisher) -> None:
    source = source_of(publisher)
    async with heard_from(source) as items:
        await publisher.subscribed()
        await publisher.publish(EVENT)
        await publisher.publish(EVENT)
        assert await take(items, 2) == [0, 1]
        source.rewind()
        assert await take(items, 3) == [Reset(engine_restarted=False), 0, 1]
        await publisher.publish(EVENT)
        assert await take(items, 1) == [2]


async def test_a_malformed_batch_keeps_its_number(publisher: FakePublisher) -> None:
    async with heard_from(source_of(publisher)) as items:
        await publisher.subscribed()
        await publisher.publish_raw(b"\xc1")
        await publisher.publish(EVENT)
        async with asyncio.timeout(10):
            bad = await items.get()
        assert isinstance(bad, Numbered)
        assert (bad.seq, bad.batch.unreadable) == (0, 1)
        assert await take(items, 1) == [1]


async def test_frames_that_are_no_batch_are_ignored(publisher: FakePublisher) -> None:
    async with heard_from(source_of(publisher)) as items:
        await publisher.subscribed()
        await publisher._pub.send_multipart([b"kv@test", b"short", b"x"])
        await publisher._pub.send_multipart([b"kv@test"])
        await publisher.publish(EVENT)
        assert await take(items, 1) == [0]


async def test_a_lost_engine_is_told_at_once(publisher: FakePublisher) -> None:
    gone = asyncio.Event()
    source = KvEventSource(publisher.events, on_disconnect=gone.set)
    async with heard_from(source):
        await publisher.subscribed()
        await publisher.stop()
        async with asyncio.timeout(10):
            await gone.wait()
        await publisher.start()
