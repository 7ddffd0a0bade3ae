"""The middleware lets bytes pass as they are, and says truly what became of each request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.middleware import bodies
from tests.workers.middleware.asgi import (
    JSON,
    Listener,
    Step,
    Time,
    answering,
    body,
    bytes_of,
    drive,
    listening,
    plain,
    scope_of,
    start,
    streamed,
    until_disconnect,
)
from tests.workers.middleware.bodies import Answer
from workers.middleware import ENDPOINTS, KvgateMiddleware, Message, Receive, Scope, Send
from workers.request_events import Ended, EngineError, FirstChunk, Started
from workers.response_scan import Usage

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
BUSY = "The engine is currently busy and cannot accept new requests."


@pytest.fixture
def listener() -> Any:
    with listening() as one:
        yield one


def around(steps: list[Step], listener: Listener, **options: Any) -> KvgateMiddleware:
    return listener.middleware(answering(steps), **options)


def seen_by_server(steps: list[Step], **environ: str) -> tuple[list[int], list[Message]]:
    """Messages that had left after each step of the application, and all of them."""
    sent: list[Message] = []
    after: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for step in steps:
            assert not isinstance(step, BaseException)
            assert not callable(step)
            await send(step)
            after.append(len(sent))

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    asyncio.run(KvgateMiddleware(app, environ=environ)(scope_of(), receive, send))
    return after, sent


# Headers


def test_the_headers_of_a_stream_leave_with_its_first_data() -> None:
    after, sent = seen_by_server([start(), body(b"data: 1\n\n"), body(more=False)])
    assert after == [0, 2, 3]
    assert sent[0] == start()


def test_an_empty_chunk_does_not_push_the_headers_out() -> None:
    after, sent = seen_by_server([start(), body(), body(b"data: 1\n\n"), body(more=False)])
    assert after == [0, 0, 2, 3]
    assert bytes_of(sent) == b"data: 1\n\n"


def test_an_answer_whose_first_body_is_its_last_leaves_at_once() -> None:
    assert seen_by_server([start(204), body(more=False)])[0] == [0, 2]


def test_holding_can_be_switched_off() -> None:
    steps: list[Step] = [start(), body(b"data: 1\n\n"), body(more=False)]
    assert seen_by_server(steps, KVGATE_HOLD_HEADERS="0")[0] == [1, 2, 3]


def test_events_that_vllm_sends_before_prefill_are_held_with_the_headers() -> None:
    early = [
        body(f"event: response.{name}\ndata: {{}}\n\n".encode())
        for name in ("created", "in_progress")
    ]
    first = body(b"event: response.output_item.added\ndata: {}\n\n")
    after, sent = seen_by_server([start(), *early, first, body(more=False)])
    assert after == [0, 0, 0, 4, 5]
    assert sent == [start(), *early, first, body(more=False)]


def test_no_more_than_four_early_events_are_held() -> None:
    early = body(b"event: response.in_progress\ndata: {}\n\n")
    after, sent = seen_by_server([start(), *[early] * 7, body(more=False)])
    assert after == [0, 0, 0, 0, 0, 6, 7, 8, 9]
    assert len(sent) == 9


def test_a_keep_alive_comment_releases_the_headers() -> None:
    after, _ = seen_by_server([start(), body(b": keep-alive\n\n"), body(b"data: 1\n\n")])
    assert after == [0, 2, 3]


def test_a_start_without_any_body_is_left_to_the_server() -> None:
    after, sent = seen_by_server([start()])
    assert (after, sent) == ([0], [start()])


def test_messages_of_other_kinds_keep_their_order() -> None:
    other: Message = {"type": "http.response.pathsend", "path": "/x"}
    after, sent = seen_by_server([start(), other])
    assert after == [0, 2]
    assert sent == [start(), other]


def test_trailers_follow_the_body() -> None:
    trailers: Message = {"type": "http.response.trailers", "headers": []}
    _, sent = seen_by_server([start(trailers=True), body(b"x", more=False), trailers])
    assert [message["type"] for message in sent][-1] == "http.response.trailers"


# Requests that are none of ours


@pytest.mark.parametrize(
    "scope",
    [
        scope_of("/health"),
        scope_of("/v1/models"),
        scope_of("/v1/messages/count_tokens"),
        scope_of("/v1/responses/r1/cancel"),
        scope_of(method="GET"),
        scope_of(method="HEAD"),
        {"type": "websocket", "path": "/v1/realtime", "headers": []},
    ],
)
def test_other_requests_pass_untouched(scope: Scope) -> None:
    seen: list[object] = []

    async def app(*arguments: object) -> None:
        seen.extend(arguments)

    given_ = (scope, object(), object())
    asyncio.run(KvgateMiddleware(app, environ={})(*given_))  # type: ignore[arg-type]
    assert seen[0] is scope
    assert tuple(seen[1:]) == given_[1:]


async def test_the_life_of_the_server_begins_with_a_greeting(listener: Listener) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing to do."""

    await drive(listener.middleware(app), {"type": "lifespan"})
    assert [event.reset for event in listener.events()] == [True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_generating_endpoint_is_told(path: str, listener: Listener) -> None:
    await drive(around(plain(200, {}), listener), scope_of(path))
    begun, _ = listener.news()
    assert isinstance(begun, Started)
    assert begun.endpoint == ENDPOINTS[path]


async def test_a_root_path_is_no_part_of_the_endpoint(listener: Listener) -> None:
    scope = scope_of("/llm/v1/completions", root_path="/llm")
    await drive(around(plain(200, {}), listener), scope)
    assert listener.ended().status == 200


# What is told


async def test_a_stream_is_told_by_start_first_chunk_and_end(listener: Listener) -> None:
    clock = Time()
    usage = Usage(100, 2, 64)
    content = bodies.sse(bodies.chat_events(["a"], usage))
    steps = [start(), clock.step(1.5), body(content), clock.step(0.5), body(more=False)]
    await drive(around(steps, listener, clock=clock, wall_clock=lambda: 5.0))
    begun, first, end = listener.news()
    instance = begun.instance
    assert begun == Started(instance, 1, "lease-1", "chat", 5.0)
    assert first == FirstChunk(instance, 1, 1.5)
    assert end == Ended(
        *(instance, 1, "lease-1", 200, EngineError.NONE, 2.0, 1.5, 100, 2, 64, True)
    )


async def test_a_document_has_usage_and_no_time_to_first_token(listener: Listener) -> None:
    usage = Usage(100, 2, 64)
    await drive(around(plain(200, {"usage": bodies.openai_usage(usage)}), listener))
    end = listener.ended()
    assert (end.prompt_tokens, end.output_tokens, end.cached_tokens) == usage
    assert (end.ttft_s, end.streamed) == (None, False)


@pytest.mark.parametrize("early", [b": keep-alive\n\n", b"event: response.created\ndata: {}\n\n"])
@pytest.mark.parametrize("hold", ["0", "1"])
async def test_time_to_first_token_begins_at_no_early_event(
    early: bytes, hold: str, listener: Listener
) -> None:
    clock = Time()
    steps = [start(), body(early), clock.step(3.0), body(b"data: 1\n\n"), body(more=False)]
    await drive(around(steps, listener, hold=hold, clock=clock))
    assert listener.ended().ttft_s == 3.0


async def test_a_request_without_a_lease_is_told_too(listener: Listener) -> None:
    await drive(around(plain(200, {}), listener), scope_of(headers=[(b"host", b"x")]))
    assert listener.ended().lease is None


async def test_without_a_socket_everything_else_works() -> None:
    app = KvgateMiddleware(answering(plain(503, {"error": {"message": BUSY}})), environ={})
    sent = await drive(app)
    assert (b"x-kvgate-engine-error", b"queue_full") in sent[0]["headers"]


async def test_text_that_is_no_json_is_not_scanned(listener: Listener) -> None:
    told = b'"usage":{"prompt_tokens":1}'
    steps: list[Step] = [start(200, b"text/plain"), body(told, more=False)]
    assert bytes_of(await drive(around(steps, listener))) == told
    assert listener.ended().prompt_tokens is None


@pytest.mark.parametrize("status", [200, 500])
async def test_bytes_like_bodies_pass(status: int, listener: Listener) -> None:
    steps: list[Step] = [start(status, JSON), {**body(more=False), "body": memoryview(b"x")}]
    assert (await drive(around(steps, listener)))[1]["body"] == b"x"


# Errors


async def test_an_error_answer_carries_its_class(listener: Listener) -> None:
    sent = await drive(around(plain(503, {"error": {"message": BUSY}}), listener))
    first = start(503, JSON)
    marked = [*first["headers"], (b"x-kvgate-engine-error", b"queue_full")]
    assert sent[0] == {**first, "headers": marked}
    assert listener.ended().error is EngineError.QUEUE_FULL


@pytest.mark.parametrize("hold", ["0", "1"])
async def test_error_answers_are_marked_even_without_holding(hold: str) -> None:
    steps = plain(404, {"error": {"message": "x"}})
    sent = await drive(KvgateMiddleware(answering(steps), environ={"KVGATE_HOLD_HEADERS": hold}))
    assert sent[0]["headers"][-1] == (b"x-kvgate-engine-error", b"client")


async def test_an_error_without_a_body_is_marked_by_its_status() -> None:
    app = KvgateMiddleware(answering([start(500), body(more=False)]), environ={})
    assert (await drive(app))[0]["headers"][-1] == (b"x-kvgate-engine-error", b"other")


ERROR = {"error": {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}}
ERROR_EVENT = b"data: " + json.dumps(ERROR).encode() + b"\n\n"


async def test_a_stream_that_begins_with_an_error_gets_its_true_status(listener: Listener) -> None:
    sent = await drive(around(streamed([ERROR_EVENT, b"data: [DONE]\n\n"]), listener))
    assert sent[0]["status"] == 500
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"] == JSON
    assert headers[b"x-kvgate-engine-error"] == b"engine_dead"
    assert headers[b"x-request-id"] == b"r1"
    assert int(headers[b"content-length"]) == len(bytes_of(sent))
    assert json.loads(bytes_of(sent)) == ERROR
    assert [message.get("more_body") for message in sent[1:]] == [True, False]
    end = listener.ended()
    assert (end.status, end.error, end.ttft_s) == (500, EngineError.ENGINE_DEAD, None)


async def test_an_error_after_early_events_takes_their_place() -> None:
    early = b"event: response.created\ndata: {}\n\n"
    failed = b"event: error\n" + ERROR_EVENT
    sent = await drive(KvgateMiddleware(answering(streamed([early, failed])), environ={}))
    assert sent[0]["status"] == 500
    assert json.loads(bytes_of(sent)) == ERROR


async def test_the_code_of_the_error_event_becomes_the_status() -> None:
    event = b'data: {"error": {"message": "%s", "code": 503}}\n\n' % BUSY.encode()
    sent = await drive(KvgateMiddleware(answering(streamed([event])), environ={}))
    assert sent[0]["status"] == 503
    assert sent[0]["headers"][-1] == (b"x-kvgate-engine-error", b"queue_full")


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error": {"message": "' + b"x" * 5_000 + b'"}}\n\n',
        b'data: {"error": {"mess',
    ],
)
async def test_an_error_event_that_is_too_long_or_cut_passes_as_it_is(event: bytes) -> None:
    sent = await drive(KvgateMiddleware(answering(streamed([event])), environ={}))
    assert sent[0]["status"] == 200
    assert bytes_of(sent) == event


