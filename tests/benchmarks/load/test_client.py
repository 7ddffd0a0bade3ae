"""What the client measures and does, against a scripted server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.load.client import API_KEY_VARIABLE, Client, Wire, make_session
from benchmarks.load.sample import BROKEN, UNREACHABLE, Sample
from benchmarks.workloads.plan import Planned, Segment
from benchmarks.workloads.prompts import PromptMaker
from tests.benchmarks.load.server import DONE, ERROR, EVENT, ROLE, Script, Server, serving, usage

REQUEST = Planned(0.0, (Segment("q", 100),), 4, session="c-1", tenant="acme", lane="batch")
WAIT = {"retry-after": "1", "retry-after-ms": "60"}


@pytest.fixture(scope="module")
def maker(model_dir: Path) -> PromptMaker:
    return PromptMaker(model_dir)


async def ask(server: Server, maker: PromptMaker, number: int = 0, **wire: object) -> Sample:
    settings = Wire(server.url, "m", **wire)  # type: ignore[arg-type]
    async with make_session(settings) as session:
        client = Client(session, settings, maker, time.monotonic())
        return await client.run(number, REQUEST, client.body(REQUEST), 0.0)


async def test_a_stream_is_timed_from_first_to_last_token(maker: PromptMaker) -> None:
    pieces = (ROLE, EVENT, EVENT, EVENT, EVENT, usage(), DONE)
    headers = {"x-kvgate-worker": "10.0.0.1:8000", "x-kvgate-queue-ms": "250"}
    async with serving(Script(pieces=pieces, pause_s=0.03, headers=headers)) as server:
        sample = await ask(server, maker)
    assert sample.served
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) == (100, 48, 4)
    assert (sample.worker, sample.queue_s) == ("10.0.0.1:8000", 0.25)
    assert sample.ttft_s is not None
    assert sample.tpot_s is not None
    # The empty role chunk is no token: the first comes one pause later.
    assert 0.03 <= sample.ttft_s < sample.e2e_s
    assert sample.tpot_s == pytest.approx((sample.e2e_s - sample.ttft_s) / 3)


async def test_a_request_is_a_streamed_chat_with_its_headers(
    maker: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-1")
    async with serving() as server:
        await ask(server, maker, extra={"ignore_eos": True}, headers={"x-team": "infra"})
    [body], [headers] = server.bodies, server.headers
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 4, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert headers["authorization"] == "Bearer sk-1"
    assert headers["x-team"] == "infra"
    assert headers["x-session-id"] == "c-1"
    assert headers["x-kvgate-tenant"] == "acme"
    assert headers["x-kvgate-lane"] == "batch"


async def test_a_patient_client_waits_as_told_and_comes_back(maker: PromptMaker) -> None:
    refusals = [Script(429, headers=WAIT), Script(503, headers=WAIT, code="no_ready_worker")]
    async with serving(*refusals) as server:
        sample = await ask(server, maker, max_tries=3)
    assert sample.served
    assert [(each.status, each.code) for each in sample.refused] == [
        (429, "queue_full"),
        (503, "no_ready_worker"),
    ]
    assert all(each.announced_s == 0.06 for each in sample.refused)
    assert sample.sent_s >= 0.12
    # The wait is not part of the answer's own time.
    assert sample.e2e_s < sample.sent_s


async def test_whole_seconds_are_used_where_there_are_no_milliseconds(maker: PromptMaker) -> None:
    async with serving(Script(429, headers={"retry-after": "7"})) as server:
        sample = await ask(server, maker)
    assert (sample.status, sample.code, sample.announced_s) == (429, "queue_full", 7.0)
    assert not sample.refused


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {}), (400, WAIT), (500, WAIT)], ids=["no wait", "400", "500"]
)
async def test_it_does_not_come_back_where_that_is_no_use(
    maker: PromptMaker, status: int, headers: dict[str, str]
) -> None:
    async with serving(Script(status, headers=headers)) as server:
        sample = await ask(server, maker, max_tries=5)
    assert sample.status == status
    assert len(server.bodies) == 1


async def test_only_some_requests_are_patient(maker: PromptMaker) -> None:
    async with serving(*(Script(429, headers=WAIT) for _ in range(2))) as server:
        impatient = await ask(server, maker, number=1, max_tries=3, patient_every=2)
        patient = await ask(server, maker, number=2, max_tries=3, patient_every=2)
    assert not impatient.served
    assert patient.served


@pytest.mark.parametrize(
    "script",
    [
        Script(pieces=(EVENT,), cut=True),
        Script(pieces=(EVENT, ERROR, DONE)),
        Script(pieces=(EVENT, usage())),
        Script(pieces=(ROLE, usage(), DONE)),
    ],
    ids=["cut", "error in the stream", "no end", "no token"],
)
async def test_an_answer_that_does_not_end_well_is_broken(
    maker: PromptMaker, script: Script
) -> None:
    async with serving(script) as server:
        sample = await ask(server, maker)
    assert (sample.status, sample.code) == (200, BROKEN)
    assert not sample.served
    assert sample.tpot_s is None


async def test_a_server_that_is_not_there_is_unreachable(maker: PromptMaker) -> None:
    async with serving() as server:
        pass
    sample = await ask(server, maker)
    assert (sample.status, sample.code) == (0, UNREACHABLE)


async def test_without_usage_events_count_as_tokens(maker: PromptMaker) -> None:
    async with serving(Script(pieces=(EVENT, EVENT, EVENT, DONE))) as server:
        sample = await ask(server, maker)
    assert (sample.output_tokens, sample.prompt_tokens, sample.cached_tokens) == (3, None, None)
