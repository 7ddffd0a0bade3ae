"""Fixtures that many folders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.simulator.model import make_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer directory, made once."""
    return make_model_dir(tmp_path_factory.mktemp("model") / "sim-8b")