async def test_without_holding_an_error_event_passes_under_200(listener: Listener) -> None:
    content = [ERROR_EVENT, b"data: [DONE]\n\n"]
    sent = await drive(around(streamed(content), listener, hold="off"))
    assert sent[0]["status"] == 200
    assert bytes_of(sent) == b"".join(content)
    end = listener.ended()
    assert (end.status, end.error, end.ttft_s) == (200, EngineError.ENGINE_DEAD, None)


async def test_an_error_after_the_first_token_is_told_and_passes(listener: Listener) -> None:
    content = [b'data: {"choices":[]}\n\n', b'data: {"error": {"message": "x"}}\n\n']
    sent = await drive(around(streamed(content), listener))
    assert bytes_of(sent) == b"".join(content)
    end = listener.ended()
    assert (end.status, end.error) == (200, EngineError.STREAM_ERROR)
    assert end.ttft_s is not None


async def raising(app: KvgateMiddleware, *, broken: bool = False) -> list[Message]:
    """Run a request whose application raises; what the server is asked to send before it sees."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if broken:
            raise OSError("gone")
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    with pytest.raises((RuntimeError, ValueError)):
        await app(scope_of(), receive, send)
    return sent


SHUT = "cannot schedule new futures after shutdown"


@pytest.mark.parametrize("before", [[], [start()], [start(), body()]])
async def test_an_unknown_exception_before_the_first_chunk_is_the_servers_to_answer(
    before: list[Step], listener: Listener
) -> None:
    assert await raising(around([*before, ValueError("x")], listener)) == []
    end = listener.ended()
    assert (end.status, end.error) == (500, EngineError.OTHER)


@pytest.mark.parametrize("before", [[], [start()]])
async def test_an_exception_of_a_known_class_is_answered_with_it(
    before: list[Step], listener: Listener
) -> None:
    first, last = await raising(around([*before, RuntimeError(SHUT)], listener))
    assert first["status"] == 500
    assert (b"x-kvgate-engine-error", b"shutting_down") in first["headers"]
    assert json.loads(last["body"])["error"]["code"] == 500
    assert last["more_body"] is False
    end = listener.ended()
    assert (end.status, end.error) == (500, EngineError.SHUTTING_DOWN)


async def test_an_exception_goes_on_if_its_answer_cannot_be_sent(listener: Listener) -> None:
    assert await raising(around([RuntimeError(SHUT)], listener), broken=True) == []
    assert listener.ended().error is EngineError.SHUTTING_DOWN


async def test_an_exception_after_the_first_chunk_is_not_answered(listener: Listener) -> None:
    begun = [start(), body(b"data: 1\n\n")]
    assert await raising(around([*begun, RuntimeError(SHUT)], listener)) == begun
    end = listener.ended()
    assert (end.status, end.error) == (200, EngineError.SHUTTING_DOWN)


async def test_an_exception_in_the_middle_of_a_stream_is_told(listener: Listener) -> None:
    app = around([start(), body(b"data: 1\n\n"), ValueError("x")], listener)
    with pytest.raises(ValueError, match="x"):
        await drive(app)
    end = listener.ended()
    assert (end.status, end.error) == (200, EngineError.OTHER)


# Clients that leave


async def test_a_client_that_leaves_a_stream_is_told(listener: Listener) -> None:
    await drive(around([start(), body(b"data: 1\n\n"), until_disconnect], listener))
    end = listener.ended()
    assert (end.status, end.error) == (200, EngineError.CLIENT_GONE)


async def test_a_client_that_leaves_before_the_first_token_got_no_status(
    listener: Listener,
) -> None:
    steps: list[Step] = [start(), until_disconnect, *plain(200, None)[1:]]
    await drive(around(steps, listener))
    end = listener.ended()
    assert (end.status, end.error) == (0, EngineError.CLIENT_GONE)


async def test_a_client_that_leaves_after_the_answer_is_none_that_left(listener: Listener) -> None:
    await drive(around([*plain(200, {}), until_disconnect], listener))
    assert listener.ended().error is EngineError.NONE


@pytest.mark.parametrize("before", [[], [start()], [start(), body(b"data: 1\n\n")]])
async def test_a_cancelled_request_ends_once(before: list[Step], listener: Listener) -> None:
    async def forever(receive: Receive) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(drive(around([*before, forever], listener)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end = listener.ended()
    assert (end.status, end.error) == (200 if len(before) == 2 else 0, EngineError.CLIENT_GONE)


async def test_a_send_that_fails_still_ends_the_request(listener: Listener) -> None:
    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await around(plain(200, {}), listener)(scope_of(), receive, send)
    assert listener.ended().error is EngineError.OTHER


# What must hold for any answer


@given(bodies.answers, st.booleans(), st.data())
def test_any_answer_passes_byte_for_byte_and_ends_once(
    answer: Answer, hold: bool, data: st.DataObject
) -> None:
    chunks = data.draw(bodies.cuts(answer.content))
    first = start(200, b"text/event-stream" if answer.sse else JSON)
    steps = [first, *(body(chunk) for chunk in chunks), body(more=False)]
    with listening() as listener:
        sent = asyncio.run(drive(around(steps, listener, hold=str(int(hold)))))
        end = listener.ended()
    assert sent == steps
    assert (end.prompt_tokens, end.output_tokens, end.cached_tokens) == answer.usage
    assert end.error is EngineError.NONE


steps_of_any_kind = st.lists(
    st.sampled_from(
        [
            *(start(), start(500, JSON), start(200, JSON)),
            *(body(), body(b"data: 1\n\n"), body(ERROR_EVENT), body(b": c\n\n"), body(more=False)),
            *(body(b"event: response.created\ndata: {}\n\n"), body(b"x", more=False)),
            *(ValueError("x"), asyncio.CancelledError(), until_disconnect),
            {"type": "http.response.trailers"},
        ]
    ),
    max_size=8,
)


@given(steps_of_any_kind, st.booleans())
def test_whatever_an_application_does_each_start_has_one_end(steps: list[Step], hold: bool) -> None:
    async def run() -> None:
        app = around(steps, listener, hold=str(int(hold)))
        for _ in range(2):
            try:
                await drive(app)
            except (ValueError, asyncio.CancelledError):
                continue

    with listening() as listener:
        asyncio.run(run())
        news = listener.news()
    kinds = [(type(event), event.number) for event in news]  # type: ignore[union-attr]
    for number in (1, 2):
        own = [kind for kind, which in kinds if which == number and kind is not FirstChunk]
        assert own == [Started, Ended]


def test_nothing_of_a_prompt_or_an_answer_is_told() -> None:
    """SE3: a canary in every place that the middleware sees."""
    canary = b"SECRET-CANARY-123"
    scope = scope_of(headers=[(b"authorization", canary), (b"x-kvgate-lease", b"l")])
    answers_ = [
        streamed([b'data: {"choices":[{"text":"' + canary + b'"}]}\n\n']),
        plain(400, {"error": {"message": canary.decode(), "type": canary.decode()}}),
        streamed([b'data: {"error":{"message":"' + canary + b'"}}\n\n']),
    ]
    for steps in answers_:
        with listening() as listener:
            asyncio.run(drive(around(steps, listener), scope))
            assert all(canary not in datagram for datagram in listener.datagrams())
