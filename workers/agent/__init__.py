"""The agent beside one worker: reads the engine, reports to the schedulers."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to leave; the exit status."""
    # Late, so that importing one module of the package does not load all of them.
    from workers.agent.process import main as run

    return run(arguments)
