"""Load generator of the overhead benchmark: raw asyncio, HTTP/1.1 keep-alive connections.

    python -m benchmarks.http_load

Reads orders as JSON lines. For each it makes the requests, connects, warms up and answers
``ready``; the next line, whatever it says, starts the measured part, whose latencies are the
second answer. So what is measured outside never holds the making of requests.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import msgspec

from benchmarks.chats import Chat, text
from benchmarks.rig import HOST

SYSTEM_BYTES = 4_096
CHAT_TURN_BYTES = 1_024
CHAT_TURNS = 8
LONG_TURN_BYTES = 2_048
SMALL_BYTES = 800
"""About 200 tokens."""
_ANSWER_S = 30.0
_WARM_UP_S = 120.0


class Workload(msgspec.Struct, frozen=True):
    """What is sent. ``requests`` a round over all connections.

    ``kind``: ``chat`` (a shared system prompt of 4 KB, chats from 4.5 to 12 KB, 8 KB on
    average), ``long`` (one chat a connection that grows by 2 KB a turn, ``size_bytes`` half
    way through all rounds) or ``small`` (unrelated prompts of 200 tokens).
    ``rate_per_s``: send at this rate whatever is answered; None: each connection sends when
    it has its answer.
    """

    name: str
    kind: str
    connections: int
    requests: int
    size_bytes: int = 0
    rate_per_s: float | None = None


class Order(msgspec.Struct, frozen=True):
    """One round of one arm: the bodies depend on workload, seed and round alone."""

    port: int
    workload: Workload
    seed: int
    round: int
    rounds: int


class Result(msgspec.Struct, frozen=True):
    """Latencies in milliseconds, in order of sending, and the seconds it took in all."""

    latencies_ms: list[float]
    seconds: float
    body_bytes: int
    """Mean size of a body."""


Plan = tuple[list[bytes], list[bytes]]
"""One connection's bodies: to warm up with, and to measure."""


def make_plans(order: Order) -> list[Plan]:
    """Every connection's requests."""
    load = order.workload
    share = max(1, load.requests // load.connections)
    return [_MAKERS[load.kind](order, number, share) for number in range(load.connections)]


def _chats(order: Order, number: int, count: int) -> Plan:
    rng = random.Random(f"{order.seed} {order.round} {number}")
    system = text(random.Random(order.seed), SYSTEM_BYTES)

    def bodies() -> Iterator[bytes]:
        while True:
            chat = Chat(rng, system, CHAT_TURN_BYTES)
            for _ in range(CHAT_TURNS):
                yield chat.next_turn()

    source = bodies()
    return list(islice(source, CHAT_TURNS)), list(islice(source, count))


def _long_chat(order: Order, number: int, count: int) -> Plan:
    rng = random.Random(f"{order.seed} {number}")
    chat = Chat(rng, text(random.Random(order.seed), SYSTEM_BYTES), LONG_TURN_BYTES)
    growth = order.rounds * count * LONG_TURN_BYTES
    chat.grow_to(order.workload.size_bytes - growth // 2)
    for _ in range(order.round * count):
        chat.next_turn()
    return [chat.body()], [chat.next_turn() for _ in range(count)]


def _small(order: Order, number: int, count: int) -> Plan:
    rng = random.Random(f"{order.seed} {order.round} {number}")
    bodies = [Chat(rng, text(rng, SMALL_BYTES), 3).next_turn() for _ in range(count + 1)]
    return bodies[:1], bodies[1:]


_MAKERS: dict[str, Callable[[Order, int, int], Plan]] = {
    "chat": _chats,
    "long": _long_chat,
    "small": _small,
}


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._received = b""

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect to Envoy."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, HOST, port)
        return connection

    async def send(self, body: bytes) -> None:
        """Send a chat completion and wait for the whole answer.

        Raises:
            ConnectionError: it is not 200, or the connection ended.
        """
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        self._transport.write(head + body)
        answer = await self._answer
        if not answer.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(answer[:500].decode("latin-1"))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's word that it is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that waits, if any."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"connection ended: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Collect one answer; ours always have a content-length."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if end and len(body) >= length and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._received)
            self._received = b""


async def _serve_orders() -> None:
    plans = lru_cache(maxsize=1)(_plans)
    for line in iter(sys.stdin.readline, ""):
        order = msgspec.json.decode(line, type=Order)
        made = plans(order.workload, order.seed, order.round, order.rounds)
        result = await _round(order, made)
        _say(msgspec.json.encode(result).decode())


def _plans(workload: Workload, seed: int, number: int, rounds: int) -> list[Plan]:
    return make_plans(Order(0, workload, seed, number, rounds))


def _say(line: str) -> None:
    print(line, flush=True)


async def _round(order: Order, plans: list[Plan]) -> Result:
    connections = [await Connection.open(order.port) for _ in plans]
    try:
        warm = (_in_turn(c, plan[0]) for c, plan in zip(connections, plans, strict=True))
        async with asyncio.timeout(_WARM_UP_S):
            await asyncio.gather(*warm)
        gc.collect()
        gc.freeze()
        _say("ready")
        sys.stdin.readline()
        began = time.perf_counter()
        latencies = await _measure(order, connections, plans)
        seconds = time.perf_counter() - began
    finally:
        gc.unfreeze()
        for connection in connections:
            connection.close()
    sizes = [len(body) for plan in plans for body in plan[1]]
    return Result(latencies, seconds, sum(sizes) // len(sizes))


async def _measure(order: Order, connections: list[Connection], plans: list[Plan]) -> list[float]:
    bound_s = _ANSWER_S + sum(len(plan[1]) for plan in plans)
    async with asyncio.timeout(bound_s):
        if order.workload.rate_per_s is not None:
            bodies = [body for plan in plans for body in plan[1]]
            return await _at_rate(connections, bodies, order.workload.rate_per_s)
        pairs = zip(connections, plans, strict=True)
        parts = await asyncio.gather(*(_in_turn(c, plan[1]) for c, plan in pairs))
        return [latency for part in parts for latency in part]


async def _in_turn(connection: Connection, bodies: list[bytes]) -> list[float]:
    """Closed loop; latencies in milliseconds."""
    latencies = []
    for body in bodies:
        began = time.perf_counter()
        await connection.send(body)
        latencies.append(1_000 * (time.perf_counter() - began))
    return latencies


async def _at_rate(
    connections: list[Connection], bodies: list[bytes], rate_per_s: float
) -> list[float]:
    """Open loop, evenly spaced. Time waiting for a free connection counts as latency."""
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    for connection in connections:
        free.put_nowait(connection)
    latencies: list[float] = []

    async def one(body: bytes, due: float) -> None:
        connection = await free.get()
        await connection.send(body)
        free.put_nowait(connection)
        latencies.append(1_000 * (time.perf_counter() - due))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, body in enumerate(bodies):
            due = start + number / rate_per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(body, due))
    return latencies


if __name__ == "__main__":
    asyncio.run(_serve_orders())
