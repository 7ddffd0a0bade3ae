"""What it costs to tell a scheduler 100,000 cached blocks and 2,000 changes of them a second.

    python -m benchmarks.digest_build

First in process, step by step and without a network: the engine's event payloads are decoded,
entered and told, and the real index of a scheduler follows. Then the agent as a process between
an engine's sockets and a gRPC server, for its whole CPU time. Events are as vLLM sends them: a
prompt's blocks in one event, a generated block in one of its own, one event for each removal.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import grpc
import msgspec
import numpy as np
import typer
import zmq
import zmq.asyncio
from aiohttp import web

from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, median, print_table, write_json
from extproc.cache.digest import BlockDigest, DigestShape
from extproc.cache.feed import Delta, DigestFeed, Snapshot
from extproc.cache.index import PrefixIndex
from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.block_ledger import BlockLedger
from workers.agent.counted_digest import CountedDigest
from workers.agent.engine_state import EngineState
from workers.agent.kv_events import decode_batch
from workers.agent.pool_terms import PoolTerms
from workers.agent.report_book import ReportBook
from workers.agent.worker_cache import WorkerCache
from workers.agent.worker_report import WorkerReport

BLOCK_SIZE = 16
ERROR_RATE = 0.01
BATCHES_PER_S = 40
"""Engine steps that change the cache."""
CHAIN_BLOCKS = 32
DECODED_BLOCKS = 4
"""Of each chain, blocks that decoding fills: an event each."""
VOCABULARY = 150_000
CPU_TARGET = 0.10
BYTES_TARGET = 64_000
_PAGE = (
    'vllm:num_requests_running{engine="0"} 8\nvllm:num_requests_waiting{engine="0"} 0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
)


@dataclass(frozen=True)
class Settings:
    """One run: ``changes_per_s`` are stores and removals together, half of each."""

    blocks: int = 100_000
    changes_per_s: int = 2_000
    seconds: int = 30
    process_seconds: int = 20
    overlay_keys: int = 20_000
    """Keys just routed to the worker, which the scheduler's index holds beside the digest."""
    seed: int = 1
    output: Path | None = None


class Engine:
    """Event payloads of a full cache in which new chains push the oldest out."""

    def __init__(self, settings: Settings) -> None:
        self._capacity = settings.blocks
        self._rng = np.random.default_rng(settings.seed)
        self._hashes = count(1)
        self._cached: deque[list[int]] = deque()
        self._held = 0
        self._ready: Iterator[dict[str, Any]] = iter(())

    def filling(self) -> Iterator[bytes]:
        """Payloads that fill the cache."""
        while self._held + CHAIN_BLOCKS <= self._capacity:
            yield _payload(list(self._new_chain()))

    def churn(self, changes: int) -> bytes:
        """One payload of so many stored and removed blocks."""
        events: list[dict[str, Any]] = []
        done = 0
        while done < changes:
            event = next(self._ready, None)
            if event is None:
                self._ready = self._turnover()
                continue
            events.append(event)
            done += len(event["block_hashes"])
        return _payload(events)

    def _turnover(self) -> Iterator[dict[str, Any]]:
        gone = self._cached.popleft()
        self._held -= len(gone)
        for block_hash in reversed(gone):
            yield {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU"}
        yield from self._new_chain()

    def _new_chain(self) -> Iterator[dict[str, Any]]:
        hashes = [next(self._hashes) * 0x9E3779B97F4A7C15 % 2**64 for _ in range(CHAIN_BLOCKS)]
        tokens = self._rng.integers(0, VOCABULARY, size=CHAIN_BLOCKS * BLOCK_SIZE).tolist()
        self._cached.append(hashes)
        self._held += CHAIN_BLOCKS
        prompt = CHAIN_BLOCKS - DECODED_BLOCKS
        runs = [(0, prompt), *((at, at + 1) for at in range(prompt, CHAIN_BLOCKS))]
        for first, end in runs:
            yield {
                "type": "BlockStored",
                "block_hashes": hashes[first:end],
                "parent_block_hash": hashes[first - 1] if first else None,
                "token_ids": tokens[first * BLOCK_SIZE : end * BLOCK_SIZE],
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * (end - first),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }


def _payload(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 0])


