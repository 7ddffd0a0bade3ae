"""KV events on the wire: vLLM's msgpack batches over ZMQ, with replay.

A batch is an array of time, events and data-parallel rank; an event is a map. PUB frames are
topic, sequence number (8 bytes, big-endian, from 0) and batch. A DEALER that sends an empty
frame and a sequence number to the ROUTER gets what is still buffered from there on, then an
end mark.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from workers.simulator.chain import Origin, unpack_ids
from workers.simulator.requests import BlockRemoved, BlocksStored, CacheEvent

BUFFERED_BATCHES = 10_000
HIGH_WATER_MARK = 100_000
END_OF_REPLAY = b"\xff" * 8


class _Event(msgspec.Struct, tag_field="type", omit_defaults=True, gc=False):
    pass


class _Stored(_Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class _Removed(_Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _Cleared(_Event, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int = 0


_encoder = msgspec.msgpack.Encoder()


def encode_batch(events: Sequence[CacheEvent], ts: float) -> bytes:
    """One batch as vLLM encodes it."""
    return _encoder.encode(_Batch(ts, [_wire(event) for event in events]))


def _wire(event: CacheEvent) -> _Stored | _Removed | _Cleared:
    if isinstance(event, BlocksStored):
        return _Stored(
            block_hashes=event.hashes,
            parent_block_hash=event.parent,
            token_ids=unpack_ids(event.token_bytes),
            block_size=event.block_size,
            lora_id=event.origin.adapter_id,
            medium="GPU",
            lora_name=event.origin.adapter,
            extra_keys=_extra_keys(event.origin, event.first_block, len(event.hashes)),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            session_id=event.origin.session_id,
        )
    if isinstance(event, BlockRemoved):
        return _Removed(block_hashes=[event.block_hash], medium="GPU", group_idx=0)
    return _Cleared()


def _extra_keys(origin: Origin, first_block: int, blocks: int) -> list[list[str] | None]:
    every = [origin.adapter] if origin.adapter else []
    keys: list[list[str] | None] = [list(every) or None for _ in range(blocks)]
    if first_block == 0 and blocks and origin.cache_salt:
        keys[0] = [*every, origin.cache_salt]
    return keys


class KvEventPublisher:
    """PUB socket and, if asked for, the ROUTER that replays; both bound on construction."""

    def __init__(self, host: str, port: int, replay_port: int | None, topic: str = "") -> None:
        self.topic = topic
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED_BATCHES)
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(HIGH_WATER_MARK)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self.endpoint = _bind(self._publish, host, port)
            self.replay_endpoint: str | None = None
            if replay_port is not None:
                self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                self.replay_endpoint = _bind(self._replay, host, replay_port)
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, events: Sequence[CacheEvent], ts: float) -> None:
        """Send a batch; a subscriber that cannot keep up loses it and asks for a replay."""
        payload = encode_batch(events, ts)
        self._buffer.append((self._sequence, payload))
        frames = [self.topic.encode(), self._sequence.to_bytes(8, "big"), payload]
        self._publish.send_multipart(frames)
        self._sequence += 1

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == len(END_OF_REPLAY):
                await self._answer(self._replay, frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, socket: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        topic = self.topic.encode()
        for sequence, payload in list(self._buffer):
            if sequence >= start:
                frames = [client, b"", topic, sequence.to_bytes(8, "big"), payload]
                await socket.send_multipart(frames)
        await socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Close both sockets without waiting for subscribers."""
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bytes(endpoint).rstrip(b"\0").decode() if isinstance(endpoint, bytes) else str(endpoint)
