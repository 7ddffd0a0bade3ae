"""Bodies that kvgate edits, answers of its own and identities, through the real Envoy."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extproc.envoy_config import BodyMode
from extproc.policy import parse_policy
from extproc.request.identity import Identity, IdentityReader
from extproc.request.limits import engine_members, output_caps
from extproc.request.profile import Endpoint
from extproc.request.splice import edit_top_level
from tests.envoy.rig import StreamProcessor, rig

BOTH = pytest.mark.parametrize("body_mode", ["full_duplex", "buffered"])
LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * 2_500_000}]})
BODIES = {
    "small": b'{"model":"m", "temperature": 1.0}',
    "several pieces": b'{"messages":[%s],"model":"m"}' % b",".join([b'{"a":"b"}'] * 20_000),
    "5 MB": LONG.encode(),
}


def header(told: dict[str, Any], name: str) -> list[str]:
    return [value for key, value in told["headers"] if key == name]


def longer(body: bytes) -> bytes:
    caps = output_caps(body, Endpoint.CHAT, 16)
    return edit_top_level(body, caps | engine_members("m" * 70_000, None, None))


def shorter(body: bytes) -> bytes:
    return edit_top_level(body, engine_members("", None, None))


def one_byte(_: bytes) -> bytes:
    return b"{"


class TestEditedBodies:
    @BOTH
    @pytest.mark.parametrize("edit", [longer, shorter, one_byte])
    @pytest.mark.parametrize("size", BODIES)
    async def test_the_worker_gets_exactly_the_edited_body(
        self, body_mode: BodyMode, edit: Any, size: str
    ) -> None:
        processor = StreamProcessor(body_mode, edit=edit)
        wanted = edit(BODIES[size])
        assert len(wanted) != len(BODIES[size])
        async with rig(body_mode=body_mode, processor=processor) as path:
            path.send_to(0)
            answer = await path.post(BODIES[size])
            assert answer.status_code == 200
            told = answer.json()
        assert told["body_bytes"] == len(wanted)
        assert told["body_sha256"] == hashlib.sha256(wanted).hexdigest()
        lengths = header(told, "content-length")
        assert header(told, "x-kvgate-lease") == ["ours"]
        if body_mode == "buffered":
            assert lengths == [str(len(wanted))]
        else:
            assert lengths == []
            assert header(told, "transfer-encoding") == ["chunked"]

    @BOTH
    async def test_an_upload_of_unknown_length_can_be_edited(self, body_mode: BodyMode) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

        body, processor = BODIES["small"], StreamProcessor(body_mode, edit=shorter)
        async with rig(body_mode=body_mode, processor=processor) as path:
            path.send_to(0)
            told = (await path.post(pieces())).json()
        assert told["body_sha256"] == hashlib.sha256(shorter(body)).hexdigest()
        framing = (header(told, "content-length"), header(told, "transfer-encoding"))
        buffered = ([str(len(shorter(body)))], [])
        assert framing == (buffered if body_mode == "buffered" else ([], ["chunked"]))

    @BOTH
    async def test_the_next_worker_gets_the_edited_body_too(self, body_mode: BodyMode) -> None:
        processor = StreamProcessor(body_mode, edit=longer)
        faults: Any = ("reset_after_body", "serve")
        async with rig(*faults, body_mode=body_mode, processor=processor) as path:
            path.send_to(0, 1)
            told = (await path.post(BODIES["several pieces"])).json()
            assert told["worker"] == path.workers[1].address
            wanted = hashlib.sha256(longer(BODIES["several pieces"])).hexdigest()
            seen = [worker.requests[0]["body_sha256"] for worker in path.workers]
            assert seen == [wanted, wanted]


class TestAnswersOfOurOwn:
    @BOTH
    @pytest.mark.parametrize("size", BODIES)
    async def test_a_dry_run_gets_its_json_and_reaches_no_worker(
        self, body_mode: BodyMode, size: str
    ) -> None:
        told = json.dumps({"workers": ["w" * 100] * 2_000}).encode()
        processor = StreamProcessor(body_mode, dry_answer=told)
        async with rig(body_mode=body_mode, processor=processor) as path:
            path.send_to(0)
            answer = await path.post(BODIES[size])
            assert answer.status_code == 200
            assert answer.content == told
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-kvgate-decision-id"] == "ours"
            assert answer.headers["content-length"] == str(len(told))
            assert path.workers[0].requests == []


SECRET = b"a secret of 32 bytes for testing"


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def token(**claims: Any) -> str:
    """A JWT by HS256."""
    head = encoded(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "k"}).encode())
    text = f"{head}.{encoded(json.dumps({'iss': 'test', **claims}).encode())}"
    return f"{text}.{encoded(hmac.digest(SECRET, text.encode(), 'sha256'))}"


def jwt_filter() -> dict[str, Any]:
    key = {"kty": "oct", "alg": "HS256", "kid": "k", "k": encoded(SECRET)}
    provider = {
        "issuer": "test",
        "local_jwks": {"inline_string": json.dumps({"keys": [key]})},
        "payload_in_metadata": "payload",
    }
    rule = {"match": {"prefix": "/"}, "requires": {"provider_name": "test"}}
    kind = "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication"
    config = {"@type": kind, "providers": {"test": provider}, "rules": [rule]}
    return {"name": "envoy.filters.http.jwt_authn", "typed_config": config}


def identities(**identity: Any) -> IdentityReader:
    data = {"pools": [{"model": "m"}], "tenant_classes": [{"name": "gold"}]}
    policy = parse_policy({**data, "identity": identity})
    return IdentityReader(
        policy.identity, policy.tenants, ("online", "batch"), policy.tenant_classes
    )


class TestIdentity:
    async def test_the_tenant_is_the_verified_tokens_whatever_headers_say(self) -> None:
        """SE1: from Envoy's own JWT filter, by the namespace that is forwarded by default."""
        name = "envoy.filters.http.jwt_authn"
        reader = identities(
            tenant=[
                {"metadata": {"namespace": name, "path": ["payload", "sub"]}},
                {"header": "x-kvgate-tenant"},
            ],
            tenant_class=[{"metadata": {"namespace": name, "path": ["payload", "plan"]}}],
        )
        processor = StreamProcessor(identities=reader)
        async with rig(processor=processor, filters=[jwt_filter()]) as path:
            path.send_to(0)
            forged = {"x-kvgate-tenant": "victim", "x-kvgate-lane": "batch"}
            assert (await path.post(headers=forged)).status_code == 401
            bearer = f"Bearer {token(sub='acme', plan='gold', email='a@b.c')}"
            answer = await path.post(headers={**forged, "authorization": bearer})
            assert answer.status_code == 200
        (event,) = processor.arrived
        assert reader.read(event.headers, event.metadata) == Identity("acme", "gold", "batch")
        assert "a@b.c" not in str(event.metadata)

    @pytest.mark.parametrize("http2", [False, True])
    async def test_a_client_sets_lane_and_times_and_nothing_else(self, http2: bool) -> None:
        """SE1: also in other case, and twice."""
        trusted = ("x-kvgate-tenant", "x-llm-d-inference-fairness-id",
                   "x-gateway-inference-fairness-id")  # fmt: skip
        objective = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
        reader = identities(
            tenant=[{"header": name} for name in trusted],
            tenant_class=[{"header": "x-kvgate-tenant-class"}],
            lane=[{"header": name} for name in ("x-kvgate-lane", *objective)],
            ttft_budget_ms=[{"header": "x-kvgate-ttft-budget-ms"},
                            {"header": "x-llm-d-slo-ttft-ms"}],
        )  # fmt: skip
        processor = StreamProcessor(identities=reader)
        async with rig(processor=processor, http2=http2) as path:
            path.send_to(0)
            forged = [
                *((name.title(), "victim") for name in trusted),
                *((name, "victim too") for name in trusted),
                *((name, "batch") for name in objective),
                ("X-Kvgate-Tenant-Class", "gold"),
                ("x-llm-d-slo-ttft-ms", "1"),
            ]
            times = [("x-kvgate-deadline-ms", "5000"), ("x-kvgate-max-queue-ms", "0")]
            for sent in (forged, [*forged, *times], [("x-kvgate-ttft-budget-ms", "250")]):
                await path.post(headers=sent)
        read = [reader.read(event.headers, event.metadata) for event in processor.arrived]
        late = Identity(deadline_s=5.0, max_queue_time_s=0.0)
        assert read == [Identity(), late, Identity(ttft_budget_s=0.25)]

    @pytest.mark.parametrize("http2", [False, True])
    async def test_two_copies_of_a_header_reach_the_reader_as_one_that_is_refused(
        self, http2: bool
    ) -> None:
        """SE1: a gateway that adds its header behind the client's."""
        reader = identities(tenant=[{"header": "x-tenant"}])
        processor = StreamProcessor(identities=reader)
        async with rig(processor=processor, http2=http2) as path:
            path.send_to(0)
            await path.post(headers=[("x-tenant", "victim"), ("X-Tenant", "acme")])
        (event,) = processor.arrived
        assert event.headers["x-tenant"] == "victim,acme"
