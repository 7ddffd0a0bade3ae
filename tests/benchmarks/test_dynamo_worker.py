"""What the adapter of Dynamo says to a worker and tells of its answer, without Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import pytest

from benchmarks.cluster import MODEL, Cluster, Engine, engines

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Engine]:
    settings = Cluster(workers=1, stream_interval=8)
    with engines(settings, model_dir, tmp_path_factory.mktemp("engine")) as [one]:
        yield one


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("dynamo", "dynamo.llm", "dynamo.runtime"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield import_module("benchmarks.dynamo_worker")
    sys.modules.pop("benchmarks.dynamo_worker", None)


async def _pieces(
    adapter: Any, engine: Engine, request: dict[str, Any], stopped: bool = False
) -> list[dict[str, Any]]:
    context = SimpleNamespace(is_stopped=lambda: stopped)
    async with aiohttp.ClientSession() as session:
        worker = adapter.Worker(session, MODEL, engine.url)
        return [piece async for piece in worker.generate(request, context)]


REQUEST = {
    "token_ids": list(range(5, 45)),
    "stop_conditions": {"max_tokens": 20, "ignore_eos": True, "stop": None},
}


async def test_tokens_go_in_and_tokens_and_usage_come_out(adapter: Any, engine: Engine) -> None:
    await _pieces(adapter, engine, REQUEST)
    *pieces, last = await _pieces(adapter, engine, REQUEST)
    assert sum(len(piece["token_ids"]) for piece in pieces) == 20
    assert [piece.get("finish_reason") for piece in pieces][-1] == "length"
    assert last["token_ids"] == []
    assert last["completion_usage"]["prompt_tokens"] == 40
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_a_refusal_of_the_worker_is_an_error(adapter: Any, engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="400"):
        await _pieces(adapter, engine, {"token_ids": []})


async def test_a_client_that_left_ends_the_answer(adapter: Any, engine: Engine) -> None:
    assert await _pieces(adapter, engine, REQUEST, stopped=True) == []


def test_an_architecture_is_named_where_the_model_has_none(
    adapter: Any, tmp_path: Path, model_dir: Path
) -> None:
    copy = adapter._with_architecture(model_dir, tmp_path)
    assert '"architectures": ["LlamaForCausalLM"]' in (copy / "config.json").read_text()
    assert (copy / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
