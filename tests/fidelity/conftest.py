"""One engine for the whole suite, and what the suite holds it to.

``expected.json`` is what the real vLLM does; ``differences.json`` what the simulator does
instead, by name and with the reason, as docs/simulator.md lists them. ``--record`` writes
down what an engine does: all of it for vllm, known differences only for the simulator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fidelity.subject import Subject, running_subject

FOLDER = Path(__file__).parent
EXPECTED, DIFFERENCES = FOLDER / "expected.json", FOLDER / "differences.json"


class Book:
    """Facts by name, compared with what is written down or written down anew."""

    def __init__(self, kind: str, *, record: bool) -> None:
        self._simulated = kind == "simulator"
        self._record = record
        self._expected: dict[str, Any] = json.loads(EXPECTED.read_text())
        self._differences: dict[str, Any] = json.loads(DIFFERENCES.read_text())

    def compare(self, name: str, facts: Any) -> None:
        """Facts are JSON; those of a known difference are the simulator's own.

        Raises:
            AssertionError: they are not what is written down.
        """
        facts = json.loads(json.dumps(facts))
        if self._simulated and name in self._differences:
            if self._record:
                self._differences[name]["simulator"] = facts
            assert facts == self._differences[name]["simulator"]
            assert facts != self._expected[name], f"{name} is no difference: take it off the list"
            return
        if self._record and not self._simulated:
            self._expected[name] = facts
        assert facts == self._expected.get(name), name

    def close(self) -> None:
        if self._record:
            for path, facts in ((EXPECTED, self._expected), (DIFFERENCES, self._differences)):
                path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    kind = request.config.getoption("--engine")
    with running_subject(kind, tmp_path_factory.mktemp("fidelity")) as running:
        yield running


@pytest.fixture(scope="session")
def book(request: pytest.FixtureRequest) -> Iterator[Book]:
    options = request.config.option
    opened = Book(options.engine, record=options.record)
    yield opened
    opened.close()
