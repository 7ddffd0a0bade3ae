from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from workers.simulator import faults
from workers.simulator.__main__ import parse
from workers.simulator.faults import METRICS_FAULTS
from workers.simulator.prompt import Prompter
from workers.simulator.server import serve
from workers.simulator.settings import SimulatorSettings
from workers.simulator.timing import PEERS_MOCK, StepTimes

from .client import Client, chat
from .conftest import Start

SLOW = StepTimes(base_s=30.0)
"""A step that no test waits for."""

IDLE = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}


async def leave(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def ask(worker: Client, stream: bool, tokens: int = 1000) -> asyncio.Task[object]:
    body = {"prompt": list(range(100)), "max_tokens": tokens}
    if stream:
        return asyncio.create_task(worker.stream("/v1/completions", body))
    return asyncio.create_task(worker.post("/v1/completions", body))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_gone_while_prefilling_or_queued(
    start: Start, stream: bool
) -> None:
    worker = await start(timing=SLOW, max_num_seqs=1)
    running = ask(worker, stream)
    await worker.until(num_requests_running=1.0)
    queued = ask(worker, stream)
    await worker.until(num_requests_running=1.0, num_requests_waiting=1.0)
    metrics = await worker.metrics()
    assert metrics["vllm:num_requests_waiting_by_reason{capacity}"] == 1
    assert metrics["vllm:kv_cache_usage_perc"] == pytest.approx(4 / 300)
    assert await worker.get("/load") == (200, {"server_load": 2})
    await leave(queued)
    await worker.until(num_requests_running=1.0, num_requests_waiting=0.0)
    await leave(running)
    await worker.until(**IDLE)
    assert await worker.get("/load") == (200, {"server_load": 0})
    assert (await worker.metrics())["vllm:request_success_total{abort}"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_gone_while_decoding(start: Start, stream: bool) -> None:
    worker = await start(speedup=1.0)
    decoding = ask(worker, stream, tokens=8000)
    await worker.until_generated(1)
    await leave(decoding)
    await worker.until(**IDLE)


async def test_a_half_closed_connection_aborts_too(start: Start) -> None:
    worker = await start(timing=SLOW)
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.simulator.port)
    body = b'{"prompt": "x", "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await worker.until(num_requests_running=1.0)
    writer.write_eof()
    await worker.until(**IDLE)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_bug_is_a_500_and_its_text_is_not_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_prompter: Prompter, body: object) -> list[int]:
        raise RuntimeError(f"cannot {body}")

    worker = await start()
    monkeypatch.setattr(Prompter, "chat", broken)
    status, body = await worker.post("/v1/chat/completions", chat("canary"))
    assert (status, body["error"]["code"]) == (500, 500)
    assert "RuntimeError" in caplog.text
    assert "canary" not in caplog.text + str(body)


async def test_headers_wait_for_the_first_token_unless_told_otherwise(start: Start) -> None:
    for hold in (True, False):
        worker = await start(hold_headers=hold)
        await worker.post("/sim/freeze", {"seconds": 60})
        body = {"prompt": "x", "stream": True}
        request = asyncio.create_task(worker.http.post("/v1/completions", json=body))
        await worker.until(num_requests_running=0.0, num_requests_waiting=1.0)
        if hold:
            assert not request.done()
            await worker.post("/sim/freeze", {"seconds": 0})
        response = await request
        assert response.status == 200
        await worker.post("/sim/freeze", {"seconds": 0})
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_tokens_may_be_streamed_several_at_a_time(start: Start) -> None:
    """The first alone, then four a chunk, the rest with the end."""
    worker = await start(stream_interval=4)
    body = {"prompt": "x", "stream": True, "max_tokens": 11}
    async with worker.http.post("/v1/completions", json=body) as response:
        lines = (await response.text()).split("\n\n")
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if "text" in line]
    whole = await worker.post("/v1/completions", body | {"stream": False})
    assert "".join(texts) == whole[1]["choices"][0]["text"]
    assert len(texts) == 4


async def test_a_frozen_engine_answers_http_and_goes_on_later(start: Start) -> None:
    worker = await start()
    await worker.post("/sim/freeze", {"seconds": 60})
    asked = ask(worker, stream=False, tokens=2)
    await worker.until(num_requests_waiting=1.0)
    async with worker.http.get("/health") as response:
        assert response.status == 200
    await worker.post("/sim/freeze", {"seconds": 0})
    assert (await asked)[0] == 200  # type: ignore[index]


async def test_the_next_requests_fail_as_told(start: Start) -> None:
    worker = await start()
    await worker.post("/sim/fail", {"status": 503, "count": 2})
    statuses = [(await worker.post("/v1/completions", {"prompt": "x"}))[0] for _ in range(3)]
    assert statuses == [503, 503, 200]
    assert (await worker.post("/sim/fail", {"status": 200, "count": 1}))[0] == 400
    assert (await worker.post("/sim/freeze", {"seconds": -1}))[0] == 400


@pytest.mark.parametrize("fault", METRICS_FAULTS)
async def test_the_metrics_page_is_spoiled_until_told_otherwise(
    start: Start, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "SLOW_PAGE_S", 0.2)
    worker = await start()
    assert await worker.post("/sim/metrics", {"fault": fault}) == (200, {"fault": fault})
    began = asyncio.get_running_loop().time()
    async with worker.http.get("/metrics") as response:
        page = await response.read()
    took_s = asyncio.get_running_loop().time() - began
    assert response.status == (404 if fault == "404" else 200)
    assert (b"vllm:num_requests_running" in page) is (fault == "slow")
    assert (took_s >= 0.2) is (fault == "slow")
    if fault == "renamed":
        assert b"\nvllm:new_num_requests_running" in page
    assert (await worker.post("/sim/metrics", {"fault": "other"}))[0] == 400
    await worker.post("/sim/metrics", {"fault": None})
    assert (await worker.metrics())["vllm:num_requests_running"] == 0


