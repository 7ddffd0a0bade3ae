"""Agents' side of the Report protocol for many workers at once, with nothing behind it.

One gRPC connection and one stream a worker, as real agents have: hello, a whole digest, then
a load at the pace that the scheduler asks for and the digest again at its snapshot interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import numpy as np

from benchmarks.chats import MODEL
from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest
from extproc.control import SERVICE
from extproc.generated.kvgate.v1 import agent_pb2 as pb

_ANSWER_S = 30.0


class Agent:
    """One worker's agent.

    Args:
        slots: sequences that its engine runs at once.
        keys: of its digest.

    Attributes:
        running: requests that its engine has; the next load tells.
    """

    def __init__(self, address: str, slots: int, keys: int, rng: random.Random) -> None:
        self.address = address
        self.running = 0
        self._slots = slots
        self._keys = np.random.default_rng(rng.getrandbits(32)).integers(
            0, 2**64, size=keys, dtype=np.uint64
        )
        self._phase = rng.random()
        self._sequence = 0
        self._changed = asyncio.Event()

    def tell(self, running: int) -> None:
        """Report another load at once."""
        self.running = running
        self._changed.set()

    async def speak(self, target: str, joined: asyncio.Event) -> None:
        """Keep a stream open until cancelled; ``joined`` is set after the first load."""
        # Every agent is a process of its own: none shares a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            call = channel.stream_stream(
                f"/{SERVICE}/Report",
                request_serializer=pb.AgentMessage.SerializeToString,
                response_deserializer=pb.SchedulerMessage.FromString,
            )()
            await call.write(pb.AgentMessage(hello=self._hello()))
            terms = (await call.read()).settings
            loop = asyncio.get_running_loop()
            # Agents start at different times: their snapshots do not come together.
            snapshot_at = loop.time() + self._phase * terms.snapshot_interval_s
            await call.write(self._snapshot(terms))
            while True:
                await call.write(self._load())
                joined.set()
                if loop.time() >= snapshot_at:
                    await call.write(self._snapshot(terms))
                    snapshot_at += terms.snapshot_interval_s
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), terms.report_interval_s)

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            address=self.address, models=[MODEL], max_running=self._slots, kv_events=True
        )

    def _load(self) -> pb.AgentMessage:
        load = pb.Load(
            ready=True,
            state=pb.WORKER_STATE_READY,
            running=self.running,
            waiting=0,
            kv_usage=0.1,
            kv_blocks=8_192,
        )
        return pb.AgentMessage(load=load)

    def _snapshot(self, terms: pb.PoolSettings) -> pb.AgentMessage:
        digest = BlockDigest(terms.digest_capacity, terms.digest_error_rate)
        digest.add_keys(self._keys)
        self._sequence += 1
        snapshot = pb.DigestSnapshot(
            version=WIRE_VERSION,
            epoch=1,
            sequence=self._sequence,
            block_size_tokens=terms.block_size_tokens,
            capacity=digest.shape.capacity,
            error_rate=digest.shape.error_rate,
            num_slices=digest.shape.num_slices,
            bits_per_slice=digest.shape.bits_per_slice,
            hash_name=HASH_NAME,
            count=digest.count,
            bits=digest.packed(),
            checksum=digest.checksum(),
        )
        return pb.AgentMessage(snapshot=snapshot)


@asynccontextmanager
async def connected(agents: Sequence[Agent], target: str) -> AsyncIterator[None]:
    """All agents connected, each with its first load told.

    Raises:
        ConnectionError: some could not connect, or a stream ended meanwhile.
    """
    joined = [asyncio.Event() for _ in agents]
    async with AsyncExitStack() as stack:
        pairs = zip(agents, joined, strict=True)
        streams = [asyncio.create_task(agent.speak(target, event)) for agent, event in pairs]
        stack.push_async_callback(_end, streams)
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.gather(*(event.wait() for event in joined))
        yield
        if any(stream.done() for stream in streams):
            raise ConnectionError("an agent's stream ended while it was measured")


async def _end(streams: Sequence[asyncio.Task[None]]) -> None:
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
