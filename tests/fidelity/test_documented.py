"""docs/simulator.md lists every difference that the suite allows, and no other."""

from __future__ import annotations

import json
import re

from tests.fidelity.conftest import DIFFERENCES, EXPECTED, FOLDER

DOCUMENT = FOLDER.parents[1] / "docs" / "simulator.md"


def test_the_differences_are_those_of_the_document() -> None:
    differences = json.loads(DIFFERENCES.read_text())
    rows = dict(re.findall(r"^\| `(.+?)` \| ([^|]+) \|$", DOCUMENT.read_text(), re.MULTILINE))
    assert rows == {name: facts["why"] for name, facts in differences.items()}


def test_every_difference_is_one_of_something_the_real_engine_does() -> None:
    assert set(json.loads(DIFFERENCES.read_text())) <= set(json.loads(EXPECTED.read_text()))
