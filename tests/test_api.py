"""The Scheduler API as a gateway sees it: a real server and channel, time in the test's hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from extproc.desk import Desk
from extproc.fleet.worker import EngineError, Outcome
from extproc.generated.kvgate.v1 import scheduler_pb2 as pb
from extproc.request.profile import Endpoint, RequestProfile
from tests.support.builders import (
    MODEL,
    Fleet,
    address,
    policy,
    pool_policy,
    ready,
    text_blocks,
)
from tests.support.engine import until
from tests.support.scheduler_api import (
    Clock,
    Gateway,
    chat_call,
    desk_of,
    outcomes,
    serving,
    tokens,
)

CHAT = b'{"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}'
TTL_S = 120.0


@dataclass
class Api:
    """A served desk: one worker, two requests at a time, one more may wait."""

    fleet: Fleet
    clock: Clock
    desk: Desk
    gateway: Gateway

    async def admitted(self, request: pb.InferenceRequest | None = None) -> pb.Admitted:
        response = await self.gateway.admit(request or tokens(1, 2, 3))
        assert response.WhichOneof("result") == "admitted", response
        return response.admitted

    async def held(self, request: pb.InferenceRequest | None = None, **options: Any) -> Any:
        """A call to Admit that waits for its turn."""
        waiting = self.fleet.admission.waiting
        call = self.gateway.admit(request or tokens(1, 2, 3), **options)
        await until(lambda: self.fleet.admission.waiting == waiting + 1)
        return call

    def tick(self, now: float) -> None:
        self.clock.now = now
        self.desk.wake(self.fleet.scheduler.tick(now))


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    fleet = Fleet(workers=1, admission={"max_concurrency": 2, "max_queue": 1})
    clock = Clock()
    desk = desk_of(fleet.scheduler, clock, access_log=True)
    async with serving(desk) as gateway:
        yield Api(fleet, clock, desk, gateway)


class TestAdmit:
    async def test_a_lease_comes_with_workers_and_is_given_back_once(self, api: Api) -> None:
        admitted = await api.admitted(chat_call(CHAT))
        assert list(admitted.endpoints) == [address(0)]
        assert admitted.lane == "online"
        assert not admitted.HasField("max_output_tokens")
        assert api.fleet.admission.running == 1
        assert (await api.gateway.release(admitted.lease)).released
        assert api.fleet.idle()
        assert not (await api.gateway.release(admitted.lease)).released
        assert outcomes(api.desk.metrics) == {(MODEL, "chat", "allowed"): 1}

    async def test_a_call_is_held_until_its_turn(self, api: Api) -> None:
        first, _ = await api.admitted(), await api.admitted()
        call = await api.held()
        api.clock.now = 2.0
        await api.gateway.release(first.lease)
        admitted = (await call).admitted
        assert admitted.queue_wait_s == 2.0
        assert api.fleet.admission.running == 2

    @pytest.mark.parametrize("how", ["cancels", "deadline"])
    async def test_a_caller_that_leaves_is_out_of_the_queue(self, api: Api, how: str) -> None:
        await api.admitted()
        await api.admitted()
        call = await api.held(timeout=None if how == "cancels" else 0.2)
        if how == "cancels":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
                await call
        await until(lambda: api.fleet.admission.waiting == 0)
        assert outcomes(api.desk.metrics)[MODEL, "completions", "client_gone"] == 1
        assert not api.desk.waiters

    async def test_a_caller_that_leaves_as_its_turn_comes_holds_nothing(self, api: Api) -> None:
        first, second = await api.admitted(), await api.admitted()
        call = await api.held()
        ((ticket, waiter),) = api.desk.waiters.items()
        call.cancel()
        await until(waiter.cancelled)
        await api.gateway.release(first.lease)
        await api.gateway.release(second.lease)
        assert ticket.ended
        assert api.fleet.idle()

    async def test_a_refusal_is_an_answer_that_says_all(self, api: Api) -> None:
        await api.admitted()
        await api.admitted()
        held = await api.held()
        refusal = (await api.gateway.admit(tokens(1))).refusal
        assert (refusal.code, refusal.http_status) == ("queue_full", 429)
        assert refusal.reason == "quota:pool"
        assert refusal.type == "rate_limit_error"
        assert refusal.retryable
        assert refusal.retry_after_ms >= 250
        assert outcomes(api.desk.metrics)[MODEL, "completions", "queue_full"] == 1
        held.cancel()

    async def test_who_waits_too_long_is_told_so(
        self, api: Api, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "kvgate.requests")
        await api.admitted()
        await api.admitted()
        call = await api.held()
        report(api, 30.0)
        api.tick(31.0)
        assert (await call).refusal.code == "queue_timeout"
        facts = caplog.records[-1].facts  # type: ignore[attr-defined]
        assert (facts["status"], facts["reason"]) == ("queue_timeout", "quota:pool")
        assert api.fleet.admission.running == 2

    async def test_an_unknown_model_and_a_bad_body_are_refused(self, api: Api) -> None:
        unknown = (await api.gateway.admit(tokens(1, model="nobody"))).refusal
        assert (unknown.code, unknown.http_status) == ("model_not_found", 404)
        assert (unknown.param, unknown.retryable) == ("model", False)
        assert not unknown.HasField("retry_after_ms")
        nameless = (await api.gateway.admit(tokens(1, model=""))).refusal
        assert nameless.code == "missing_model"
        broken = (await api.gateway.admit(chat_call(b"{"))).refusal
        assert broken.code == "invalid_json"
        assert outcomes(api.desk.metrics)["other", "none", "invalid_json"] == 1

    async def test_a_body_over_the_limit_is_refused(self, api: Api) -> None:
        limit = {"max_body_bytes": 1_000}
        api.desk.scheduler.policy = policy(pool_policy(), requests=limit)
        refusal = (await api.gateway.admit(chat_call(b" " * 1_001))).refusal
        assert (refusal.code, refusal.http_status) == ("body_too_large", 413)

    async def test_a_degraded_request_says_what_the_engine_must_be_told(self) -> None:
        ladder = [{"max_output_tokens": 16}]
        rule = {"name": "work", "tokens_in_flight": 100, "max_queue": 0, "degrade": ladder}
        fleet = Fleet(workers=1)
        fleet.scheduler.reload(policy(pool_policy(), admission={"rules": [rule]}), 0.0)
        async with serving(desk_of(fleet.scheduler, Clock())) as gateway:
            await gateway.admit(tokens(1, 2, max_output_tokens=60))
            admitted = (await gateway.admit(tokens(1, 2, max_output_tokens=60))).admitted
        assert admitted.max_output_tokens == 16
        assert list(admitted.degraded) == ["max_output_tokens=16"]
        assert not admitted.HasField("model")

    async def test_lane_and_tenant_come_from_headers_and_metadata(self) -> None:
        where = {"namespace": "envoy.filters.http.jwt_authn", "path": ["payload", "sub"]}
        identity = {"tenant": [{"metadata": where}]}
        fleet = Fleet(workers=1)
        fleet.scheduler.reload(policy(pool_policy(), identity=identity), 0.0)
        async with serving(desk_of(fleet.scheduler, Clock())) as gateway:
            request = tokens(1, headers=[("X-Kvgate-Lane", "batch")])
            request.metadata[where["namespace"]].update({"payload": {"sub": "acme"}})
            assert (await gateway.admit(request)).admitted.lane == "batch"
            (lease,) = fleet.admission.leases
            assert lease.demand.tenant == "acme"
            request.headers.append(pb.Header(key="x-kvgate-lane", raw_value=b"\xff"))
            assert (await gateway.admit(request)).refusal.param == "x-kvgate-lane"

    async def test_a_dry_run_admits_nothing(self, api: Api) -> None:
        request = tokens(1, 2, 3, headers=[("x-kvgate-dry-run", "1")])
        estimate = (await api.gateway.admit(request)).estimate
        assert (estimate.verdict, estimate.pool) == ("allow", MODEL)
        assert api.fleet.idle()

    async def test_a_request_without_a_body_holds_nothing(self, api: Api) -> None:
        admitted = await api.admitted(chat_call(b"", path="/v1/models"))
        assert admitted.lease == ""
        assert list(admitted.endpoints) == [address(0)]
        assert api.fleet.idle()

    async def test_text_and_token_ids_are_prompts(self, api: Api) -> None:
        text = pb.Prompt(model=MODEL, text="four words of text")
        admitted = await api.admitted(pb.InferenceRequest(prompt=text))
        assert admitted.prompt_tokens > 0
        assert (await api.admitted(tokens(*range(40)))).prompt_tokens == 40


class TestMalformedCalls:
    @pytest.mark.parametrize(
        ("request_", "problem"),
        [
            (pb.InferenceRequest(path="/v1/chat/completions"), "neither body nor prompt"),
            (pb.InferenceRequest(path="v1", body=CHAT), "path does not start with a slash"),
            (pb.InferenceRequest(prompt=pb.Prompt(model=MODEL)), "without text or tokens"),
        ],
    )
    async def test_they_get_a_status_of_grpc(
        self, api: Api, request_: pb.InferenceRequest, problem: str
    ) -> None:
        for call in (api.gateway.admit, api.gateway.select, api.gateway.estimate):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(request_)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert problem in (raised.value.details() or "")

    @pytest.mark.parametrize(
        "progress",
        [
            {"status": 99},
            {"status": 600},
            {"status": 200, "ttft_s": -1.0},
            {"status": 200, "ttft_s": float("nan")},
            {"status": 200, "endpoint": "gpu-1:8000"},
        ],
    )
    async def test_a_strange_progress_ends_nothing(self, api: Api, progress: Any) -> None:
        admitted = await api.admitted()
        for call in (api.gateway.release, api.gateway.renew):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(admitted.lease, **progress)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert api.fleet.admission.running == 1

    async def test_a_defect_says_nothing_of_the_request(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("SECRET")

        monkeypatch.setattr(api.fleet.scheduler, "arrive", fail)
        refusal = (await api.gateway.admit(tokens(1))).refusal
        assert (refusal.code, refusal.http_status) == ("internal_error", 500)
        assert "SECRET" not in refusal.message
        assert outcomes(api.desk.metrics)[MODEL, "completions", "internal_error"] == 1
        assert [record.getMessage() for record in caplog.records] == ["defect"]


class TestSelectWorker:
    async def test_it_takes_no_quota_and_remembers_the_prefix(self, api: Api) -> None:
        await api.admitted()
        await api.admitted()
        prompt = tokens(*text_blocks(1, 8), 0)
        first = (await api.gateway.select(prompt)).selected
        assert list(first.endpoints) == [address(0)]
        assert (first.prompt_tokens, first.cached_tokens) == (33, 0)
        assert (await api.gateway.select(prompt)).selected.cached_tokens == 32
        assert api.fleet.admission.running == 2
        assert outcomes(api.desk.metrics)[MODEL, "completions", "selected"] == 2

    async def test_nobody_to_select_is_a_refusal(self) -> None:
        fleet = Fleet()
        async with serving(desk_of(fleet.scheduler, Clock())) as gateway:
            for call in (gateway.select, gateway.estimate, gateway.admit):
                refusal = (await call(tokens(1))).refusal
                assert (refusal.code, refusal.http_status) == ("no_ready_worker", 503)

    async def test_only_workers_that_the_gateway_allows_are_named(self) -> None:
        fleet = Fleet(workers=3)
        request = tokens(1, 2, 3)
        key = "x-gateway-destination-endpoint-subset"
        request.metadata["envoy.lb.subset_hint"].update({key: [address(1)]})
        async with serving(desk_of(fleet.scheduler, Clock())) as gateway:
            assert list((await gateway.select(request)).selected.endpoints) == [address(1)]
            assert list((await gateway.admit(request)).admitted.endpoints) == [address(1)]

    async def test_a_full_worker_is_the_last_choice(self) -> None:
        fleet = Fleet(workers=2, slots=1)
        prompt = tokens(*text_blocks(1, 8), 0)
        async with serving(desk_of(fleet.scheduler, Clock())) as gateway:
            holder = (await gateway.admit(prompt)).admitted.endpoints[0]
            selected = (await gateway.select(prompt)).selected
        assert selected.endpoints[0] != holder
        assert selected.endpoints[1] == holder


class TestEstimate:
    async def test_it_shows_every_cost_and_changes_nothing(self, api: Api) -> None:
        estimate = (await api.gateway.estimate(tokens(*range(40), max_output_tokens=7))).estimate
        assert (estimate.verdict, estimate.lane, estimate.tenant) == (
            "allow", "online", "anonymous",
        )  # fmt: skip
        assert (estimate.prompt_tokens, estimate.uncached_tokens) == (40, 40)
        assert estimate.output_tokens == 7
        (worker,) = estimate.workers
        assert worker.address == address(0)
        assert worker.ready
        assert worker.has_slot
        assert worker.cost == pytest.approx(sum(worker.terms.values()))
        assert worker.terms["uncached"] >= 40.0
        assert api.fleet.idle()
        assert outcomes(api.desk.metrics) == {(MODEL, "completions", "dry_run"): 1}

    async def test_a_full_pool_tells_the_wait_and_the_reason(self, api: Api) -> None:
        await api.admitted()
        await api.admitted()
        waits = (await api.gateway.estimate(tokens(1))).estimate
        assert (waits.verdict, waits.reason) == ("wait", "quota:pool")
        held = await api.held()
        refused = (await api.gateway.estimate(tokens(1))).estimate
        assert (refused.verdict, refused.reason) == ("queue_full", "quota:pool")
        assert refused.retry_after_s > 0
        held.cancel()


class TestLeases:
    async def test_silence_ends_a_lease_and_renewal_keeps_it(self, api: Api) -> None:
        kept, silent = await api.admitted(), await api.admitted()
        api.clock.now = TTL_S - 1
        assert (await api.gateway.renew(kept.lease)).held
        report(api, TTL_S)
        api.tick(TTL_S + 1)
        assert [lease.id for lease in api.fleet.admission.leases] == [kept.lease]
        assert not (await api.gateway.renew(silent.lease)).held
        assert not api.fleet.scheduler.renew(silent.lease, TTL_S)
        assert not (await api.gateway.release(silent.lease)).released
        assert (await api.gateway.release(kept.lease)).released
        assert api.fleet.idle()

    async def test_a_first_token_ends_the_prefill(self, api: Api) -> None:
        admitted = await api.admitted(tokens(*range(40)))
        worker = api.fleet.workers[0]
        assert api.fleet.held(worker) == (1, 40)
        api.clock.now = 0.5
        assert (await api.gateway.renew(admitted.lease, status=200)).held
        assert api.fleet.held(worker) == (1, 0)
        assert api.desk.metrics.ttft_s.labels(MODEL)._sum.get() == 0.5

    async def test_the_end_teaches_the_length_of_answers(self, api: Api) -> None:
        prompt = tokens(*range(40))
        assert (await api.gateway.estimate(prompt)).estimate.output_tokens == 256
        admitted = await api.admitted(prompt)
        api.clock.now = 3.0
        progress = {"status": 200, "ttft_s": 0.4, "output_tokens": 30, "cached_tokens": 0}
        assert (await api.gateway.release(admitted.lease, **progress)).released
        assert (await api.gateway.estimate(prompt)).estimate.output_tokens == 30
        assert api.desk.metrics.ttft_s.labels(MODEL)._sum.get() == pytest.approx(0.4)
        assert api.fleet.served.level.goodput_per_s(3.0) > 0
        assert api.fleet.idle()

    async def test_who_answered_in_place_of_the_first_gets_the_credit(self) -> None:
        fleet = Fleet(workers=2)
        clock = Clock()
        prompt = tokens(*text_blocks(1, 8), 0)
        async with serving(desk_of(fleet.scheduler, clock)) as gateway:
            admitted = (await gateway.admit(prompt)).admitted
            first, second = admitted.endpoints
            await gateway.renew(admitted.lease, status=200, endpoint=second)
            in_flight = {worker.address: fleet.held(worker)[0] for worker in fleet.workers}
            assert in_flight == {first: 0, second: 1}
            await gateway.release(admitted.lease)
            assert (await gateway.select(prompt)).selected.endpoints[0] == second
        suspects = fleet.pool.table.last_resort(clock.now)
        assert suspects[fleet.pool.workers[first].column]

    @pytest.mark.parametrize(("ttft_s", "counts"), [(0.2, True), (None, False)])
    async def test_the_engines_own_word_ends_a_lease_and_counts(
        self, api: Api, ttft_s: float | None, counts: bool
    ) -> None:
        admitted = await api.admitted()
        worker = api.fleet.workers[0]
        outcome = Outcome(
            admitted.lease, 200, EngineError.NONE, 1.0, ttft_s=ttft_s, output_tokens=9
        )  # fmt: skip
        api.desk.wake(api.fleet.scheduler.outcome(api.fleet.served, worker, outcome, 1.0))
        assert api.fleet.idle()
        assert (api.fleet.served.level.goodput_per_s(1.0) > 0) is counts
        assert not (await api.gateway.release(admitted.lease, status=200)).released

    async def test_where_the_engine_tells_the_end_the_gateways_word_is_not_counted(
        self, api: Api
    ) -> None:
        report(api, 0.0, leases=frozenset())
        admitted = await api.admitted(tokens(*range(40)))
        progress = {"status": 200, "output_tokens": 30}
        assert (await api.gateway.release(admitted.lease, **progress)).released
        assert (await api.gateway.estimate(tokens(*range(40)))).estimate.output_tokens == 256

    async def test_what_came_through_envoy_is_not_a_callers_to_end(self, api: Api) -> None:
        ticket = api.fleet.arrive(profile=RequestProfile(Endpoint.CHAT, model=MODEL))
        assert not (await api.gateway.renew(ticket.id)).held
        assert not (await api.gateway.release(ticket.id)).released
        assert api.fleet.admission.running == 1

    async def test_a_request_that_waits_cannot_be_released(self, api: Api) -> None:
        first, _ = await api.admitted(), await api.admitted()
        call = await api.held()
        (ticket,) = api.desk.waiters
        assert not (await api.gateway.release(ticket.id)).released
        await api.gateway.release(first.lease)
        assert (await call).admitted.lease == ticket.id


async def test_who_waits_at_shutdown_is_told(api: Api) -> None:
    await api.admitted()
    await api.admitted()
    call = await api.held()
    api.desk.closing = True
    api.desk.refuse_waiting()
    assert (await call).refusal.code == "shutting_down"
    assert (await api.gateway.admit(tokens(1))).refusal.code == "shutting_down"
    assert (await api.gateway.select(tokens(1))).refusal.code == "shutting_down"
    assert api.fleet.admission.waiting == 0


def report(api: Api, now: float, **changes: Any) -> None:
    """The worker's agent reports, so that it is not lost."""
    api.desk.wake(
        api.fleet.scheduler.report(api.fleet.served, api.fleet.workers[0], ready(**changes), now)
    )
