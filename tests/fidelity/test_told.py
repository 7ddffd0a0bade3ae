"""What the agent's socket hears of requests: by vLLM's middleware, and by the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fidelity.conftest import Book
from tests.fidelity.subject import Json, Subject
from tests.fidelity.test_answers import (
    CHAT,
    COMPLETIONS,
    EXACT,
    HELLO,
    MESSAGES,
    RESPONSES,
    SAMPLED,
    USAGE,
)
from tests.support.system import MODEL
from workers.event_socket import EventSocket
from workers.request_events import Ended, Event, FirstChunk, Hello, Started
from workers.vllm_model import MAX_MODEL_LEN

LEASE = {"x-kvgate-lease": "lease-1"}
LONG: Json = {"prompt": "x", "max_tokens": 2_000, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, {"messages": HELLO, **EXACT}),
    "streamed chat": (CHAT, {"messages": HELLO, "stream": True, **EXACT}),
    "streamed chat with usage": (CHAT, {"messages": HELLO, "stream": True, **EXACT, **USAGE}),
    "completion": (COMPLETIONS, {"prompt": list(range(5, 105)), **EXACT}),
    "the same completion": (COMPLETIONS, {"prompt": list(range(5, 105)), **EXACT}),
    "completion of two choices": (COMPLETIONS, {"prompt": "a b", "n": 2, **SAMPLED}),
    "response": (RESPONSES, {"input": "Hello?", "max_output_tokens": 6}),
    "streamed response": (RESPONSES, {"input": "Hello?", "max_output_tokens": 6, "stream": True}),
    "message": (MESSAGES, {"messages": HELLO[1:], "max_tokens": 6}),
    "streamed message": (MESSAGES, {"messages": HELLO[1:], "max_tokens": 6, "stream": True}),
    "too long": (COMPLETIONS, {"prompt": [5] * (MAX_MODEL_LEN + 1), "max_tokens": 1}),
    "too long, streamed": (COMPLETIONS, {"prompt": [5] * (MAX_MODEL_LEN + 1), "stream": True}),
    "wrong field": (CHAT, {"messages": HELLO, "max_tokens": "many"}),
    "unknown model": (CHAT, {"messages": HELLO, "model": "nobody"}),
}


class Heard:
    """The agent's end of the socket."""

    def __init__(self, subject: Subject) -> None:
        assert subject.worker.socket is not None
        self.events: list[Event] = []
        self.socket = EventSocket(subject.worker.socket, self.events.append)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def ended(self) -> Ended:
        async with asyncio.timeout(20):
            while not (found := self.of(Ended)):
                await asyncio.sleep(0.01)
        (end,) = found
        assert isinstance(end, Ended)
        return end

    def facts(self, end: Ended) -> Json:
        """What does not depend on time."""
        (started,) = self.of(Started)
        return {
            "endpoint": started.endpoint,
            "first chunks": len(self.of(FirstChunk)),
            "leases": (started.lease, end.lease),
            "status": end.status,
            "error": end.error.value,
            "streamed": end.streamed,
            "ttft": end.ttft_s is not None,
            "tokens": (end.prompt_tokens, end.output_tokens),
            "cached": end.cached_tokens,
        }


@pytest.fixture
async def heard(subject: Subject) -> AsyncIterator[Heard]:
    """Open, and found by the engine."""
    await subject.idle()
    heard = Heard(subject)
    async with heard.socket:
        async with asyncio.timeout(20):
            # What it has to tell makes an engine look for the socket at once.
            while not heard.of(Hello) or heard.socket.in_flight:
                await subject.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1})
                await asyncio.sleep(0.05)
        heard.events.clear()
        yield heard


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_is_told(subject: Subject, book: Book, heard: Heard, name: str) -> None:
    path, body = REQUESTS[name]
    await subject.post(path, {"model": MODEL, **body}, headers=LEASE)
    facts = heard.facts(await heard.ended())
    if name in ("chat", "streamed chat with usage", "message", "response", "streamed response"):
        facts["cached"] = facts["cached"] is not None  # it depends on what ran before
    book.compare(f"told: {name}", facts)
    assert heard.socket.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_told(
    subject: Subject, book: Book, heard: Heard, stream: bool
) -> None:
    body = {"model": MODEL, **LONG, "stream": stream}
    async with subject.client() as client:
        task = asyncio.create_task(client.post(COMPLETIONS, json=body, headers=LEASE))
        await subject.until("num_requests_running", 1)
        await asyncio.sleep(0.2)
        assert heard.socket.in_flight_leases() == ["lease-1"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    facts = heard.facts(await heard.ended())
    book.compare(f"told: a client that leaves{', streamed' if stream else ''}", facts)
    assert heard.socket.in_flight == 0
