"""What the engine is told in place of the client's words: salt and priority, through Envoy's
streams and through the API."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext

from extproc.call import Call
from extproc.desk import Desk
from extproc.policy import TrustPolicy
from extproc.request.trust import TrustDomains
from tests.support.builders import Fleet, address, hello, ready
from tests.support.scheduler_api import Clock, chat_call, desk_of, serving, tokens

KEY = "a key of more than 16 bytes"
TRUST = {"isolate": "tenants", "key": KEY}
SALT = TrustDomains(TrustPolicy.model_validate(TRUST)).salt("anonymous")
PATH = "/v1/chat/completions"
BODY = (
    b' { "n":1.0,"cache_salt" : "mine", "unknown":{"b":[1e400],"a":2},'
    b' "priority": -7,"model":"sim" } '
)


class _Stream:
    """Envoy's end of a stream, message by message."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: list[Any] = []

    async def read(self) -> Any:
        return await self.messages.get()

    async def write(self, answer: Any) -> None:
        self.answers.append(answer)


async def answered(desk: Desk, body: bytes, path: str = PATH, **headers: str) -> tuple[int, bytes]:
    """Status of a refusal and its body, or 0 and the body that the worker gets."""
    said = await answers(desk, body, path, **headers)
    refused = said[0].immediate_response
    if refused.status.code:
        return refused.status.code, refused.body
    pieces = [answer.request_body.response.body_mutation.streamed_response for answer in said[1:]]
    return 0, b"".join(piece.body for piece in pieces)


async def answers(desk: Desk, body: bytes, path: str = PATH, **headers: str) -> list[Any]:
    """What Envoy is told of a request that ends at once."""
    stream = _Stream()
    call = Call(desk, stream)  # type: ignore[arg-type]
    pairs = {":path": path, ":method": "POST", **headers}
    named = [HeaderValue(key=k.replace("_", "-"), raw_value=v.encode()) for k, v in pairs.items()]
    mode = {"request_body_mode": 4}
    stream.messages.put_nowait(
        ext.ProcessingRequest(
            request_headers={"headers": HeaderMap(headers=named)}, protocol_config=mode
        )
    )
    piece = {"body": body, "end_of_stream": True}
    stream.messages.put_nowait(ext.ProcessingRequest(request_body=piece))
    running = asyncio.create_task(call.run())
    while not stream.answers:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    call.end()
    return stream.answers


def desk(**pool: Any) -> Desk:
    return desk_of(Fleet(workers=1, **pool).scheduler, Clock())


class TestThroughEnvoy:
    async def test_only_the_salt_changes(self) -> None:
        """Numbers, spaces, order and unknown fields stay byte for byte."""
        status, sent = await answered(desk(trust=TRUST), BODY)
        assert (status, sent) == (0, BODY.replace(b'"mine"', f'"{SALT}"'.encode()))

    async def test_without_trust_the_client_keeps_its_salt_and_priority(self) -> None:
        assert await answered(desk(), BODY) == (0, BODY)

    async def test_a_salt_that_is_there_twice_or_escaped_is_there_once(self) -> None:
        body = rb'{"cache_salt":"a","model":"sim","cache\u005fsalt":"b"}'
        _, sent = await answered(desk(trust=TRUST), body)
        assert sent == b'{"cache_salt":"%s","model":"sim"}' % SALT.encode()

    @pytest.mark.parametrize("path", ["/inference/v1/generate", PATH + "/"])
    async def test_paths_that_kvgate_does_not_know_get_it_too(self, path: str) -> None:
        _, sent = await answered(desk(trust=TRUST), BODY, path)
        assert json.loads(sent)["cache_salt"] == SALT

    @pytest.mark.parametrize(
        ("body", "headers"),
        [
            (gzip.compress(BODY), {"content_encoding": "gzip"}),
            (b"\x28\xb5\x2f\xfd", {"content_encoding": "zstd"}),
            (b"--x", {"content_type": "multipart/form-data; boundary=x"}),
        ],
    )
    async def test_what_takes_no_salt_reaches_no_worker(
        self, body: bytes, headers: dict[str, str]
    ) -> None:
        isolated = desk(trust=TRUST)
        status, told = await answered(isolated, body, **headers)
        assert status == 400
        assert json.loads(told)["error"]["code"] == "uneditable_body"
        assert isolated.scheduler.admission.running == 0

    async def test_a_lane_has_its_engine_priority(self) -> None:
        online_first = desk(engine_priority={"online": 0, "batch": 10})
        _, sent = await answered(online_first, BODY)
        assert sent == BODY.replace(b"-7", b"0")
        _, sent = await answered(online_first, b'{"model":"sim"}', x_kvgate_lane="batch")
        assert sent == b'{"priority":10,"model":"sim"}'

    async def test_a_compressed_body_keeps_its_priority(self) -> None:
        body = gzip.compress(BODY)
        online_first = desk(engine_priority={"online": 0, "batch": 10})
        assert await answered(online_first, body, content_encoding="gzip") == (0, body)


class TestPrefillers:
    """Workers by role, 0 prefills and 1 decodes."""

    def fleet(self) -> Fleet:
        fleet = Fleet(routing={"disaggregation": {"min_uncached_tokens": 8}})
        for number, role in enumerate(("prefill", "decode")):
            worker = fleet.pool.hello(hello(number, labels={"role": role}), 0.0)
            assert worker is not None
            fleet.pool.report(worker, ready(), 0.0)
        return fleet

    @pytest.mark.parametrize(("words", "named"), [(100, [address(0)]), (1, [])])
    async def test_the_header_is_ours_or_not_there(self, words: int, named: list[str]) -> None:
        """SE1: a client's would make the sidecar call any address."""
        fleet = self.fleet()
        content = "word " * words
        body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": content}]})
        first = await answers(desk_of(fleet.scheduler, Clock()), body.encode())
        mutation = first[0].request_headers.response.header_mutation
        told = [o.header.raw_value.decode() for o in mutation.set_headers
                if o.header.key == "x-prefiller-host-port"]  # fmt: skip
        assert told == named
        assert ("x-prefiller-host-port" in mutation.remove_headers) is not bool(named)
        assert fleet.idle()

    async def test_the_gateway_is_told(self) -> None:
        async with serving(desk_of(self.fleet().scheduler, Clock())) as api:
            admitted = (await api.admit(tokens(*range(40)))).admitted
        assert (list(admitted.endpoints), admitted.prefiller) == ([address(1)], address(0))


class TestThroughTheApi:
    async def test_the_gateway_is_told(self) -> None:
        async with serving(desk(trust=TRUST, engine_priority={"online": 3, "batch": 10})) as api:
            by_body = (await api.admit(chat_call(b'{"model": "sim"}'))).admitted
            by_tokens = (await api.admit(tokens(1, 2, cache_salt="mine"))).admitted
            selected = (await api.select(tokens(1, 2))).selected
        assert {m.cache_salt for m in (by_body, by_tokens, selected)} == {SALT}
        assert (by_body.priority, by_tokens.priority) == (3, 3)

    async def test_without_trust_there_is_nothing_to_tell(self) -> None:
        async with serving(desk()) as api:
            admitted = (await api.admit(tokens(1, 2, cache_salt="mine"))).admitted
        assert not admitted.HasField("cache_salt")
        assert not admitted.HasField("priority")
