"""Two real vLLM servers behind Envoy, scheduler and agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system import System, running_system
from tests.support.vllm import VllmEngines, made_model, vllm_policy

FROZEN_AFTER_S = 5.0
"""Of the tiny model's engines; none of their steps takes nearly that long."""


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
        agent_flags=("--frozen-after-s", str(FROZEN_AFTER_S)),
    ) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def mid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two servers with the model whose prefill takes seconds."""
    model_dir = made_model("mid")
    with running_system(
        tmp_path_factory.mktemp("mid"),
        model_dir,
        workers=2,
        policy=vllm_policy(model_dir),
        engines=VllmEngines(size="mid", blocks=800),
    ) as running:
        yield running
