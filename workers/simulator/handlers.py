"""Generation over HTTP: body to prompts, prompts to the engine, tokens to the client.

However a request ends (answered, refused, client gone), ``finally`` takes what is left of it
out of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator

from aiohttp import web

from workers.simulator.answers import json_answer
from workers.simulator.chain import Origin, TokenChain, pack_ids
from workers.simulator.dialects import Dialect, Reply
from workers.simulator.errors import ApiError, unknown_model
from workers.simulator.faults import Faults
from workers.simulator.generation import Generation, Sequence
from workers.simulator.loop import EngineLoop
from workers.simulator.options import Json, Options, decode_body, read_options
from workers.simulator.prompt import Prompter
from workers.simulator.requests import EngineRequest
from workers.simulator.settings import SimulatorSettings
from workers.simulator.speaker import Speaker
from workers.simulator.telling import write

THREAD_BODY_BYTES = 32_768
"""Bodies from here on are tokenised in a thread, so that streams keep their pace."""

REQUEST_ID_HEADER = "X-Request-Id"
SESSION_ID_HEADER = "X-Session-ID"
_REQUEST_ID = web.RequestKey("request_id", str)


class GenerationHandler:
    """Runs requests of every dialect against one engine."""

    def __init__(
        self,
        settings: SimulatorSettings,
        prompter: Prompter,
        speaker: Speaker,
        loop: EngineLoop,
        faults: Faults,
    ) -> None:
        self.in_flight = 0
        self._settings = settings
        self._prompter = prompter
        self._speaker = speaker
        self._loop = loop
        self._faults = faults
        self._numbers = itertools.count()

    async def answer(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Answer one request.

        Raises:
            ApiError: it was refused, or failed before anything was sent.
        """
        with self._counted():
            body, size = await self._body(request)
            options = read_options(body)
            model = self.known_model(options.model)
            prompts = await self.tokenise(size, lambda: dialect.prompts(self._prompter, body))
            generation = self._generation(request, dialect, model, options, prompts)
            reply = _reply(request, model, options, prompts, generation)
            if options.stream and dialect.streams:
                return await self._stream(request, dialect, generation, reply)
            await self._finish(generation, reply)
            return json_answer(dialect.whole(reply))

    async def tokenise(
        self, body_bytes: int, prompts: Callable[[], list[list[int]]]
    ) -> list[list[int]]:
        """Run a tokenising function where it does not hold up the streams."""
        if body_bytes < THREAD_BODY_BYTES:
            return prompts()
        return await asyncio.to_thread(prompts)

    def known_model(self, model: str | None) -> str:
        """The model named, or the base model.

        Raises:
            ApiError: there is no such model.
        """
        if model is None or model == self._settings.model_name:
            return self._settings.model_name
        if model not in self._settings.adapters:
            raise unknown_model(model)
        return model

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _body(self, request: web.Request) -> tuple[Json, int]:
        self._faults.check()
        raw = await request.read()
        return decode_body(raw), len(raw)

    async def _finish(self, generation: Generation, reply: Reply) -> None:
        try:
            self._loop.submit(generation)
            async for pieces in generation.pieces():
                for piece in pieces:
                    reply.add(piece)
        finally:
            self._loop.cancel(generation)
        reply.usage = generation.usage

    async def _stream(
        self, request: web.Request, dialect: Dialect, generation: Generation, reply: Reply
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        try:
            self._loop.submit(generation)
            if not self._settings.hold_headers:
                await response.prepare(request)
            opened = False
            async for pieces in generation.pieces():
                chunk = b""
                if not opened:
                    opened = True
                    reply.usage = generation.usage
                    chunk = dialect.opening(reply)
                    if not response.prepared:
                        await response.prepare(request)
                for piece in pieces:
                    reply.add(piece)
                    chunk += dialect.piece(reply, piece)
                await write(request, response, chunk)
            reply.usage = generation.usage
            await write(request, response, dialect.closing(reply))
        except ApiError as error:
            if not response.prepared:
                raise
            await write(request, response, dialect.failure(error))
        finally:
            self._loop.cancel(generation)
        await response.write_eof()
        return response

    def _generation(
        self,
        request: web.Request,
        dialect: Dialect,
        model: str,
        options: Options,
        prompts: list[list[int]],
    ) -> Generation:
        adapter_id = self._settings.adapter_id(model)
        origin = Origin(
            adapter=None if adapter_id is None else model,
            adapter_id=adapter_id,
            cache_salt=options.cache_salt,
            session_id=request.headers.get(SESSION_ID_HEADER),
        )
        tokens = options.max_tokens if dialect.generates else 0
        sequences = [
            self._sequence(ids, tokens, choice, origin, dialect.opens)
            for ids in prompts
            for choice in range(options.choices)
        ]
        return Generation(sequences, options.choices, self._settings.stream_interval)

    def _sequence(
        self, ids: list[int], tokens: int, choice: int, origin: Origin, opens: bool
    ) -> Sequence:
        limit = self._settings.max_model_len
        if not ids:
            raise ApiError(400, "the prompt has no tokens", "prompt")
        if len(ids) >= limit:
            # vLLM checks a prompt that just fits without an answer elsewhere, by another name.
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your request "
                f"has {len(ids)} input tokens. Please reduce the length of the input messages.",
                "input_tokens" if len(ids) > limit else "max_tokens",
            )
        tokens = min(tokens, limit - len(ids))
        prompt = pack_ids(ids)
        answer = self._speaker.answer(prompt, tokens, choice, opens)
        chain = TokenChain(
            prompt + pack_ids(answer.token_ids),
            self._settings.block_size,
            origin,
            self._settings.seed,
        )
        request = EngineRequest(str(next(self._numbers)), chain, len(ids), tokens)
        return Sequence(request, answer)


def request_id(request: web.Request) -> str:
    """The client's request id, or one made up; the same whenever asked."""
    given = request.headers.get(REQUEST_ID_HEADER)
    made: str = request.setdefault(_REQUEST_ID, given or uuid.uuid4().hex)
    return made


def _reply(
    request: web.Request,
    model: str,
    options: Options,
    prompts: list[list[int]],
    generation: Generation,
) -> Reply:
    count = len(generation.sequences)
    return Reply(
        request_id=request_id(request),
        model=model,
        created=int(time.time()),
        options=options,
        usage=generation.usage,
        prompt_ids=prompts,
        answer_ids=[sequence.answer.token_ids for sequence in generation.sequences],
        texts=[""] * count,
        finish_reasons=[""] * count,
    )