@dataclass
class Timer:
    """CPU seconds by step."""

    spent: dict[str, float] = field(default_factory=dict)
    each: dict[str, list[float]] = field(default_factory=dict)

    def run(self, step: str, action: Any, *arguments: Any) -> Any:
        """Call and charge it to a step."""
        began = time.process_time()
        result = action(*arguments)
        took = time.process_time() - began
        self.spent[step] = self.spent.get(step, 0.0) + took
        self.each.setdefault(step, []).append(took)
        return result


class Reader:
    """A scheduler's side: the real feed and index."""

    def __init__(self, settings: Settings) -> None:
        shape = DigestShape(settings.blocks, ERROR_RATE)
        self.index = PrefixIndex(shape, 2 * settings.overlay_keys + 2)
        self.column = self.index.add_column()
        self.feed = DigestFeed(self.index, self.column, BLOCK_SIZE)
        self.timer = Timer()
        self.bytes = 0
        self.kinds: dict[str, int] = {}
        self._heard = asyncio.Event()
        rng = np.random.default_rng(settings.seed + 1)
        keys = rng.integers(0, 2**64, size=settings.overlay_keys, dtype=np.uint64)
        self.index.overlay(self.column, keys)

    async def has(self, keys: float) -> None:
        """Wait until the digest holds so many keys."""
        while self.feed.count < keys:
            self._heard.clear()
            await self._heard.wait()

    def hear(self, message: agent_pb2.AgentMessage) -> None:
        """Take one message in."""
        self._heard.set()
        kind = message.WhichOneof("kind") or ""
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.bytes += message.ByteSize()
        if kind == "snapshot":
            told = {name: getattr(message.snapshot, name) for name in Snapshot.__dataclass_fields__}
            self.timer.run("snapshot", self.feed.apply_snapshot, Snapshot(**told), 0.0)
        elif kind == "delta":
            delta = message.delta
            fields = (delta.added_keys, delta.cleared_bits, delta.removed_keys)
            told_delta = Delta(delta.epoch, delta.sequence, *fields)
            self.timer.run("delta", self.feed.apply_delta, told_delta, 0.0)


def pool_settings(settings: Settings) -> agent_pb2.PoolSettings:
    """Terms as a scheduler tells them by default."""
    return agent_pb2.PoolSettings(
        pool="bench",
        key_namespace=7,
        block_size_tokens=BLOCK_SIZE,
        digest_capacity=settings.blocks,
        digest_error_rate=ERROR_RATE,
        report_interval_s=1.0,
        delta_interval_s=0.2,
        snapshot_interval_s=30.0,
    )


def in_process(settings: Settings) -> dict[str, Any]:
    """Every step on virtual time."""
    engine, reader, timer = Engine(settings), Reader(settings), Timer()
    terms = PoolTerms.of(pool_settings(settings))
    cache = WorkerCache(count(1).__next__)
    ledger, _ = cache.open(terms.kind, holder=None)
    book = ReportBook(WorkerReport(EngineState(), cache))
    for payload in engine.filling():
        cache.apply(decode_batch(payload))
    cache.listen(book, ledger)
    book.settle(terms, ledger)
    _tell(book, reader, 0.0, Timer())
    first_bytes, reader.bytes, reader.timer = reader.bytes, 0, Timer()
    changes = settings.changes_per_s // BATCHES_PER_S
    for step in range(1, settings.seconds * BATCHES_PER_S + 1):
        payload = engine.churn(changes)
        batch = timer.run("decode events", decode_batch, payload)
        timer.run("enter into the ledger", cache.apply, batch)
        _tell(book, reader, step / BATCHES_PER_S, timer)
    measured_bytes = reader.bytes
    _tell(book, reader, settings.seconds + 1.0, Timer())
    _check(ledger, reader)
    cpu_s = sum(timer.spent.values())
    return {
        "cpu_share": cpu_s / settings.seconds,
        "cpu_share_by_step": {name: s / settings.seconds for name, s in timer.spent.items()},
        "first_messages_bytes": first_bytes,
        "bytes_per_s": measured_bytes / settings.seconds,
        "messages": reader.kinds,
        "scheduler_ms": {
            name: {"median": 1e3 * median(each), "max": 1e3 * max(each)}
            for name, each in reader.timer.each.items()
        },
        **_snapshot_facts(settings, ledger),
    }


