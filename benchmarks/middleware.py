"""What the engine's middleware adds to a request and to each streamed chunk.

    python -m benchmarks.middleware

An ASGI application that answers from memory is driven in process, bare and with the
middleware around it, taking turns round by round: without a socket, with an agent that
reads, with no agent at the path, and with an agent that never reads. Then what a datagram
costs the agent.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.chats import text
from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, median, percentile, print_table, write_json
from workers.engine_errors import EngineError
from workers.middleware import SOCKET_VARIABLE, App, KvgateMiddleware, Message, Receive, Scope, Send
from workers.request_events import Ended, FirstChunk, Started, encode
from workers.request_table import RequestTable

BARE = "bare application"
ARMS = (BARE, "no socket", "agent reads", "agent absent", "agent never reads")
REQUEST_TARGET_MS = 0.1
CHUNK_TARGET_US = 5.0
DOCUMENT_BYTES = 4_096
_USAGE = {"prompt_tokens": 1011, "completion_tokens": 256, "prompt_tokens_details": {"c": 0}}
_READER = """
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1])
print("ready", flush=True)
while True:
    s.recv(600)
"""


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    seed: int = 1
    rounds: int = 60
    requests: int = 50
    """Of each kind, arm and round."""
    chunks: int = 256
    """Of a stream."""
    output: Path = RESULTS / "middleware.json"


@dataclass(frozen=True)
class Kind:
    """A kind of answer."""

    name: str
    messages: list[Message]
    chunks: int
    """Streamed chunks; 0 for a document."""
    chunk_bytes: int


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything, print it, write the JSON and return what it holds."""
    console.print(f"seed {settings.seed}, {settings.rounds} rounds of {settings.requests} requests")
    kinds = _kinds(settings)
    times = asyncio.run(_measure(settings, kinds))
    cases = [_case(kind, arm, times) for kind in kinds for arm in ARMS]
    chunks = [_chunk_case(kinds, kind, arm, times) for kind in kinds[1:] for arm in ARMS[1:]]
    datagram = _agent_us(settings)
    _print(settings, cases, chunks, datagram)
    result = {
        "machine": machine_facts(),
        "seed": settings.seed,
        "rounds": settings.rounds,
        "requests_a_round": settings.requests,
        "requests": cases,
        "chunks": chunks,
        "agent_us_a_datagram": datagram,
        "targets": {"request_ms": REQUEST_TARGET_MS, "chunk_us": CHUNK_TARGET_US},
    }
    write_json(settings.output, result)
    return result


# Answers


def _kinds(settings: Settings) -> list[Kind]:
    rng = random.Random(settings.seed)
    content = text(rng, DOCUMENT_BYTES)
    document = {"choices": [{"message": {"content": content}}], "usage": _USAGE}
    whole = json.dumps(document).encode()
    answers = [Kind("document", [_start(b"application/json"), _body(whole, False)], 0, len(whole))]
    for name, usage in (("stream", None), ("stream, usage in every chunk", _USAGE)):
        chunks = [_chunk(text(rng, 8), usage) for _ in range(settings.chunks)]
        messages = [_start(b"text/event-stream"), *(_body(chunk) for chunk in chunks)]
        messages += [_body(_chunk("", _USAGE)), _body(b"data: [DONE]\n\n"), _body(b"", False)]
        answers.append(Kind(name, messages, settings.chunks + 2, len(chunks[0])))
    return answers


