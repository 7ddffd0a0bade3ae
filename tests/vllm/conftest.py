"""Two real vLLM servers behind Envoy, scheduler and agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system import System, running_system
from tests.support.vllm import VllmEngines, made_model, vllm_policy


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return made_model("tiny")


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[System]:
    """Two servers with the tiny model, for tests that leave them as they found them."""
    with running_system(
        tmp_path_factory.mktemp("rig"),
        tiny_model,
        workers=2,
        policy=vllm_policy(tiny_model),
        engines=VllmEngines(),
    ) as running:
        yield running
        running.wait_idle()