def _tell(book: ReportBook, reader: Reader, now_s: float, timer: Timer) -> None:
    while (message := timer.run("make reports", book.next_message, now_s)) is not None:
        timer.run("serialise", message.SerializeToString)
        reader.hear(message)


def _check(ledger: BlockLedger, reader: Reader) -> None:
    """The scheduler's bits are the ledger's: nothing missed, nothing left over."""
    told = reader.index._columns[reader.column].digest_bits
    plain = CountedDigest(DigestShape(ledger.capacity, ERROR_RATE), ledger.live_keys())
    assert told.tobytes() == plain.packed()
    assert reader.feed.count == len(ledger)


def _snapshot_facts(settings: Settings, ledger: BlockLedger) -> dict[str, Any]:
    """Building a snapshot, and what telling removals by snapshots alone would cost."""
    timer = Timer()
    shape = DigestShape(settings.blocks, ERROR_RATE)
    for _ in range(5):
        keys = timer.run("keys", ledger.live_keys)
        timer.run("counting filter", CountedDigest, shape, keys)
        plain = BlockDigest(settings.blocks, ERROR_RATE)
        timer.run("plain filter", plain.add_keys, keys)
    return {
        "keys": len(ledger),
        "snapshot_bytes": shape.num_bytes,
        "snapshot_build_ms": 1e3 * median(timer.each["counting filter"]),
        "by_snapshots_each_second": {
            "bytes_per_s": shape.num_bytes + 4 * settings.changes_per_s,
            "cpu_share": median(timer.each["plain filter"]) + median(timer.each["keys"]),
        },
    }


# The agent as a process.


