"""The import rules of extproc, read from the syntax trees."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "extproc"
FORBIDDEN_IN_CORE = frozenset(
    [
        "grpc",
        "asyncio",
        "aiohttp",
        "socket",
        "time",
        "datetime",
        "logging",
        "prometheus_client",
        "zmq",
        "threading",
        "os",
    ]
)
LAYERS = (
    {"errors"},
    {"policy"},
    {"request", "tokens", "cache"},
    {"fleet"},
    {"admission", "routing"},
    {"decision"},
    {"scheduler"},
    {"replies", "stream", "telemetry", "cold_text"},
    {"desk"},
    {"call", "processor", "control", "api", "api_messages", "reload", "ports", "admin"},
    {"server", "event_loop"},
    {"reference", "console"},
    {"cli"},
)
"""Lowest first; a module imports from its own layer and from those below."""
OUTSIDE = {"envoy_config", "supervisor", "up", "generated"}
"""The launcher's modules: they know the errors and the policy, and the cli alone knows them."""
CORE = {"errors", "policy", "request", "tokens", "cache", "fleet", "admission", "routing",
        "decision", "scheduler", "stream", "replies"}  # fmt: skip


def _modules() -> dict[str, ast.Module]:
    files = (path for path in ROOT.rglob("*.py") if "generated" not in path.parts)
    return {_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = _modules()


def _imported(tree: ast.AST) -> set[str]:
    """Full names of what a tree imports, functions' own imports included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inside & MODULES.keys()) or {node.module}
    return names


def _part(module: str) -> str:
    """The package or module of extproc that a module belongs to."""
    return module.removeprefix("extproc").strip(".").partition(".")[0]


def _layer(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


CORE_MODULES = sorted(name for name in MODULES if _part(name) in CORE)


def test_every_module_has_a_layer() -> None:
    known = set().union(*LAYERS) | OUTSIDE | {""}
    assert {_part(name) for name in MODULES} <= known


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: _imported(tree) & MODULES.keys() for name, tree in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("extproc.errors") < order.index("extproc.scheduler")


@pytest.mark.parametrize("name", sorted(n for n in MODULES if _part(n) not in OUTSIDE | {""}))
def test_imports_point_one_way(name: str) -> None:
    own = _layer(_part(name))
    inside = {_part(other) for other in _imported(MODULES[name]) if other.startswith("extproc")}
    upward = {part for part in inside - OUTSIDE - {""} if _layer(part) > own}
    assert not upward


def test_the_launcher_is_known_to_the_cli_alone() -> None:
    users = {
        _part(name)
        for name, tree in MODULES.items()
        if {_part(other) for other in _imported(tree)} & (OUTSIDE - {"generated"})
    }
    assert users <= {"cli"} | OUTSIDE
    launcher = [tree for name, tree in MODULES.items() if _part(name) in OUTSIDE]
    used = {_part(o) for tree in launcher for o in _imported(tree) if o.startswith("extproc")}
    assert used <= {"errors", "policy"} | OUTSIDE


@pytest.mark.parametrize("name", CORE_MODULES)
def test_the_core_reads_no_clock_and_does_no_io(name: str) -> None:
    tops = {other.partition(".")[0] for other in _imported(MODULES[name])}
    assert not tops & FORBIDDEN_IN_CORE


@pytest.mark.parametrize("name", CORE_MODULES)
def test_the_core_uses_no_global_randomness(name: str) -> None:
    """``random.Random`` as a type is all that the core knows of the module."""
    tree = MODULES[name]
    uses = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
    }
    assert uses <= {"Random"}
    assert not any(
        isinstance(node, ast.ImportFrom) and node.module in ("random", "secrets", "numpy.random")
        for node in ast.walk(tree)
    )
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"random.Random", "hash", "id"} or name == "extproc.cache.digest"


def test_no_hash_of_python_leaves_the_process() -> None:
    """BL1: Python's own ``hash`` differs between processes; only ``__hash__`` may use it."""
    tree = MODULES["extproc.cache.digest"]
    holders = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hash"
    ]
    assert holders == ["__hash__"]
