from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.engine import FakeEngine, running
from workers.agent.engine_probe import EngineProbe
from workers.agent.engine_state import Answer, Look
from workers.agent.gpu import GpuUse


class BusyGpu:
    def read(self) -> GpuUse:
        return GpuUse(0.5, 0.25)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    async with running(fake):
        yield fake


async def look_at(engine: FakeEngine, timeout_s: float = 5.0) -> tuple[Look, str]:
    async with EngineProbe(engine.url, gpu=BusyGpu()) as probe:
        return await probe.look(timeout_s), probe.engine


async def test_a_look_tells_models_health_metrics_and_gpu(engine: FakeEngine) -> None:
    engine.models = [{"id": "ad1", "parent": "tiny"}, {"id": "tiny"}]
    look, name = await look_at(engine)
    assert (look.answer, look.models, look.adapters) == (Answer.UP, ("tiny", "ad1"), ("ad1",))
    assert (look.healthy, look.gpu, name) == (True, GpuUse(0.5, 0.25), "vllm 0.32.0")
    assert look.metrics
    assert look.metrics.running == 2.0


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_of_the_health_page_is_no_health(engine: FakeEngine, status: int) -> None:
    engine.health = status
    assert not (await look_at(engine))[0].healthy


async def test_an_engine_without_a_health_page_is_judged_by_its_models(engine: FakeEngine) -> None:
    engine.health = 404
    assert (await look_at(engine))[0].healthy


@pytest.mark.parametrize("models", ["junk", [{"name": "tiny"}], []])
async def test_a_list_that_cannot_be_read_lists_nothing(engine: FakeEngine, models: object) -> None:
    engine.models = models
    assert (await look_at(engine))[0].models == ()


async def test_a_list_that_does_not_come_is_unknown(engine: FakeEngine) -> None:
    engine.silent = {"/v1/models"}
    look, name = await look_at(engine, timeout_s=0.2)
    assert (look.answer, look.models, name) == (Answer.UP, None, "")


async def test_a_version_that_cannot_be_read_is_left_out(engine: FakeEngine) -> None:
    engine.version = 7
    assert (await look_at(engine))[1] == "vllm"


async def test_an_engine_that_never_answers_is_silent_and_one_that_is_gone_refuses(
    engine: FakeEngine,
) -> None:
    engine.silent = {"/health", "/v1/models", "/metrics"}
    assert (await look_at(engine, timeout_s=0.2))[0].answer is Answer.SILENT
    await engine.stop()
    assert (await look_at(engine))[0].answer is Answer.REFUSED


async def test_the_version_is_asked_once_in_a_life(engine: FakeEngine) -> None:
    async with EngineProbe(engine.url) as probe:
        await probe.look(5.0)
        engine.version = "0.33.0"
        await probe.look(5.0)
        assert probe.engine == "vllm 0.32.0"
        await engine.stop()
        await probe.look(5.0)
        await engine.start()
        await probe.look(5.0)
        assert probe.engine == "vllm 0.33.0"
