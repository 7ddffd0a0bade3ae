"""One request as an OpenAI client makes it: streamed, timed, tried again when told to.

A chunk costs a few microseconds: only the first token is looked for, the rest is kept as the
last bytes, which hold the usage.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from benchmarks.load.sample import BROKEN, OK, UNREACHABLE, Sample, Try
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.prompts import PromptMaker

API_KEY_VARIABLE = "KVGATE_BENCH_API_KEY"

_FIRST_TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"[^"]')
_TAIL_BYTES = 4_096
_RETRYABLE = frozenset({429, 503})


class Wire(msgspec.Struct, frozen=True):
    """Where requests go and what is in each of them.

    ``max_tries`` 1 gives up at the first refusal; more wait as the refusal says. Only one
    request in ``patient_every`` does so. ``extra`` are further fields of every body.
    """

    url: str
    model: str
    max_tries: int = 1
    patient_every: int = 1
    timeout_s: float = 600.0
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class Client:
    """Sends requests of one run; times count from ``start`` on ``time.monotonic``."""

    def __init__(
        self, session: aiohttp.ClientSession, wire: Wire, maker: PromptMaker, start: float
    ) -> None:
        self._session = session
        self._wire = wire
        self._maker = maker
        self._start = start
        self._url = f"{wire.url.rstrip('/')}/v1/chat/completions"

    def body(self, request: Planned) -> bytes:
        """JSON of a request."""
        return chat(self._wire, self._maker, request)

    async def run(self, number: int, request: Planned, body: bytes, due_s: float) -> Sample:
        """Send until it is answered or the tries are used up; never raises for an answer."""
        sample = Sample(
            number,
            due_s,
            lag_s=self._now() - due_s,
            sent_s=0.0,
            planned_tokens=request.prompt_tokens,
            tenant=request.tenant,
            lane=request.lane,
        )
        headers = {**self._wire.headers, **_headers(request)}
        patient = number % self._wire.patient_every == 0
        for left in range(self._wire.max_tries if patient else 1, 0, -1):
            await self._try(sample, body, headers)
            if sample.status not in _RETRYABLE or left == 1 or sample.announced_s is None:
                break
            refused = Try(sample.status, sample.code, self._now() - due_s, sample.announced_s)
            sample.refused.append(refused)
            await asyncio.sleep(sample.announced_s)
        return sample

    async def _try(self, sample: Sample, body: bytes, headers: Mapping[str, str]) -> None:
        sample.status, sample.code, sample.announced_s = 0, "", None
        began = time.monotonic()
        sample.sent_s = began - self._start
        try:
            async with self._session.post(self._url, data=body, headers=headers) as answer:
                sample.status = answer.status
                _read_headers(sample, answer.headers)
                if answer.status == OK:
                    await _read_stream(sample, answer.content, began)
                else:
                    _read_refusal(sample, await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError):
            sample.code = BROKEN if sample.status == OK else UNREACHABLE
        sample.e2e_s = sample.e2e_s or time.monotonic() - began

    def _now(self) -> float:
        return time.monotonic() - self._start


def chat(wire: Wire, maker: PromptMaker, request: Planned) -> bytes:
    """JSON of a request, as every client of a run sends it."""
    return msgspec.json.encode(
        {
            "model": wire.model,
            "messages": maker.messages(request),
            "max_tokens": request.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **wire.extra,
        }
    )


def make_session(wire: Wire) -> aiohttp.ClientSession:
    """A session without limits of its own but the timeout; its key is from the environment."""
    key = os.environ.get(API_KEY_VARIABLE)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        timeout=aiohttp.ClientTimeout(total=wire.timeout_s),
        headers={
            "content-type": "application/json",
            **({"authorization": f"Bearer {key}"} if key else {}),
        },
        auto_decompress=False,
    )


def _headers(request: Planned) -> dict[str, str]:
    named = {
        "x-session-id": request.session,
        "x-kvgate-tenant": request.tenant,
        "x-kvgate-lane": request.lane,
    }
    return {name: value for name, value in named.items() if value}


def _read_headers(sample: Sample, headers: Mapping[str, str]) -> None:
    sample.worker = headers.get("x-kvgate-worker", "")
    held = headers.get("x-kvgate-queue-ms")
    sample.queue_s = None if held is None else float(held) / 1_000
    if milliseconds := headers.get("retry-after-ms"):
        sample.announced_s = float(milliseconds) / 1_000
    elif (seconds := headers.get("retry-after", "")).isdigit():
        sample.announced_s = float(seconds)


def _read_refusal(sample: Sample, body: bytes) -> None:
    try:
        error = msgspec.json.decode(body)["error"]
        sample.code = str(error.get("code") or error.get("type") or sample.status)
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        sample.code = str(sample.status)


async def _read_stream(sample: Sample, content: aiohttp.StreamReader, began: float) -> None:
    tail = b""
    last = events = 0.0
    while chunk := await content.readany():
        last = time.monotonic()
        events += chunk.count(b"data: ")
        if sample.ttft_s is None and _FIRST_TOKEN.search(chunk):
            sample.ttft_s = last - began
        tail = chunk if len(chunk) >= _TAIL_BYTES else (tail + chunk)[-_TAIL_BYTES:]
    sample.e2e_s = last - began
    if b"data: [DONE]" not in tail or b'"error":' in tail or sample.ttft_s is None:
        sample.code = BROKEN
        return
    _read_usage(sample, tail, events=int(events))


def _read_usage(sample: Sample, tail: bytes, events: int) -> None:
    """Counts of the last chunk that has them; else an event is taken for a token."""
    sample.output_tokens = max(1, events - 1)
    for line in reversed(tail.split(b"\n")):
        if not line.startswith(b"data: {") or b'"usage"' not in line:
            continue
        usage = msgspec.json.decode(line[6:]).get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            sample.prompt_tokens = usage.get("prompt_tokens")
            sample.cached_tokens = details.get("cached_tokens")
            sample.output_tokens = usage.get("completion_tokens", sample.output_tokens)
            return
