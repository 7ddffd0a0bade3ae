"""The engine looked at: simulated or real, started alike, asked over HTTP and ZMQ only."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from tests.support.envoy import free_ports
from tests.support.system import (
    MODEL,
    SLOTS,
    Engines,
    SimulatedEngines,
    Worker,
    eventually,
    fetch,
)
from tests.support.vllm import BLOCK_TOKENS, VllmEngines, made_model
from workers.middleware import HOLD_VARIABLE
from workers.vllm_model import ADAPTERS, MAX_MODEL_LEN

Json = dict[str, Any]

BLOCKS = 300
MAX_QUEUED = SLOTS + 2
"""Requests running and waiting; one more is refused."""
ADAPTER = ADAPTERS[0]
END_OF_REPLAY = b"\xff" * 8


def engines_of(kind: str) -> Engines:
    """Engines of the same sizes, whichever the kind."""
    if kind == "vllm":
        limit = ("--max-num-queued-reqs", str(MAX_QUEUED))
        flags = ("--enable-request-id-headers", "--enable-server-load-tracking", *limit)
        return VllmEngines(blocks=BLOCKS, flags=flags)
    flags = (
        "--block-size", str(BLOCK_TOKENS),
        "--num-blocks", str(BLOCKS),
        "--max-model-len", str(MAX_MODEL_LEN),
        "--max-queued", str(MAX_QUEUED),
        "--speedup", "5",
        "--no-hold-headers",
    )  # fmt: skip
    adapters = [item for name in ADAPTERS for item in ("--adapter", name)]
    return SimulatedEngines(made_model("tiny"), (*flags, *adapters))


class Subject:
    """A running engine."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.model_dir = made_model("tiny")

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.worker.address}", timeout=60)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body, **options)

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path)

    async def complete(self, prompt: Any, **fields: Any) -> Json:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
        answer = await self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    async def cached(self, prompt: Any, **fields: Any) -> int:
        details = (await self.complete(prompt, **fields))["usage"]["prompt_tokens_details"]
        return (details or {}).get("cached_tokens") or 0

    async def events_of(self, path: str, body: Json) -> list[tuple[str, str]]:
        """Every event of a stream: its name, empty where it has none, and its data."""
        answer = await self.post(path, {"model": MODEL, **body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = []
        for block in answer.text.strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines())
            events.append((lines.get("event", ""), lines["data"]))
        return events

    async def metrics_page(self) -> str:
        return (await self.get("/metrics")).text

    async def metric(self, name: str, label: str = "") -> float:
        """Sum of the samples of this name whose labels contain the text."""
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in (await self.metrics_page()).splitlines()
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")) and label in line
        ]
        return sum(found)

    async def until(self, name: str, value: float, limit_s: float = 20) -> None:
        async with asyncio.timeout(limit_s):
            while await self.metric(name) != value:
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        for name in ("num_requests_running", "num_requests_waiting"):
            await self.until(name, 0)

    async def replay(self, start: int) -> list[list[bytes]]:
        """Frames of every buffered batch from ``start`` on; the last is the end mark."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{self.worker.kv_replay_port}")
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            frames: list[list[bytes]] = []
            async with asyncio.timeout(20):
                while not frames or frames[-1][2] != END_OF_REPLAY:
                    frames.append(await dealer.recv_multipart())
        return frames

    async def next_number(self) -> int:
        """The number that the next batch will have."""
        batches = (await self.replay(0))[:-1]
        return int.from_bytes(batches[-1][2], "big") + 1 if batches else 0

    async def batches_since(self, start: int, at_least: int = 1) -> list[Any]:
        """Decoded batches from ``start`` on, once there are that many."""
        async with asyncio.timeout(20):
            while len(frames := await self.replay(start)) <= at_least:
                await asyncio.sleep(0.02)
        return [msgspec.msgpack.decode(frame[3]) for frame in frames[:-1]]


@contextmanager
def running_subject(kind: str, folder: Path) -> Iterator[Subject]:
    """An engine of that kind, ready, and its whole process group gone afterwards."""
    engines, worker = engines_of(kind), Worker(*free_ports(3), socket=folder / "agent.sock")
    with (folder / "engine.log").open("wb") as log:
        worker.engine = subprocess.Popen(
            engines.command(worker),
            # Headers as plain vLLM sends them: its answers are looked at, not the middleware's.
            env={**engines.environment(worker), HOLD_VARIABLE: "0"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = f"http://{worker.address}/health"
        eventually(lambda: fetch(url)[0] == 200, "the engine is up", engines.start_limit_s)
        yield Subject(worker)
    finally:
        worker.signal_engine(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            worker.engine.wait(10)
        worker.signal_engine(signal.SIGKILL)
        worker.engine.wait()