@asynccontextmanager
async def _http() -> AsyncIterator[int]:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "bench"}]})

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=_PAGE)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port: int = runner.addresses[0][1]
        yield port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _scheduler(settings: Settings, reader: Reader) -> AsyncIterator[int]:
    async def report(_: object, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            reader.hear(message)
            if message.HasField("hello"):
                told = agent_pb2.SchedulerMessage(settings=pool_settings(settings))
                await context.write(told)

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        report,
        request_deserializer=agent_pb2.AgentMessage.FromString,
        response_serializer=agent_pb2.SchedulerMessage.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("kvgate.v1.Fleet", {"Report": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def as_process(settings: Settings) -> dict[str, Any]:
    """The whole agent's CPU time and traffic, in real time."""
    reader, engine = Reader(settings), Engine(settings)
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.set_hwm(0)
    events = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with _http() as http, _scheduler(settings, reader) as control:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "workers.agent", "--drain-s", "0"),
                *("--engine", f"http://127.0.0.1:{http}"),
                *("--kv-events", f"tcp://127.0.0.1:{events}"),
                *("--scheduler", f"127.0.0.1:{control}"),
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                return await _drive(settings, publisher, engine, reader, process.pid)
            finally:
                process.terminate()
                await process.wait()
    finally:
        context.destroy(linger=0)


async def _drive(
    settings: Settings,
    publisher: zmq.asyncio.Socket,
    engine: Engine,
    reader: Reader,
    pid: int,
) -> dict[str, Any]:
    sequence = count()

    async def publish(payload: bytes) -> None:
        await publisher.send_multipart([b"", struct.pack(">Q", next(sequence)), payload])

    async with asyncio.timeout(120):
        await publisher.recv()
        for payload in engine.filling():
            await publish(payload)
            await asyncio.sleep(0)
        await reader.has(0.99 * settings.blocks)
    await asyncio.sleep(1.0)
    before_cpu_s, before_bytes, began_s = _cpu_s(pid), reader.bytes, time.monotonic()
    changes = settings.changes_per_s // BATCHES_PER_S
    for step in range(settings.process_seconds * BATCHES_PER_S):
        await publish(engine.churn(changes))
        await asyncio.sleep(max(0.0, began_s + step / BATCHES_PER_S - time.monotonic()))
    seconds = time.monotonic() - began_s
    return {
        "cpu_share": (_cpu_s(pid) - before_cpu_s) / seconds,
        "bytes_per_s": (reader.bytes - before_bytes) / seconds,
        "changes_per_s": settings.process_seconds * settings.changes_per_s / seconds,
        "resident_mb": _resident_mb(pid),
        "messages": reader.kinds,
    }


def _cpu_s(pid: int) -> float:
    # Fields after the command's name, which may hold spaces: 14 and 15 of proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4_096 / 1e6


# Reporting.


def run(settings: Settings) -> dict[str, Any]:
    """Measure, print and write."""
    random.seed(settings.seed)
    steps = in_process(settings)
    process = asyncio.run(as_process(settings)) if settings.process_seconds else None
    told = {key: value for key, value in asdict(settings).items() if key != "output"}
    result = {"machine": machine_facts(), "settings": told, "steps": steps, "process": process}
    _print(settings, steps, process)
    if settings.output:
        write_json(settings.output, result)
    return result


def _print(settings: Settings, steps: dict[str, Any], process: dict[str, Any] | None) -> None:
    rows = [(name, f"{100 * share:.2f}%") for name, share in steps["cpu_share_by_step"].items()]
    rows.append(("together", f"{100 * steps['cpu_share']:.2f}%"))
    if process:
        rows.append(("the whole process", f"{100 * process['cpu_share']:.2f}%"))
    print_table(
        f"{settings.blocks:,} blocks, {settings.changes_per_s:,} changes a second: "
        f"share of a core, target {100 * CPU_TARGET:.0f}%",
        ("agent", "CPU"),
        rows,
    )
    other = steps["by_snapshots_each_second"]
    rows = [
        ("as it is", f"{steps['bytes_per_s']:,.0f}"),
        *([("the whole process", f"{process['bytes_per_s']:,.0f}")] if process else []),
        ("a snapshot a second instead", f"{other['bytes_per_s']:,.0f}"),
    ]
    title = f"bytes of reports a second, target {BYTES_TARGET:,}"
    print_table(title, ("", "bytes/s"), rows)
    console.print(
        f"snapshot: {steps['snapshot_bytes']:,} bytes, built in "
        f"{steps['snapshot_build_ms']:.1f} ms; messages: {steps['messages']}"
    )
    updates = [
        (name, f"{each['median']:.2f}", f"{each['max']:.2f}")
        for name, each in steps["scheduler_ms"].items()
    ]
    title = f"scheduler's index, {settings.overlay_keys:,} keys in the overlay: ms an update"
    print_table(title, ("", "median", "max"), updates)


def main(
    blocks: Annotated[int, typer.Option(min=1_000, help="Cached blocks.")] = 100_000,
    changes: Annotated[int, typer.Option(min=80, help="Block changes a second.")] = 2_000,
    seconds: Annotated[int, typer.Option(min=1, help="Virtual time, in process.")] = 30,
    process_seconds: Annotated[int, typer.Option(min=0, help="0: no process.")] = 20,
    seed: Annotated[int, typer.Option(help="Of every token.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "digest_build.json",
) -> None:
    """Cost of telling a large, busy cache."""
    run(
        Settings(
            blocks=blocks,
            changes_per_s=changes,
            seconds=seconds,
            process_seconds=process_seconds,
            seed=seed,
            output=output,
        )
    )


if __name__ == "__main__":
    typer.run(main)
