from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.errors import InvalidJson, InvalidRequest
from extproc.policy import RequestPolicy
from extproc.request.limits import OUTPUT_CAPS, engine_members, output_caps
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.reader import read_request
from extproc.request.splice import edit_top_level

PATHS = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.RESPONSES: "/v1/responses",
    Endpoint.MESSAGES: "/v1/messages",
}


def read(endpoint: Endpoint, body: bytes) -> RequestProfile:
    return read_request({":path": PATHS[endpoint]}, body, RequestPolicy())


def shorten_output(body: bytes, endpoint: Endpoint, tokens: int) -> bytes:
    return edit_top_level(body, output_caps(body, endpoint, tokens))


def replace_model(body: bytes, name: str) -> bytes:
    return edit_top_level(body, engine_members(name, None, None))


def shortened(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", **fields}).encode()
    edited: dict[str, Any] = json.loads(shorten_output(body, endpoint, 50))
    return edited


class TestShortening:
    @pytest.mark.parametrize("endpoint", PATHS)
    @pytest.mark.parametrize("given", [None, 4_000])
    def test_the_engine_reads_the_new_cap(self, endpoint: Endpoint, given: int | None) -> None:
        fields = {} if given is None else dict.fromkeys(OUTPUT_CAPS[endpoint], given)
        body = json.dumps({"model": "m", "input": "a", **fields}).encode()
        assert read(endpoint, shorten_output(body, endpoint, 50)).max_output_tokens == 50

    def test_a_chat_has_two_caps_and_neither_keeps_the_clients_number(self) -> None:
        """vLLM reads the newer one first; others know only the older."""
        wanted = {"model": "m", "max_tokens": 50, "max_completion_tokens": 50}
        assert shortened(Endpoint.CHAT) == wanted
        assert shortened(Endpoint.CHAT, max_tokens=900) == wanted
        assert shortened(Endpoint.CHAT, max_completion_tokens=900, max_tokens=None) == wanted

    @pytest.mark.parametrize(
        ("given", "left"), [(10, 10), (50, 50), (51, 50), (1e9, 50), (None, None), ("x", "x")]
    )
    def test_the_least_length_comes_down_with_the_cap(self, given: Any, left: Any) -> None:
        """An engine refuses a least length above the cap."""
        edited = shortened(Endpoint.COMPLETIONS, min_tokens=given)
        assert edited == {"model": "m", "max_tokens": 50, "min_tokens": left}

    def test_a_least_length_in_the_prompt_is_none(self) -> None:
        edited = shortened(Endpoint.COMPLETIONS, prompt='"min_tokens": 99')
        assert edited == {"model": "m", "max_tokens": 50, "prompt": '"min_tokens": 99'}

    @pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.PASS])
    def test_what_generates_nothing_is_left_alone(self, endpoint: Endpoint) -> None:
        assert output_caps(b"\x1f\x8b", endpoint, 50) == {}

    @pytest.mark.parametrize(
        ("body", "refusal"), [(b"\x1f\x8b", InvalidJson), (b"[]", InvalidRequest)]
    )
    def test_what_cannot_be_edited_is_refused(self, body: bytes, refusal: type[Exception]) -> None:
        with pytest.raises(refusal):
            shorten_output(body, Endpoint.CHAT, 50)

    def test_every_endpoint_that_generates_has_a_cap(self) -> None:
        assert OUTPUT_CAPS.keys() == set(Endpoint) - {Endpoint.EMBEDDINGS, Endpoint.PASS}


class TestAnotherModel:
    def test_the_name_is_replaced_and_nothing_else(self) -> None:
        body = b'{"messages": [{"model": "big"}], "model" : "big", "temperature": 1.0}'
        wanted = b'{"messages": [{"model": "big"}], "model" : "a\\"b", "temperature": 1.0}'
        assert replace_model(body, 'a"b') == wanted

    def test_a_body_without_one_gets_it(self) -> None:
        assert replace_model(b'{"input": "a"}', "m") == b'{"model":"m","input": "a"}'