async def test_a_full_queue_refuses_with_503_and_no_retry_after(start: Start) -> None:
    worker = await start(timing=SLOW, max_queued=1)
    asked = ask(worker, stream=True)
    await worker.until(num_requests_running=1.0)
    for stream in (False, True):
        body = {"prompt": "x", "stream": stream}
        async with worker.http.post("/v1/completions", json=body) as response:
            error = (await response.json())["error"]
            assert response.status == 503
            assert "Retry-After" not in response.headers
        assert error["type"] == "Service Unavailable"
    metrics = await worker.metrics()
    assert metrics["vllm:admission_rejections_total{max_num_queued_reqs}"] == 2
    await leave(asked)


async def test_the_cache_cannot_be_reset_while_a_request_runs(start: Start) -> None:
    worker = await start(timing=SLOW)
    asked = ask(worker, stream=True)
    await worker.until(num_requests_running=1.0)
    assert await worker.post("/reset_prefix_cache", {}) == (200, {"success": False})
    await leave(asked)


async def test_the_metrics_that_routers_read_are_there(start: Start) -> None:
    worker = await start(adapters=("ad1",))
    await worker.complete(list(range(100)), max_tokens=3)
    asked = asyncio.create_task(
        worker.post("/v1/completions", {"prompt": "x", "model": "ad1", "max_tokens": 8000})
    )
    await worker.until(num_requests_running=1.0)
    metrics = await worker.metrics()
    await leave(asked)
    for name in (
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
        "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "num_preemptions_total", "admission_rejections_total", "engine_sleep_state",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_sum", "request_queue_time_seconds_count",
        "cache_config_info", "lora_requests_info",
    ):  # fmt: skip
        assert f"vllm:{name}" in metrics, name
    assert metrics["vllm:request_success_total{length}"] == 1
    assert metrics["vllm:e2e_request_latency_seconds_count"] == 1
    assert metrics["process_start_time_seconds"] > 1e9
    async with worker.http.get("/metrics") as response:
        text = await response.text()
    assert 'vllm:num_requests_running{engine="0",model_name="sim"}' in text
    assert 'block_size="32"' in text
    assert 'num_gpu_blocks="300"' in text


async def test_stopping_cuts_what_is_in_flight_with_an_error(start: Start) -> None:
    worker = await start(speedup=1.0)
    streamed, whole = ask(worker, True, 8000), ask(worker, False, 8000)
    await worker.until_generated(4)
    await worker.simulator.__aexit__(None, None, None)
    events = await streamed
    assert isinstance(events, list)
    assert json.loads(events[-2])["error"]["code"] == 500
    assert events[-1] == "[DONE]"
    assert (await whole)[0] == 500  # type: ignore[index]


async def test_serving_ends_when_told(model_dir: Path) -> None:
    stop = asyncio.Event()
    settings = SimulatorSettings(model_dir, "sim", port=0)
    await serve(settings, ready=stop.set, stop=stop)


async def test_the_command_exits_0_on_sigterm_and_3_on_bad_settings(
    model_dir: Path, unused_tcp_port: int
) -> None:
    command = [sys.executable, "-m", "workers.simulator", "--model-dir", str(model_dir)]
    command += ["--model-name", "sim", "--port", str(unused_tcp_port)]
    bad = await asyncio.create_subprocess_exec(
        *command, "--num-blocks", "1", stderr=asyncio.subprocess.PIPE
    )
    _out, complaint = await bad.communicate()
    assert bad.returncode == 3
    assert b"cannot hold one request" in complaint
    process = await asyncio.create_subprocess_exec(*command)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{unused_tcp_port}") as http:
        async with asyncio.timeout(20):
            while True:
                try:
                    await http.get("/health")
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        response = await http.post("/v1/chat/completions", json=chat("x", max_tokens=5))
        assert response.status == 200
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


def test_flags_become_settings() -> None:
    flags = "--model-dir d --model-name m --adapter a --adapter b --port 1 --kv-events-port 2 "
    flags += "--no-hold-headers --speedup 2 --timing peers-mock --max-queued 5 --socket s "
    flags += "--stream-interval 4 --cache-segments"
    settings = parse(flags.split())
    assert settings == SimulatorSettings(
        Path("d"), "m", ("a", "b"), port=1, kv_events_port=2, hold_headers=False, speedup=2.0,
        timing=PEERS_MOCK, max_queued=5, socket=Path("s"), stream_interval=4, cache_segments=True,
    )  # fmt: skip
    assert settings.engine_config().timing.speedup == 2.0
    assert settings.engine_config().record_events


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 70_000), ("model_name", ""), ("adapters", ("a", "a")), ("adapters", ("sim",)),
        ("max_queued", 0), ("shutdown_s", -1.0), ("kv_replay_port", 1), ("speedup", 0.0),
        ("block_size", 0), ("stream_interval", 0),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SimulatorSettings(Path(), **({"model_name": "sim"} | {field: value}))  # type: ignore[arg-type]


def test_step_times_follow_the_formula() -> None:
    times = StepTimes(0.01, 0.001, 0.005, 1000.0, speedup=2.0)
    assert times.step_s(10, 0) == pytest.approx(0.01)
    assert times.step_s(0, 100) == pytest.approx(0.0575)
    with pytest.raises(ValueError, match="base_s"):
        StepTimes(base_s=-1.0)
