from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from workers.simulator.chain import Origin, TokenChain
from workers.simulator.kv_events import encode_batch
from workers.simulator.requests import AllBlocksCleared, BlockRemoved, BlocksStored

from .client import Client
from .conftest import Start


def decoded(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


def stored(first: int, last: int, origin: Origin) -> BlocksStored:
    chain = TokenChain.of(range(1, 13), 4, origin)
    hashes = chain.block_hashes(first, last)
    parent = chain.parent_hash(first)
    return BlocksStored(hashes, parent, chain.block_bytes(first, last), 4, first, origin)


@asynccontextmanager
async def connected(kind: int, endpoint: str | None) -> AsyncIterator[zmq.asyncio.Socket]:
    assert endpoint is not None
    with zmq.asyncio.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        yield socket


async def received(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(10):
        return await socket.recv_multipart()


async def replayed(worker: Client, start: int) -> list[list[bytes]]:
    assert worker.simulator.publisher is not None
    frames = []
    endpoint = worker.simulator.publisher.replay_endpoint
    async with connected(zmq.DEALER, endpoint) as socket:
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while not frames or frames[-1][2] != b"\xff" * 8:
            frames.append(await received(socket))
    return frames


def test_a_stored_event_has_the_fields_of_vllm_and_no_others() -> None:
    batch = decoded(encode_batch([stored(0, 2, Origin())], 1.5))
    event = batch[1][0]
    assert (batch[0], batch[2]) == (1.5, 0)
    assert list(event) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
        "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    ]  # fmt: skip
    assert event["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert event["parent_block_hash"] is event["lora_id"] is event["lora_name"] is None
    assert event["extra_keys"] == [None, None]
    assert (event["medium"], event["group_idx"]) == ("GPU", 0)
    assert all(0 <= block_hash < 2**64 for block_hash in event["block_hashes"])


def test_adapters_key_every_block_and_salts_the_first() -> None:
    origin = Origin("ad1", 1, "zz", "sess1")
    events = [stored(0, 2, origin), stored(2, 3, origin)]
    first, later = decoded(encode_batch(events, 0.0))[1]
    assert first["extra_keys"] == [["ad1", "zz"], ["ad1"]]
    assert later["extra_keys"] == [["ad1"]]
    assert later["parent_block_hash"] == first["block_hashes"][-1]
    assert (first["lora_id"], first["lora_name"], first["session_id"]) == (1, "ad1", "sess1")
    salted = decoded(encode_batch([stored(0, 2, Origin(cache_salt="a"))], 0.0))[1][0]
    assert salted["extra_keys"] == [["a"], None]


def test_removals_name_one_block_each() -> None:
    events = decoded(encode_batch([BlockRemoved(7), BlockRemoved(8)], 0.0))[1]
    assert events[0] == {
        "type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0
    }  # fmt: skip
    assert events[1]["block_hashes"] == [8]


def test_a_cleared_batch_has_the_bytes_seen_from_vllm() -> None:
    expected = "93cb41dac30dad9f797c9181a474797065b0416c6c426c6f636b73436c656172656400"
    ts = msgspec.msgpack.decode(bytes.fromhex(expected))[0]
    assert encode_batch([AllBlocksCleared()], ts).hex() == expected


async def test_subscribers_get_topic_sequence_and_batch(start: Start) -> None:
    worker = await start(kv_events_topic="kv@here@sim")
    assert worker.simulator.publisher is not None
    async with connected(zmq.SUB, worker.simulator.publisher.endpoint) as socket:
        # A subscription takes a moment to arrive: publish until something comes.
        while not await socket.poll(20):
            await worker.complete(list(range(100, 133)), max_tokens=1)
            await worker.post("/reset_prefix_cache", {})
        topic, sequence, payload = await received(socket)
    assert topic == b"kv@here@sim"
    assert len(sequence) == 8
    stored_events = [e for e in decoded(payload)[1] if e["type"] == "BlockStored"]
    assert stored_events[0]["token_ids"] == list(range(100, 132))


async def test_a_replay_starts_where_asked_and_says_where_it_ends(start: Start) -> None:
    worker = await start()
    for first in (100, 200, 300):
        await worker.complete(list(range(first, first + 33)), max_tokens=1)
    end = [b"", b"", b"\xff" * 8, b""]
    everything = await replayed(worker, 0)
    assert [int.from_bytes(f[2], "big") for f in everything[:-1]] == [0, 1, 2]
    assert everything[-1] == end
    tail = await replayed(worker, 2)
    assert tail == everything[2:]
    assert decoded(tail[0][3])[1][0]["token_ids"] == list(range(300, 332))
    assert await replayed(worker, 99) == [end]


async def test_a_cleared_cache_is_published_with_the_next_step(start: Start) -> None:
    worker = await start()
    await worker.complete(list(range(33)), max_tokens=1)
    assert await worker.post("/reset_prefix_cache", {}) == (200, {"success": True})
    assert len(await replayed(worker, 1)) == 1
    await worker.complete(list(range(33)), max_tokens=1)
    (cleared, again), _end = (decoded(f[3])[1] if f[3] else f for f in await replayed(worker, 1))
    assert cleared == {"type": "AllBlocksCleared"}
    assert again["type"] == "BlockStored"


async def test_the_events_configuration_can_be_read(start: Start) -> None:
    worker = await start(kv_events_topic="t")
    publisher = worker.simulator.publisher
    assert publisher is not None
    _status, sources = await worker.get("/kv_event_sources")
    assert sources["0"]["enable_kv_cache_events"] is True
    assert sources["0"]["endpoint"] == publisher.endpoint
    assert sources["0"]["replay_endpoint"] == publisher.replay_endpoint
    assert sources["0"]["topic"] == "t"
