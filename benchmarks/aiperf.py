"""NVIDIA's aiperf with a plan of ours: its input file, its command line, what it tells.

Its trace format takes whole request bodies with the time of each, so it sends the same bytes at
the same times as our own generator. It has a virtual environment of its own, as the peers have.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.load.client import Wire, chat
from benchmarks.peers import Package
from benchmarks.report_page.fields import number
from benchmarks.rig import RigFailure, running
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.prompts import PromptMaker

AIPERF = Package("aiperf", "aiperf==0.13.0")
EXPORT = "profile_export_aiperf.json"

_FIELDS = {
    "requests": "completed_request_count.avg",
    "served": "request_count.avg",
    "prompt_tokens": "total_usage_prompt_tokens.avg",
    "output_tokens": "total_usage_completion_tokens.avg",
    "hit_percent": "overall_usage_prompt_cache_read_pct.avg",
    "ttft_p50_ms": "time_to_first_token.p50",
    "ttft_p90_ms": "time_to_first_token.p90",
    "ttft_p99_ms": "time_to_first_token.p99",
    "tpot_p50_ms": "inter_token_latency.p50",
    "tpot_p99_ms": "inter_token_latency.p99",
    "e2e_p50_ms": "request_latency.p50",
    "e2e_p99_ms": "request_latency.p99",
    "output_tokens_per_s": "output_token_throughput.avg",
    "late_p99_ms": "replay_sched_lag_p99.avg",
}
"""Our names, and where aiperf writes the same."""
_BEYOND_PLAN_S = 300.0
"""It starts ten processes first, and waits for the last answers."""


class _Line(msgspec.Struct, frozen=True):
    """One request of a ``mooncake_trace`` file: when, in milliseconds, and the whole body."""

    timestamp: float
    payload: msgspec.Raw


def write_input(path: Path, wire: Wire, maker: PromptMaker, plan: Sequence[Planned]) -> None:
    """A plan as aiperf reads it. Headers are not part of it: sessions and tenants are lost."""
    lines = [_Line(1_000 * each.at_s, msgspec.Raw(chat(wire, maker, each))) for each in plan]
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))


def command(
    bin_dir: Path, wire: Wire, model_dir: Path, plan: Path, output: Path
) -> tuple[str, ...]:
    """Its command line; tokens are counted by the server's usage, as we count them."""
    flags = {
        "--url": wire.url,
        "--model": wire.model,
        "--endpoint-type": "chat",
        "--tokenizer": model_dir.resolve(),
        "--custom-dataset-type": "mooncake_trace",
        "--input-file": plan,
        "--output-artifact-dir": output,
        "--ui": "none",
    }
    switches = ("--streaming", "--fixed-schedule", "--use-server-token-count")
    quiet = ("--no-gpu-telemetry", "--no-server-metrics")
    values = (str(word) for flag in flags.items() for word in flag)
    return (str(bin_dir / "aiperf"), "profile", *values, *switches, *quiet)


def replay(words: Sequence[str], output: Path, span_s: float) -> dict[str, float]:
    """Run it to its end; its figures.

    Args:
        words: its command line, see ``command``.
        output: the folder that it was told to write to.
        span_s: when the plan's last request is due.

    Raises:
        RigFailure: it failed, took too long, or does not tell what it should.
    """
    with running("aiperf", words, output) as process:
        try:
            status = process.process.wait(span_s + _BEYOND_PLAN_S)
        except subprocess.TimeoutExpired:
            raise process.failure("came to no end") from None
        if status:
            raise process.failure(f"ended with status {status}")
    return read_export(output / EXPORT)


def read_export(path: Path) -> dict[str, float]:
    """Figures by our names, in our units, as aiperf itself computed them.

    Raises:
        RigFailure: the file is not there, or lacks a figure.
    """
    try:
        export = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RigFailure(f"aiperf's figures cannot be read: {error}") from error
    found = {name: number(export, field) for name, field in _FIELDS.items()}
    told = {name: value for name, value in found.items() if value is not None}
    if missing := found.keys() - told:
        raise RigFailure(f"aiperf told no {', '.join(_FIELDS[name] for name in sorted(missing))}")
    return {"hit_ratio": told.pop("hit_percent") / 100, **told}
