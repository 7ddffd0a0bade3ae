"""The agent's process: flags, logs and signals.

``python -m workers.agent --engine http://IP:PORT ...``. SIGTERM and SIGINT drain the
worker, close the streams and end the process with status 0; the second one does not wait
for requests.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from extproc import event_loop
from extproc.telemetry.logs import set_up_logging
from workers.agent.agent import Agent
from workers.agent.settings import Settings, parse_settings

EXIT_UNUSABLE = 3
"""The socket for the middleware cannot be made."""


async def serve(settings: Settings) -> None:
    """Run an agent until SIGTERM or SIGINT."""
    leave, leave_at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (leave_at_once if leave.is_set() else leave).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await Agent(settings).run(leave, leave_at_once)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    settings, log_format = parse_settings(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(log_format)
    try:
        event_loop.run(serve(settings))
    except OSError as error:
        print(f"kvgate agent: {settings.socket}: {error.strerror or error}", file=sys.stderr)
        return EXIT_UNUSABLE
    return 0
