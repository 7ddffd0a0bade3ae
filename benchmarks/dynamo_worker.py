"""Plain OpenAI HTTP workers as workers of Dynamo's runtime.

Runs in the virtual environment of the peer ``ai-dynamo``, so it imports nothing of kvgate. Each
worker gets a runtime of its own, as Dynamo's mocker does it; the frontend sends token ids and takes
token ids, KV events go from the engine's socket to the router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import Context, DistributedRuntime

BLOCK_TOKENS = 16
_ENDPOINT = "dynamo.backend.generate"
_DATA = b"data: "
_STOPS = ("max_tokens", "min_tokens", "ignore_eos", "stop")

Json = dict[str, Any]


class Worker:
    """Sends the frontend's requests to one HTTP worker."""

    def __init__(self, session: aiohttp.ClientSession, model: str, url: str) -> None:
        self._session = session
        self._model = model
        self._url = f"{url}/v1/completions"

    async def generate(self, request: Json, context: Context) -> AsyncIterator[Json]:
        """The answer piece by piece; a client that left ends it."""
        async with self._session.post(self._url, json=self._body(request)) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if context.is_stopped():
                    return
                if line.startswith(_DATA + b"{"):
                    yield _piece(json.loads(line[len(_DATA) :]))

    def _body(self, request: Json) -> Json:
        stops = request.get("stop_conditions") or {}
        return {
            "model": self._model,
            "prompt": request["token_ids"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **{name: stops[name] for name in _STOPS if stops.get(name) is not None},
        }


def _piece(chunk: Json) -> Json:
    """A chunk of the worker's stream as Dynamo's engines give it; the last has the usage alone."""
    if "error" in chunk:
        raise RuntimeError(chunk["error"].get("message"))
    if not chunk["choices"]:
        return {"token_ids": [], "completion_usage": chunk["usage"]}
    [choice] = chunk["choices"]
    piece = {"token_ids": choice["token_ids"]}
    if choice["finish_reason"]:
        piece["finish_reason"] = choice["finish_reason"]
    return piece


async def serve(worker: Worker, kv_events: str, model: str, model_dir: Path) -> None:
    """Register a worker, tell of its KV events, serve until the runtime ends."""
    planes = os.environ["DYN_DISCOVERY_BACKEND"], os.environ["DYN_REQUEST_PLANE"]
    runtime = DistributedRuntime(asyncio.get_running_loop(), *planes)
    endpoint = runtime.endpoint(_ENDPOINT)
    events = KvEventPublisher(
        endpoint=endpoint,
        kv_block_size=BLOCK_TOKENS,
        zmq_endpoint=kv_events,
        zmq_topic="",
        enable_local_indexer=True,
    )
    config = ModelRuntimeConfig()
    config.enable_local_indexer = True
    config.kv_event_publishing_enabled = True
    serving = asyncio.ensure_future(endpoint.serve_endpoint(worker.generate))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        str(model_dir),
        model,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_TOKENS,
        runtime_config=config,
    )
    await serving
    del events


async def main() -> None:
    """Serve all workers of the command line."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _with_architecture(options.model_dir, Path(folder))
        await _serve_all(options.model, model_dir, options.engines)


async def _serve_all(model: str, model_dir: Path, engines: list[str]) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        pairs = (each.split("=") for each in engines)
        await asyncio.gather(
            *(serve(Worker(session, model, url), events, model, model_dir) for url, events in pairs)
        )


def _with_architecture(model_dir: Path, folder: Path) -> Path:
    """A copy of the model's folder whose config.json names an architecture, as Dynamo wants it."""
    copy = shutil.copytree(model_dir, folder / "model")
    path = copy / "config.json"
    config = {"architectures": ["LlamaForCausalLM"], **json.loads(path.read_text())}
    path.write_text(json.dumps(config))
    return copy


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("engines", nargs="+", metavar="URL=KV_EVENTS")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main())
