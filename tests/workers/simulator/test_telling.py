"""What a simulated worker tells the agent of its requests, over the agent's real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from workers.engine_errors import EngineError
from workers.event_socket import EventSocket
from workers.request_events import Ended, Event, FirstChunk, Started
from workers.simulator.timing import StepTimes

from .client import Client, chat
from .conftest import Start

CHAT = "/v1/chat/completions"
LEASE = {"x-kvgate-lease": "lease-1"}
ERROR_HEADER = "x-kvgate-engine-error"
SLOW = StepTimes(base_s=30.0)
PROMPT = list(range(100))


class Agent:
    """The agent's end: everything it heard."""

    def __init__(self, path: Path) -> None:
        self.heard: list[Event] = []
        self.socket = EventSocket(path, self.heard.append)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]

    async def ended(self, count: int = 1) -> list[Ended]:
        async with asyncio.timeout(10):
            while len(self.of(Ended)) < count:
                await asyncio.sleep(0.005)
        return self.of(Ended)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
async def agent(path: Path) -> AsyncIterator[Agent]:
    agent = Agent(path)
    async with agent.socket:
        yield agent


async def asked(worker: Client, url: str, body: Any, **headers: str) -> tuple[int, str]:
    """Status and the class of error in the header."""
    async with worker.http.post(url, json=body, headers={**LEASE, **headers}) as response:
        await response.read()
        return response.status, response.headers.get(ERROR_HEADER, "")


async def test_a_whole_answer_is_told_with_its_lease_and_usage(
    start: Start, agent: Agent, path: Path
) -> None:
    worker = await start(socket=path)
    for _ in range(2):
        body = {"prompt": PROMPT, "max_tokens": 3}
        assert await asked(worker, "/v1/completions", body) == (200, "")
    first, second = await agent.ended(2)
    assert (first.lease, first.status, first.error) == ("lease-1", 200, EngineError.NONE)
    assert (first.prompt_tokens, first.output_tokens, first.cached_tokens) == (100, 3, 0)
    assert second.cached_tokens == 96
    assert not first.streamed
    assert first.ttft_s is None
    assert first.duration_s > 0
    assert [event.endpoint for event in agent.of(Started)] == ["completions"] * 2
    assert agent.socket.in_flight == 0


@pytest.mark.parametrize("include", [True, False])
async def test_a_stream_has_a_first_chunk_and_usage_only_if_asked_for(
    start: Start, agent: Agent, path: Path, include: bool
) -> None:
    worker = await start(socket=path)
    body = chat("hello", max_tokens=3, stream=True, stream_options={"include_usage": include})
    await asked(worker, CHAT, body)
    (ended,) = await agent.ended()
    (first,) = agent.of(FirstChunk)
    assert ended.streamed
    assert (ended.status, ended.error) == (200, EngineError.NONE)
    assert ended.ttft_s == first.ttft_s
    assert 0 < first.ttft_s < ended.duration_s
    assert ended.output_tokens == (3 if include else None)
    assert (ended.prompt_tokens is None) is not include


@pytest.mark.parametrize("path_asked", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
async def test_other_endpoints_tell_usage_either_way(
    start: Start, agent: Agent, path: Path, path_asked: str, stream: bool
) -> None:
    worker = await start(socket=path)
    body: dict[str, Any] = {"model": "sim", "stream": stream}
    if path_asked == "/v1/messages":
        body |= {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    else:
        body |= {"input": "x", "max_output_tokens": 3}
    await asked(worker, path_asked, body)
    (ended,) = await agent.ended()
    assert (ended.output_tokens, ended.streamed) == (3, stream)
    assert ended.prompt_tokens


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": PROMPT * 90}, 400, EngineError.TOO_LONG),
        ({"prompt": PROMPT, "max_tokens": "many"}, 400, EngineError.CLIENT),
        ({"prompt": PROMPT, "model": "other"}, 404, EngineError.CLIENT),
        ({"prompt": PROMPT, "max_tokens": "many", "stream": True}, 400, EngineError.CLIENT),
    ],
)
async def test_a_refusal_has_its_class_in_the_datagram_and_in_a_header(
    start: Start, agent: Agent, path: Path, body: Any, status: int, error: EngineError
) -> None:
    worker = await start(socket=path)
    assert await asked(worker, "/v1/completions", body) == (status, str(error))
    (ended,) = await agent.ended()
    assert (ended.status, ended.error, ended.streamed) == (status, error, False)
    assert ended.prompt_tokens is None


