from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from workers.simulator.model import make_model_dir
from workers.simulator.server import Simulator
from workers.simulator.settings import SimulatorSettings

from .client import Client

Start = Callable[..., Awaitable[Client]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / "sim")


@pytest.fixture
async def start(model_dir: Path) -> AsyncIterator[Start]:
    """Start simulated workers on free ports; all are stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start_one(**changes: Any) -> Client:
            defaults: dict[str, Any] = {
                "block_size": 32, "num_blocks": 300, "max_model_len": 8192, "speedup": 20.0,
                "port": 0, "kv_events_port": 0, "kv_replay_port": 0, "shutdown_s": 0.0,
            }  # fmt: skip
            settings = SimulatorSettings(model_dir, "sim", **(defaults | changes))
            simulator = await stack.enter_async_context(Simulator(settings))
            return await stack.enter_async_context(Client(simulator))

        yield start_one