def _chunk(content: str, usage: dict[str, Any] | None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": None}
    event = {
        "id": "chatcmpl-8338d977b1b5e124",
        "object": "chat.completion.chunk",
        "created": 1795975190,
        "model": "tiny",
        "choices": [choice],
        **({"usage": usage} if usage else {}),
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _start(content_type: bytes) -> Message:
    headers = [(b"content-type", content_type), (b"date", b"x"), (b"server", b"uvicorn")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


# Measuring


def _application(messages: list[Message]) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


def _scope() -> Scope:
    """A request with the headers that Envoy and a client send."""
    names = ("host", "user-agent", "accept", "content-type", "x-request-id", "x-forwarded-proto")
    headers = [(name.encode(), b"some usual value") for name in names]
    headers.append((b"x-kvgate-lease", b"0123456789abcdef01234567"))
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "headers": headers,
    }


async def _receive() -> Message:
    return {"type": "http.request", "body": b"{}", "more_body": False}


@dataclass(frozen=True)
class Round:
    """CPU seconds a request: time that other processes took from this one does not count."""

    latency_s: float
    """Until the last byte was handed to the server."""
    whole_s: float
    """Until the request was over, what comes after the answer included."""


Times = dict[tuple[str, str], list[Round]]
"""By kind and arm."""


async def _measure(settings: Settings, kinds: list[Kind]) -> Times:
    times: Times = {(kind.name, arm): [] for kind in kinds for arm in ARMS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-bench-")))
        environs = {BARE: None, **stack.enter_context(_environs(folder))}
        apps = {
            (kind.name, arm): _arm(stack, kind, environ)
            for kind in kinds
            for arm, environ in environs.items()
        }
        for key, app in apps.items():
            times[key] = []
            await _round(app, settings.requests)
        for _ in track(range(settings.rounds), "rounds", console=console, transient=True):
            for key, app in apps.items():
                times[key].append(await _round(app, settings.requests))
    return times


def _arm(stack: ExitStack, kind: Kind, environ: dict[str, str] | None) -> App:
    app = _application(kind.messages)
    if environ is None:
        return app
    middleware = KvgateMiddleware(app, environ=environ)
    stack.callback(middleware.close)
    return middleware


@contextmanager
def _environs(folder: Path) -> Iterator[dict[str, dict[str, str]]]:
    """The environment of each arm with a middleware."""
    reads, never = folder / "reads", folder / "never"
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, str(reads)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        with reader.stdout, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
            silent.bind(str(never))
            paths = (None, reads, folder / "absent", never)
            yield {
                arm: {SOCKET_VARIABLE: str(path)} if path else {}
                for arm, path in zip(ARMS[1:], paths, strict=True)
            }
    finally:
        reader.kill()
        reader.wait()


async def _round(app: App, requests: int) -> Round:
    scope = _scope()
    latency_s, ended_s = 0.0, 0.0

    async def send(message: Message) -> None:
        nonlocal ended_s
        if not message.get("more_body", True):
            ended_s = time.thread_time()

    began_s = time.thread_time()
    for _ in range(requests):
        start_s = time.thread_time()
        await app(scope, _receive, send)
        latency_s += ended_s - start_s
        # Where a server would read the next request, and a full socket is written again.
        await asyncio.sleep(0)
    return Round(latency_s / requests, (time.thread_time() - began_s) / requests)


def _agent_us(settings: Settings) -> float:
    """Microseconds that the agent spends on a datagram, the read itself left out."""
    instance = "0123456789abcdef"
    datagrams = []
    for number in range(settings.requests * 20):
        lease = f"{number:024x}"
        end = Ended(
            *(instance, number, lease, 200, EngineError.NONE, 1.0, 0.5),
            *(1011, 256, 992, True),
        )
        begun = Started(instance, number, lease, "chat", 1.0)
        datagrams += [encode(begun), encode(FirstChunk(instance, number, 0.5)), encode(end)]
    table = RequestTable()
    began_s = time.thread_time()
    for datagram in datagrams:
        table.take(datagram, 0.0)
    spent_s = time.thread_time() - began_s
    assert table.in_flight == 0
    assert table.counts.garbage == 0
    return 1e6 * spent_s / len(datagrams)


# Reporting


def _case(kind: Kind, arm: str, times: Times) -> dict[str, Any]:
    """A request of a kind and arm; what is added is compared round by round."""
    rounds = list(zip(times[kind.name, arm], times[kind.name, BARE], strict=True))
    whole_s = median(ours.whole_s for ours, _ in rounds)
    return {
        "answer": kind.name,
        "arm": arm,
        "chunks": kind.chunks,
        "chunk_bytes": kind.chunk_bytes,
        "request_us": 1e6 * whole_s,
        "added_latency_us": _figures(ours.latency_s - bare.latency_s for ours, bare in rounds),
        "added_us": _figures(ours.whole_s - bare.whole_s for ours, bare in rounds),
        "ratio": whole_s / median(bare.whole_s for _, bare in rounds),
    }


def _chunk_case(kinds: list[Kind], kind: Kind, arm: str, times: Times) -> dict[str, Any]:
    """What a chunk adds: a stream's added time less a document's, over its chunks."""
    document = kinds[0].name
    rounds = zip(
        *(times[kind.name, arm], times[kind.name, BARE]),
        *(times[document, arm], times[document, BARE]),
        strict=True,
    )
    added = (
        ((stream.whole_s - bare.whole_s) - (fixed.whole_s - fixed_bare.whole_s)) / kind.chunks
        for stream, bare, fixed, fixed_bare in rounds
    )
    return {
        "answer": kind.name,
        "arm": arm,
        "chunk_bytes": kind.chunk_bytes,
        "added_us": _figures(added),
    }


def _figures(seconds: Iterable[float]) -> dict[str, float]:
    values = [1e6 * value for value in seconds]
    return {"median": median(values), "p90": percentile(values, 0.9)}


def _print(
    settings: Settings, cases: list[dict[str, Any]], chunks: list[dict[str, Any]], datagram: float
) -> None:
    rows: list[tuple[str, ...]] = [
        (
            f"{case['answer']}, {case['arm']}",
            *_added(case["added_latency_us"]),
            *_added(case["added_us"]),
            f"{case['ratio']:.1f}",
        )
        for case in cases
    ]
    columns = ("answer, arm", "latency us", "p90", "CPU us", "p90", "times bare")
    title = f"Added to a request ({settings.chunks} chunks a stream); target {REQUEST_TARGET_MS} ms"
    print_table(title, columns, rows)
    rows = [
        (f"{case['answer']}, {case['arm']}", f"{case['chunk_bytes']}", *_added(case["added_us"]))
        for case in chunks
    ]
    title = f"Added to a streamed chunk; target {CHUNK_TARGET_US} us"
    print_table(title, ("answer, arm", "bytes", "CPU us", "p90"), rows)
    console.print(f"agent: {datagram:.1f} us a datagram")


def _added(figures: dict[str, float]) -> tuple[str, str]:
    return f"{figures['median']:.2f}", f"{figures['p90']:.2f}"


def main(
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm.")] = 60,
    requests: Annotated[int, typer.Option(min=1, help="Requests a round.")] = 50,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a stream.")] = 256,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "middleware.json",
) -> None:
    """What the middleware adds to a request and a chunk."""
    run(Settings(seed, rounds, requests, chunks, output))


if __name__ == "__main__":
    typer.run(main)
