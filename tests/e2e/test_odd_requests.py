"""Bodies and clients of every kind are served or refused clearly: no 500, no hang."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.e2e.chat import asked, chat, client_for, text
from tests.support.system import MODEL, System

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def raw_exchange(system: System, request: bytes, pieces: list[bytes]) -> bytes:
    """Send bytes as they are and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.envoy_port)
    try:
        writer.write(request)
        for piece in pieces:
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(piece)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


def request_head(headers: list[bytes], path: str = CHAT) -> bytes:
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: kvgate", b"connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunked(body: bytes, pieces: int) -> list[bytes]:
    size = max(1, len(body) // pieces)
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    return [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in cut] + [b"0\r\n\r\n"]


async def test_a_twelve_megabyte_body_is_answered_by_the_engine(system: System) -> None:
    body = json.dumps(asked("x " * 6_000_000, "too long?")).encode()
    assert len(body) > 12_000_000
    async with client_for(system.url) as client:
        response = await client.post(CHAT, content=body, headers=JSON)
    # The simulated model is shorter than that; the point is that the engine says so itself.
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"
    assert response.headers["x-kvgate-worker"]


async def test_a_large_body_that_fits_the_model_is_served(system: System) -> None:
    padding = "p" * 12_000_000
    body = json.dumps({**asked("short", "short?"), "metadata": {"padding": padding}}).encode()
    async with client_for(system.url) as client:
        response = await client.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 200


@pytest.mark.parametrize("pieces", [1, 3, 50])
async def test_a_chunked_upload_is_served(system: System, pieces: int) -> None:
    body = json.dumps(asked(text(200, seed=3), "chunked?")).encode()
    head = request_head([b"content-type: application/json", b"transfer-encoding: chunked"])
    answer = await raw_exchange(system, head, chunked(body, pieces))
    assert answer.startswith(b"HTTP/1.1 200")


async def test_request_trailers_are_passed_on(system: System) -> None:
    body = json.dumps(asked("short", "trailers?")).encode()
    head = request_head([b"content-type: application/json", b"transfer-encoding: chunked"])
    pieces = [*chunked(body, 2)[:-1], b"0\r\nx-checksum: 1\r\n\r\n"]
    answer = await raw_exchange(system, head, pieces)
    assert answer.startswith(b"HTTP/1.1 200")


async def test_expect_100_continue_is_honoured(system: System) -> None:
    body = json.dumps(asked("short", "expect?")).encode()
    length = f"content-length: {len(body)}".encode()
    head = request_head([b"content-type: application/json", b"expect: 100-continue", length])
    answer = await raw_exchange(system, head, [body])
    assert answer.startswith(b"HTTP/1.1 100")
    assert b"HTTP/1.1 200" in answer


async def test_header_bytes_that_are_not_utf8_do_no_harm(system: System) -> None:
    body = json.dumps(asked("short", "bytes?")).encode()
    length = f"content-length: {len(body)}".encode()
    headers = [b"content-type: application/json", length, b"x-tenant: caf\xe9", b"x-b: \xff\xfe"]
    answer = await raw_exchange(system, request_head(headers), [body])
    assert answer.startswith(b"HTTP/1.1 200")


async def test_an_http2_client_is_served(system: System) -> None:
    async with client_for(system.url, http1=False, http2=True) as client:
        response = await client.post(CHAT, json=asked("short", "h2?"))
    assert response.http_version == "HTTP/2"
    assert response.status_code == 200


async def test_an_empty_body_is_refused_clearly(system: System) -> None:
    async with client_for(system.url) as client:
        response = await client.post(CHAT, content=b"", headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"model": "sim-8b", "messages": "hello"}', 400, "invalid_request"),
        (b'{"messages": []}', 400, "missing_model"),
        (b'{"model": "nobody", "messages": []}', 404, "model_not_found"),
        (b"\xff\xfe\x00", 400, "invalid_json"),
    ],
)
async def test_bad_bodies_get_openais_error_shape(
    system: System, body: bytes, status: int, code: str
) -> None:
    async with client_for(system.url) as client:
        response = await client.post(CHAT, content=body, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert response.headers["x-kvgate-refusal"] == code
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_body_over_the_limit_is_refused_before_its_end(system: System) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * 1_000_000

    async with client_for(system.url) as client:
        try:
            response = await client.post(CHAT, content=endless(), headers=JSON)
        except (httpx.WriteError, httpx.ReadError):
            return  # Envoy closed the connection on a client that went on sending
    assert response.status_code == 413


async def test_compressed_and_multipart_bodies_pass_through(system: System) -> None:
    body = json.dumps(asked("short", "gzip?")).encode()
    packed = {**JSON, "content-encoding": "gzip"}
    async with client_for(system.url) as client:
        zipped = await client.post(CHAT, content=gzip.compress(body), headers=packed)
        zstd = await client.post(
            CHAT, content=b"\x28\xb5\x2f\xfd", headers={**JSON, "content-encoding": "zstd"}
        )
        form = await client.post(
            "/v1/audio/transcriptions",
            files={"file": ("a.wav", b"\0" * 3_000_000)},
            data={"model": MODEL},
        )
    # All of them are the engine's own answers (this one expands gzip), from a chosen worker.
    assert [r.status_code for r in (zipped, zstd, form)] == [200, 400, 404]
    for response in (zipped, zstd, form):
        assert response.headers["x-kvgate-worker"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/nowhere"])
async def test_requests_without_a_body_reach_a_worker(system: System, path: str) -> None:
    async with client_for(system.url) as client:
        response = await client.get(path)
    assert response.status_code == (404 if path == "/nowhere" else 200)
    assert response.headers["x-kvgate-worker"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": text(100, seed=5)}),
        ("/v1/completions", {"prompt": [text(60, seed=6), text(60, seed=7)]}),
        ("/v1/completions", {"prompt": list(range(10, 200))}),
        ("/v1/completions", {"prompt": [list(range(10, 200)), list(range(20, 90))]}),
        ("/v1/embeddings", {"input": text(100, seed=8)}),
        ("/v1/responses", {"input": text(100, seed=9), "instructions": text(100, seed=10)}),
        ("/v1/messages", {"max_tokens": 8, "system": text(90, seed=11), "messages": [
            {"role": "user", "content": [{"type": "text", "text": text(90, seed=12)}]}]}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)  # fmt: skip
async def test_every_endpoint_is_served_and_hits_its_cache_the_second_time(
    system: System, path: str, body: dict[str, object]
) -> None:
    async with client_for(system.url) as client:
        first = await client.post(path, json={"model": MODEL, **body})
        second = await client.post(path, json={"model": MODEL, **body})
    assert (first.status_code, second.status_code) == (200, 200)
    if path not in ("/tokenize", "/v1/embeddings"):
        assert second.headers["x-kvgate-worker"] == first.headers["x-kvgate-worker"]
        assert int(second.headers["x-kvgate-cached-tokens"]) > 0


async def test_two_requests_with_one_request_id_are_two_requests(system: System) -> None:
    """PR5."""
    headers = {"x-request-id": "a"}
    async with client_for(system.url, headers=headers) as client:
        bodies = [chat([{"role": "user", "content": f"{n}"}], max_tokens=n) for n in (4, 64)]
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        long_id = await client.post(CHAT, json=bodies[0], headers={"x-request-id": "i" * 65_536})
    assert [answer.status_code for answer in answers] == [200, 200]
    ids = {answer.headers["x-kvgate-decision-id"] for answer in answers}
    assert len(ids) == 2
    assert long_id.status_code == 200
    system.wait_idle()


async def test_client_headers_cannot_choose_the_worker(system: System) -> None:
    """SE1."""
    forged = [
        ("x-gateway-destination-endpoint", "169.254.169.254:80"),
        ("X-Gateway-Destination-Endpoint", "127.0.0.1:1"),
        ("x-kvgate-lease", "mine"),
    ]
    async with client_for(system.url, headers=forged) as client:
        for response in (
            await client.post(CHAT, json=asked("short", "forged?")),
            await client.get("/v1/models"),
            await client.post(CHAT, content=b"{", headers=JSON),
        ):
            assert response.status_code in (200, 400)
            worker = response.headers.get("x-kvgate-worker")
            assert worker in {None, *(worker.address for worker in system.workers)}


async def test_nothing_of_a_request_is_logged_or_shown(system: System) -> None:
    """SE3."""
    canary = "SECRET-CANARY-123"
    bodies = [
        json.dumps(asked(canary, canary, cache_salt=canary)).encode(),
        json.dumps(asked(canary, "x", tools=[{"type": "function", "function": canary}])).encode(),
        b'{"model": "sim-8b", "messages": "' + canary.encode() + b'"}',
        b'{"model": "' + canary.encode() + b'", "messages": []}',
        b"{" + canary.encode(),
    ]
    headers = {**JSON, "authorization": f"Bearer {canary}", "x-tenant": canary}
    async with client_for(system.url, headers=headers) as client:
        for body in bodies:
            response = await client.post(CHAT, content=body)
            if response.status_code != 200:
                assert canary not in response.text
    from tests.support.system import fetch

    for page in ("/metrics", "/api/v1/workers"):
        assert canary not in fetch(f"http://127.0.0.1:{system.admin_port}{page}")[1]
    assert canary not in system.logs()
