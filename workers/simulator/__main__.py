"""``python -m workers.simulator``: one simulated worker from flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.simulator.server import run
from workers.simulator.settings import SimulatorSettings
from workers.simulator.timing import PRESETS


def parse(arguments: Sequence[str]) -> SimulatorSettings:
    """Settings from flags.

    Raises:
        ValueError: a value is out of range.
        SystemExit: a flag is unknown or malformed.
    """
    parsed = vars(_parser().parse_args(arguments))
    parsed["timing"] = PRESETS[parsed["timing"]]
    parsed["adapters"] = tuple(parsed["adapters"])
    return SimulatorSettings(**parsed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop; the exit status."""
    try:
        run(parse(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError) as error:
        print(f"simulator: {error}", file=sys.stderr)
        return 3
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = SimulatorSettings(Path(), "model")
    parser = argparse.ArgumentParser(prog="python -m workers.simulator", description=__doc__)
    add = parser.add_argument
    add("--model-dir", type=Path, required=True, help="tokenizer directory, see model.py")
    add("--model-name", required=True)
    add("--adapter", dest="adapters", action="append", default=[], metavar="NAME")
    add("--host", default=defaults.host)
    add("--kv-events-port", type=int, help="ZMQ PUB; none without the flag")
    add("--kv-replay-port", type=int, help="ZMQ ROUTER; none without the flag")
    add("--kv-events-topic", default=defaults.kv_events_topic)
    for name in (
        "port", "block-size", "num-blocks", "max-num-seqs", "max-num-batched-tokens",
        "max-model-len", "seed", "stream-interval",
    ):  # fmt: skip
        add(f"--{name}", type=int, default=getattr(defaults, name.replace("-", "_")))
    add("--max-queued", "--max-num-queued-reqs", type=int, help="no limit without the flag")
    add("--socket", type=Path, metavar="PATH", help="agent's Unix socket, told of requests")
    add("--speedup", type=float, default=defaults.speedup, help="divides all step times")
    add("--shutdown-s", type=float, default=defaults.shutdown_s)
    add("--timing", choices=sorted(PRESETS), default="rtx-pro-6000")
    add(
        "--no-hold-headers",
        dest="hold_headers",
        action="store_false",
        help="send headers at once, as plain vLLM does",
    )
    add(
        "--cache-segments",
        action="store_true",
        help="tokenise segment by segment, as kvgate does: less CPU in load tests",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
