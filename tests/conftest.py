"""Fixtures that many folders share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from workers.simulator.model import make_model_dir

# A busy machine is no failure: no time limit for a single example.
settings.register_profile("kvgate", deadline=None)
settings.load_profile("kvgate")

VLLM_ONLY = Path(__file__).parent / "vllm"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        choices=("simulator", "vllm"),
        default="simulator",
        help="what tests/fidelity looks at; tests/vllm needs vllm (make test-vllm)",
    )
    parser.addoption("--record", action="store_true", help="write down what tests/fidelity sees")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of the real engine belong to make test-vllm alone."""
    needs_vllm = collection_path.is_relative_to(VLLM_ONLY)
    return True if needs_vllm and config.getoption("--engine") != "vllm" else None


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer directory, made once."""
    return make_model_dir(tmp_path_factory.mktemp("model") / "sim-8b")
