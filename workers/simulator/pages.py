"""Everything that is not generation: models, tokenize, health, metrics, cache and faults."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from workers.simulator.answers import json_answer
from workers.simulator.errors import ApiError, malformed
from workers.simulator.faults import METRICS_FAULTS, Faults
from workers.simulator.handlers import GenerationHandler
from workers.simulator.kv_events import BUFFERED_BATCHES, HIGH_WATER_MARK, KvEventPublisher
from workers.simulator.loop import EngineLoop
from workers.simulator.metrics import CONTENT_TYPE, EngineMetrics
from workers.simulator.options import Json, decode_body, read_options
from workers.simulator.prompt import Prompter
from workers.simulator.settings import SimulatorSettings

VERSION = "0.32.0+simulator"


class Pages:
    """The small endpoints of one worker."""

    def __init__(
        self,
        settings: SimulatorSettings,
        handler: GenerationHandler,
        prompter: Prompter,
        loop: EngineLoop,
        metrics: EngineMetrics,
        faults: Faults,
        publisher: KvEventPublisher | None,
    ) -> None:
        self._settings = settings
        self._handler = handler
        self._prompter = prompter
        self._loop = loop
        self._metrics = metrics
        self._faults = faults
        self._publisher = publisher
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Routes to add to the application."""
        return [
            web.get("/health", self.health),
            web.get("/ping", self.health),
            web.post("/ping", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/load", self.load),
            web.get("/v1/models", self.models),
            web.get("/kv_event_sources", self.kv_event_sources),
            web.post("/tokenize", self.tokenize),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            web.post("/sim/freeze", self.freeze),
            web.post("/sim/fail", self.fail),
            web.post("/sim/metrics", self.spoil_metrics),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """200 whatever the engine does, as with a frozen vLLM."""
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        """The vLLM version looked like."""
        return json_answer({"version": VERSION})

    async def metrics(self, _request: web.Request) -> web.Response:
        """The Prometheus scrape."""
        page = await self._faults.spoiled(self._metrics.render())
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    async def load(self, _request: web.Request) -> web.Response:
        """Requests in this server, queued ones included."""
        return json_answer({"server_load": self._handler.in_flight})

    async def models(self, _request: web.Request) -> web.Response:
        """The base model and its adapters."""
        names = (self._settings.model_name, *self._settings.adapters)
        return json_answer({"object": "list", "data": [self._model(n) for n in names]})

    async def kv_event_sources(self, _request: web.Request) -> web.Response:
        """The events configuration of each data-parallel rank."""
        publisher = self._publisher
        config: Json = {
            "enable_kv_cache_events": publisher is not None,
            "publisher": "zmq" if publisher else "null",
            "endpoint": publisher.endpoint if publisher else None,
            "replay_endpoint": publisher.replay_endpoint if publisher else None,
            "buffer_steps": BUFFERED_BATCHES,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": self._settings.kv_events_topic,
        }
        return json_answer({"0": config})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Token ids of a prompt or of chat messages; longer than the model is fine."""
        raw = await request.read()
        body = decode_body(raw)
        self._handler.known_model(read_options(body).model)
        ids = (await self._handler.tokenise(len(raw), lambda: [self._ids(body)]))[0]
        words = [self._prompter.tokenizer.id_to_token(token) for token in ids]
        return json_answer(
            {
                "count": len(ids),
                "max_model_len": self._settings.max_model_len,
                "tokens": ids,
                "token_strs": words if body.get("return_token_strs") else None,
            }
        )

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        """Forget cached blocks, unless requests hold any."""
        return json_answer({"success": self._loop.engine.reset_prefix_cache()})

    async def freeze(self, request: web.Request) -> web.Response:
        """Stop the engine for some seconds while HTTP answers on."""
        seconds = _number(decode_body(await request.read()), "seconds")
        self._loop.freeze(seconds)
        return json_answer({"frozen_s": seconds})

    async def fail(self, request: web.Request) -> web.Response:
        """Fail the next requests with a status."""
        body = decode_body(await request.read())
        status, count = int(_number(body, "status")), int(_number(body, "count"))
        if not 400 <= status <= 599:
            raise ApiError(400, f"status must be 400 to 599, got {status}", "status")
        self._faults.fail_next(status, count)
        return json_answer({"status": status, "count": count})

    async def spoil_metrics(self, request: web.Request) -> web.Response:
        """Answer /metrics with a fault from now on; null ends it."""
        fault = decode_body(await request.read()).get("fault")
        if fault is not None and fault not in METRICS_FAULTS:
            raise ApiError(400, f"fault must be one of {', '.join(METRICS_FAULTS)}", "fault")
        self._faults.metrics = fault or ""
        return json_answer({"fault": fault})

    def _ids(self, body: Json) -> list[int]:
        if "messages" in body:
            return self._prompter.chat(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise malformed("prompt must be a string", "prompt")
        return self._prompter.text(prompt, special=body.get("add_special_tokens", True))

    def _model(self, name: str) -> dict[str, Any]:
        base = self._settings.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": str(self._settings.model_dir) if name == base else name,
            "parent": None if name == base else base,
            "max_model_len": self._settings.max_model_len if name == base else None,
            "permission": [_permission(name, self._created)],
        }


def _permission(name: str, created: int) -> Json:
    allowed = ("create_engine", "fine_tuning", "logprobs", "sampling", "search_indices", "view")
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        **{f"allow_{what}": what not in ("create_engine", "fine_tuning") for what in allowed},
        "organization": "*",
        "is_blocking": False,
    }


def _number(body: Json, field: str) -> float:
    value = body.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ApiError(400, f"{field} must be a number of at least 0", field)
    return value
