from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import InvalidJson, InvalidRequest, MissingModel, Refusal
from extproc.policy import RequestPolicy
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.reader import read_request

POLICY = RequestPolicy()
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}]}


def read(
    body: bytes | None = b"",
    path: str = "/v1/chat/completions",
    method: str = "POST",
    policy: RequestPolicy = POLICY,
    **headers: str,
) -> RequestProfile:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return read_request({":path": path, ":method": method, **named}, body, policy)


def dump(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


class TestPaths:
    @pytest.mark.parametrize(
        ("path", "endpoint"),
        [
            ("/v1/chat/completions", Endpoint.CHAT),
            ("/v1/completions", Endpoint.COMPLETIONS),
            ("/v1/embeddings", Endpoint.EMBEDDINGS),
            ("/v1/responses", Endpoint.RESPONSES),
            ("/v1/messages", Endpoint.MESSAGES),
            ("/v1/chat/completions?beta=1", Endpoint.CHAT),
        ],
    )
    def test_a_known_path_is_read(self, path: str, endpoint: Endpoint) -> None:
        profile = read(dump(), path)
        assert (profile.endpoint, profile.model, profile.counted) == (endpoint, "sim", True)

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions/", "/V1/embeddings"])
    def test_another_path_passes_with_the_model_that_it_names(self, path: str) -> None:
        body = dump()
        wanted = RequestProfile(Endpoint.PASS, model="sim", body_bytes=len(body), editable=True)
        assert read(body, path) == wanted

    @pytest.mark.parametrize("body", [b"{", b"[]", b"5", b"{}", b'{"model": 5}', b"\xff"])
    def test_another_path_without_a_model_passes(self, body: bytes) -> None:
        profile = read(body, "/tokenize")
        assert (profile.endpoint, profile.model) == (Endpoint.PASS, None)

    @pytest.mark.parametrize(
        ("path", "method"),
        [("/v1/models", "GET"), ("/health", "POST"), ("/v1/chat/completions", "OPTIONS")],
    )
    def test_without_a_body_it_takes_no_part_in_admission(self, path: str, method: str) -> None:
        assert read(b"", path, method) == RequestProfile(Endpoint.PASS, counted=False)

    def test_missing_pseudo_headers_pass(self) -> None:
        assert read_request({}, b"", POLICY) == RequestProfile(Endpoint.PASS, counted=False)


class TestBodies:
    def test_a_generating_request_must_name_a_model(self) -> None:
        for body in (b"{}", b'{"model": ""}', b'{"model": null}'):
            with pytest.raises(MissingModel) as caught:
                read(body)
            assert caught.value.param == "model"

    def test_a_generating_request_must_have_a_body(self) -> None:
        with pytest.raises(InvalidJson):
            read(b"")

    def test_wrong_json_is_the_callers_to_mend(self) -> None:
        with pytest.raises(InvalidJson):
            read(b"{")
        with pytest.raises(InvalidRequest):
            read(dump(messages=5))

    def test_a_body_that_envoy_does_not_show_is_routed_by_load(self) -> None:
        """PR1: in NONE and STREAMED modes the decision comes before the body."""
        assert read(None) == RequestProfile(Endpoint.PASS)
        assert read(None, "/v1/models").counted

    def test_a_body_of_another_kind_passes_by_load(self) -> None:
        """BP3: a multipart upload with the model behind a 3 MB file part."""
        part = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + bytes(3_000_000)
        body = part + b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim\r\n--x--'
        profile = read(
            body, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x"
        )
        assert profile == RequestProfile(Endpoint.PASS, body_bytes=len(body))

    def test_gzip_is_read(self) -> None:
        """BP3: the same profile as the plain body's."""
        assert read(gzip.compress(dump()), content_encoding="gzip").prompts == read(dump()).prompts

    def test_an_unknown_encoding_passes_by_load(self) -> None:
        """BP3: zstd from coding agents."""
        assert read(b"\x28\xb5\x2f\xfd", content_encoding="zstd").endpoint is Endpoint.PASS

    def test_a_bomb_passes_by_load(self) -> None:
        """BP3: 10 KB that expand to 10 MB against a cap of 1 MB."""
        bomb = gzip.compress(bytes(10_000_000))
        policy = RequestPolicy(max_decoded_bytes=1_000_000)
        profile = read(bomb, policy=policy, content_encoding="gzip")
        assert profile == RequestProfile(Endpoint.PASS, body_bytes=len(bomb))

    def test_a_byte_order_mark_is_no_harm(self) -> None:
        """BP3."""
        assert read(b"\xef\xbb\xbf" + dump()).prompts == read(dump()).prompts


@given(
    body=st.binary(max_size=60) | st.builds(dump, messages=st.lists(st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls"]),
        st.none() | st.text() | st.integers() | st.lists(st.text() | st.dictionaries(
            st.sampled_from(["type", "text", "function"]), st.none() | st.text()
        )),
    ))),
    path=st.sampled_from(["/v1/chat/completions", "/v1/messages", "/v1/responses", "/x"]),
    content_type=st.sampled_from(["", "application/json", "multipart/form-data"]),
    encoding=st.sampled_from(["", "gzip", "zstd"]),
)  # fmt: skip
def test_any_request_gives_a_profile_or_a_refusal(
    body: bytes, path: str, content_type: str, encoding: str
) -> None:
    """BP3: never a 500."""
    headers = {"content_type": content_type, "content_encoding": encoding}
    outcome: RequestProfile | Refusal
    try:
        outcome = read(body, path, **headers)
    except Refusal as refusal:
        outcome = refusal
    if isinstance(outcome, Refusal):
        assert outcome.http_status == 400
    else:
        assert outcome.endpoint is Endpoint.PASS or outcome.model == "sim"
