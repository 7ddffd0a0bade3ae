"""One system for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system import System, running_system


@pytest.fixture(scope="package")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    with running_system(
        tmp_path_factory.mktemp("system"), model_dir, simulator_flags=("--speedup", "3")
    ) as running:
        yield running
        running.wait_idle()
