"""Fixtures that many folders share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from workers.simulator.model import make_model_dir

# A busy machine is no failure: no time limit for a single example.
settings.register_profile("kvgate", deadline=None)
settings.load_profile("kvgate")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer directory, made once."""
    return make_model_dir(tmp_path_factory.mktemp("model") / "sim-8b")
