"""What the generated configuration makes the real Envoy do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2

from extproc.envoy_config import PROCESSOR_SERVICE, BodyMode
from tests.envoy.rig import rig, serving, until
from tests.support.envoy import free_ports

BOTH = pytest.mark.parametrize("body_mode", ["full_duplex", "buffered"])
TWELVE_MB = b"x" * 12_000_000


def names_of(headers: list[Any]) -> list[str]:
    return [name for name, _ in headers]


class TestRouting:
    @BOTH
    async def test_the_destination_header_is_followed(self, body_mode: BodyMode) -> None:
        async with rig("serve", "serve", "serve", body_mode=body_mode) as path:
            for index in (2, 0, 2, 1):
                path.send_to(index)
                answer = await path.post()
                assert answer.json()["worker"] == path.workers[index].address
                assert answer.json()["body_bytes"] == 13

    @BOTH
    async def test_a_request_without_body_is_routed_too(self, body_mode: BodyMode) -> None:
        async with rig("serve", "serve", body_mode=body_mode) as path:
            path.send_to(1)
            answer = await path.client.get("/v1/models")
            assert answer.json()["worker"] == path.workers[1].address

    async def test_without_a_destination_workers_take_turns(self) -> None:
        async with rig("serve", "serve", "serve") as path:
            served = {(await path.post()).json()["worker"] for _ in range(3)}
            assert served == {worker.address for worker in path.workers}

    async def test_the_processor_learns_who_served_at_which_attempt(self) -> None:
        async with rig("busy", "serve") as path:
            path.send_to(0, 1)
            assert (await path.post()).status_code == 200
            (seen,) = path.processor.streams
            await until(lambda: seen.ended)
            assert seen.response_status == "200"
            assert seen.attributes["upstream.address"] == path.workers[1].address
            assert seen.attributes["upstream.request_attempt_count"] == 2


class TestRetries:
    @pytest.mark.parametrize("fault", ["refuse", "reset", "reset_after_body", "busy", "dying"])
    async def test_the_list_is_walked_past_a_worker_that_fails(self, fault: Any) -> None:
        async with rig(fault, "serve", "serve") as path:
            path.send_to(0, 2)
            for _ in range(2):
                assert (await path.post()).json()["worker"] == path.workers[2].address

    async def test_an_error_that_no_other_worker_mends_is_not_retried(self) -> None:
        async with rig("faulty", "serve") as path:
            path.send_to(0, 1)
            answer = await path.post()
            assert (answer.status_code, answer.json()["worker"]) == (500, path.workers[0].address)

    @BOTH
    async def test_a_12_mb_body_is_retried_whole(self, body_mode: BodyMode) -> None:
        async with rig("reset_after_body", "serve", body_mode=body_mode) as path:
            path.send_to(0, 1)
            answer = await path.post(TWELVE_MB)
            assert answer.json()["body_bytes"] == len(TWELVE_MB)
            assert path.processor.streams[0].body_bytes == len(TWELVE_MB)

    async def test_after_the_list_a_worker_not_tried_yet_is_taken(self) -> None:
        async with rig("refuse", "refuse", "serve") as path:
            path.send_to(0, 1)
            for _ in range(3):
                assert (await path.post()).json()["worker"] == path.workers[2].address

    async def test_more_requests_than_three_are_retried_at_once(self) -> None:
        async with rig("refuse", "serve") as path:
            path.send_to(0, 1)
            answers = await asyncio.gather(*(path.post() for _ in range(50)))
            assert {answer.status_code for answer in answers} == {200}


class TestClientHeaders:
    @pytest.mark.parametrize("http2", [False, True])
    async def test_routing_and_internal_headers_of_clients_never_arrive(self, http2: bool) -> None:
        forged = [
            ("X-Gateway-Destination-Endpoint", "127.0.0.1:1"),
            ("x-gateway-destination-endpoint", "127.0.0.1:2"),
            ("x-gateway-destination-endpoint-subset", "127.0.0.1:2"),
            ("X-KVGATE-LEASE", "forged"),
            ("x-kvgate-lease", "forged again"),
            ("x-kvgate-worker", "127.0.0.1:3"),
            ("x-kvgate-dry-runs", "1"),
            ("x-kvgate-dry", "1"),
            ("X-Kvgate-Anything", "1"),
            ("x-envoy-max-retries", "9"),
            ("x-envoy-upstream-rq-timeout-ms", "1"),
        ]
        async with rig(http2=http2) as path:
            answer = await path.post(headers=forged)
            told = names_of(path.processor.streams[0].headers)
            bad = [name for name in told if name.startswith(("x-gateway-", "x-kvgate-"))]
            assert bad == []
            assert not {"x-envoy-max-retries", "x-envoy-upstream-rq-timeout-ms"} & set(told)
            assert answer.json()["worker"] == path.workers[0].address
            assert not {name.lower() for name, _ in forged} & set(
                names_of(answer.json()["headers"])
            )

    async def test_a_dry_run_may_be_asked_for(self) -> None:
        async with rig() as path:
            await path.post(headers={"X-Kvgate-Dry-Run": "1"})
            assert ("x-kvgate-dry-run", "1") in path.processor.streams[0].headers

    async def test_headers_of_the_processor_reach_the_worker(self) -> None:
        async with rig() as path:
            path.send_to(0)
            headers = (await path.post(headers={"x-kvgate-lease": "forged"})).json()["headers"]
            assert [value for name, value in headers if name == "x-kvgate-lease"] == ["ours"]

    async def test_client_and_worker_get_the_same_request_id(self) -> None:
        async with rig() as path:
            answer = await path.post()
            assert ["x-request-id", answer.headers["x-request-id"]] in answer.json()["headers"]


class TestBodies:
    @BOTH
    @pytest.mark.parametrize("http2", [False, True])
    async def test_12_mb_pass(self, body_mode: BodyMode, http2: bool) -> None:
        async with rig(body_mode=body_mode, http2=http2) as path:
            path.send_to(0)
            assert (await path.post(TWELVE_MB)).json()["body_bytes"] == len(TWELVE_MB)

    async def test_a_buffered_body_over_the_limit_gets_413(self) -> None:
        async with rig(body_mode="buffered", max_body_bytes=1_000_000) as path:
            assert (await path.post(b"x" * 1_200_000)).status_code == 413
            assert path.processor.streams[0].response_status == "413"

    @BOTH
    async def test_a_chunked_upload_arrives_whole(self, body_mode: BodyMode) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b"y" * 1_000
                await asyncio.sleep(0.02)

        async with rig(body_mode=body_mode) as path:
            path.send_to(0)
            assert (await path.post(pieces())).json()["body_bytes"] == 5_000

    @BOTH
    async def test_expect_100_continue_is_answered(self, body_mode: BodyMode) -> None:
        async with rig(body_mode=body_mode) as path, aiohttp.ClientSession() as session:
            path.send_to(0)
            url = f"{path.envoy.url}/v1/completions"
            async with asyncio.timeout(3), session.post(url, data=b"z" * 99, expect100=True) as got:
                assert (await got.json())["body_bytes"] == 99


class TestHolding:
    @BOTH
    async def test_a_request_held_past_the_answer_limit_is_served(
        self, body_mode: BodyMode
    ) -> None:
        limits = {"processor_timeout_s": 0.5, "queue_time_s": 3.0}
        async with rig(body_mode=body_mode, **limits) as path:
            path.send_to(0)
            path.processor.hold_s = 3.0
            assert (await path.post()).status_code == 200

    @BOTH
    async def test_the_stream_lasts_as_long_as_the_response(self, body_mode: BodyMode) -> None:
        async with rig(body_mode=body_mode) as path:
            path.send_to(0)
            await path.post()
            (seen,) = path.processor.streams
            await until(lambda: seen.ended)
            assert seen.response_status == "200"

    @BOTH
    async def test_a_client_that_leaves_while_held_cancels_the_stream(
        self, body_mode: BodyMode
    ) -> None:
        async with rig(body_mode=body_mode) as path:
            path.processor.hold_s = 60
            request = asyncio.create_task(path.post())
            await until(lambda: any(seen.body_bytes for seen in path.processor.streams))
            request.cancel()
            await until(lambda: path.processor.streams[0].cancelled, within_s=0.5)

    async def test_more_requests_than_envoy_defaults_allow_are_held_at_once(self) -> None:
        async with rig() as path:
            path.send_to(0)
            path.processor.hold_s = 2.0
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(path.envoy.url, connector=connector) as session:
                failures = await asyncio.gather(*(_failure(session) for _ in range(1_100)))
            assert Counter(failures) == {None: 1_100}

    async def test_clients_that_leave_together_leave_the_others_alone(self) -> None:
        leaving = 3_000
        async with rig(processor_up=False) as path, _slow_reader(path) as reading:
            path.send_to(0)
            path.processor.hold_s = 12.0
            stays = asyncio.create_task(path.post())
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(path.envoy.url, connector=connector) as session:
                leave = [asyncio.create_task(_failure(session)) for _ in range(leaving)]
                await _active(path, leaving + 1)
                reading.clear()
                for each in leave:
                    each.cancel()
                await _active(path, 1)
            reading.set()
            assert (await stays).status_code == 200


async def _failure(session: aiohttp.ClientSession) -> str | None:
    async with session.get("/v1/models") as answer:
        return None if answer.status == 200 else f"{answer.status}: {await answer.text()}"


async def _active(path: Any, requests: int) -> None:
    """Return when Envoy has this many streams to the processor."""
    name = "cluster.kvgate.upstream_rq_active"
    async with asyncio.timeout(20.0):
        while (await path.envoy.stats(name))[name] != requests:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _slow_reader(path: Any) -> AsyncIterator[asyncio.Event]:
    """The processor behind a relay that reads from Envoy only while the event is set."""
    reading, [port] = asyncio.Event(), free_ports(1)
    reading.set()
    pumps: list[asyncio.Task[None]] = []

    async def pump(
        source: asyncio.StreamReader, target: asyncio.StreamWriter, may_read: asyncio.Event | None
    ) -> None:
        try:
            while True:
                if may_read is not None:
                    await may_read.wait()
                if not (data := await source.read(65_536)):
                    break
                target.write(data)
                await target.drain()
        finally:
            target.transport.abort()

    async def relay(envoy: asyncio.StreamReader, to_envoy: asyncio.StreamWriter) -> None:
        processor, to_processor = await asyncio.open_connection("127.0.0.1", port)
        pumps.append(asyncio.create_task(pump(envoy, to_processor, reading)))
        pumps.append(asyncio.create_task(pump(processor, to_envoy, None)))

    async with serving(path.processor, port):
        listen_port = path.envoy.settings.processor_port
        server = await asyncio.start_server(relay, "127.0.0.1", listen_port)
        try:
            yield reading
        finally:
            server.close()
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


class TestProcessorRestart:
    async def test_down_is_503_and_up_again_is_found_without_help(self) -> None:
        async with rig(processor_up=False) as path:
            path.send_to(0)
            port = path.envoy.settings.processor_port
            for _ in range(2):
                async with serving(path.processor, port):
                    assert await _recovery_s(path) < 1.5
                assert (await path.post()).status_code == 503

    async def test_the_only_processor_is_used_though_it_says_it_is_not_serving(self) -> None:
        async with rig(processor_up=False) as path:
            path.send_to(0)
            async with serving(path.processor, path.envoy.settings.processor_port) as checks:
                await checks.set(PROCESSOR_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
                await asyncio.sleep(1.2)
                assert (await path.envoy.stats("cluster.kvgate.membership_healthy")).popitem()[
                    1
                ] == 0
                assert (await path.post()).status_code == 200


async def _recovery_s(path: Any) -> float:
    start = time.monotonic()
    while (await path.post()).status_code != 200:
        pass
    return time.monotonic() - start
