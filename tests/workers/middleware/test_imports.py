"""The engine's side runs on the standard library alone, and on Python 3.10."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENGINE_SIDE = (
    *("engine_errors", "request_events", "response_scan"),
    *("event_sender", "request_reporter", "middleware"),
)


@pytest.mark.parametrize("name", ENGINE_SIDE)
def test_only_the_standard_library_and_the_engine_side_are_imported(name: str) -> None:
    tree = ast.parse((ROOT / f"workers/{name}.py").read_text(), feature_version=(3, 10))
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    for module in imported:
        own = module.removeprefix("workers.") in ENGINE_SIDE
        assert own or module.partition(".")[0] in sys.stdlib_module_names, module


def test_the_middleware_loads_where_nothing_is_installed() -> None:
    program = "import workers.middleware, sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    foreign = set(done.stdout.split()) - sys.stdlib_module_names - {"workers", "__main__"}
    assert not {name for name in foreign if not name.startswith("_")}