async def test_a_full_queue_and_an_injected_failure_have_classes_of_their_own(
    start: Start, agent: Agent, path: Path
) -> None:
    worker = await start(socket=path, timing=SLOW, max_queued=1)
    holding = asyncio.create_task(asked(worker, "/v1/completions", {"prompt": PROMPT}))
    await worker.until(num_requests_running=1.0)
    assert await asked(worker, CHAT, chat("x")) == (503, "queue_full")
    await worker.post("/sim/fail", {"status": 500, "count": 1})
    assert await asked(worker, CHAT, chat("x")) == (500, "other")
    assert [ended.error for ended in await agent.ended(2)] == [
        EngineError.QUEUE_FULL,
        EngineError.OTHER,
    ]
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_got_no_status(
    start: Start, agent: Agent, path: Path, stream: bool
) -> None:
    worker = await start(socket=path, timing=SLOW)
    task = asyncio.create_task(asked(worker, CHAT, chat("x", stream=stream)))
    await worker.until(num_requests_running=1.0)
    assert agent.socket.in_flight_leases() == ["lease-1"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (ended,) = await agent.ended()
    assert (ended.status, ended.error) == (0, EngineError.CLIENT_GONE)
    assert agent.socket.in_flight == 0


async def test_a_client_that_leaves_a_stream_got_its_status(
    start: Start, agent: Agent, path: Path
) -> None:
    worker = await start(socket=path, speedup=1.0)
    body = chat("x", stream=True, max_tokens=4000)
    async with worker.http.post(CHAT, json=body, headers=LEASE) as response:
        await response.content.readany()
        response.close()
    (ended,) = await agent.ended()
    assert (ended.status, ended.error, ended.streamed) == (200, EngineError.CLIENT_GONE, True)


async def test_an_engine_that_stops_says_so_of_all_it_had(
    start: Start, agent: Agent, path: Path
) -> None:
    worker = await start(socket=path, speedup=1.0)
    streamed, whole = (
        asyncio.create_task(asked(worker, CHAT, chat("x", stream=stream, max_tokens=4000)))
        for stream in (True, False)
    )
    await worker.until(num_requests_running=2.0)
    await worker.until_generated(4)
    await worker.simulator.__aexit__(None, None, None)
    assert await whole == (500, "engine_dead")
    assert await streamed == (200, "")
    ended = {event.streamed: event for event in await agent.ended(2)}
    assert ended[True].status == 200
    assert ended[False].status == 500
    assert {event.error for event in ended.values()} == {EngineError.ENGINE_DEAD}


async def test_an_agent_that_comes_later_is_told_what_is_in_flight(
    start: Start, path: Path
) -> None:
    worker = await start(socket=path, timing=SLOW)
    first = asyncio.create_task(asked(worker, CHAT, chat("x")))
    await worker.until(num_requests_running=1.0)
    late = Agent(path)
    async with late.socket:
        await asyncio.sleep(1.1)  # the agent is looked for once a second
        second = asyncio.create_task(
            asked(worker, CHAT, chat("y"), **{"x-kvgate-lease": "lease-2"})
        )
        async with asyncio.timeout(10):
            while late.socket.in_flight < 2:
                await asyncio.sleep(0.005)
        assert sorted(late.socket.in_flight_leases()) == ["lease-1", "lease-2"]
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_pages_and_bad_leases_are_not_told(start: Start, agent: Agent, path: Path) -> None:
    worker = await start(socket=path)
    await worker.get("/v1/models")
    await worker.post("/tokenize", {"model": "sim", "prompt": "x"})
    await asked(worker, CHAT, chat("x"), **{"x-kvgate-lease": "two words"})
    (ended,) = await agent.ended()
    assert ended.lease is None
    assert len(agent.of(Started)) == 1


async def test_without_a_socket_error_answers_carry_no_class(start: Start) -> None:
    worker = await start()
    assert await asked(worker, CHAT, chat("x", model="other")) == (404, "")
