"""Options that several commands of ``kvgate bench`` have, and what they are read with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from benchmarks.workloads.plan import Planned

BAD_INPUT = 2
DEMO_MODEL_DIR = Path(".kvgate/model")
RESULTS = Path(".kvgate/bench")

Seed = Annotated[int, typer.Option(help="Of arrivals, lengths and words.")]
Model = Annotated[str, typer.Option(help="Model name in the requests.")]
ModelDir = Annotated[Path, typer.Option(help="Its tokenizer directory; ours is made if missing.")]
WorkloadName = Annotated[
    str,
    typer.Option(
        help="shared, chats, agents, rag, mix, tenants or their YAML; or a trace: "
        "Mooncake or kvgate .jsonl, Azure .csv."
    ),
]
RatePerS = Annotated[float | None, typer.Option(help="Of a workload.")]
DurationS = Annotated[float | None, typer.Option(help="Of arrivals.")]
Speedup = Annotated[float, typer.Option(min=0.001, help="Of a trace.")]
Skip = Annotated[int, typer.Option(min=0, help="First rows of a trace left out.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Rows of a trace.")]
SpreadS = Annotated[
    float, typer.Option(min=0, help="Spread clumps of a trace; 3 for Mooncake's chats.")
]
MaxPromptTokens = Annotated[int | None, typer.Option(help="Leave longer prompts out.")]
Tries = Annotated[int, typer.Option(min=1, help="Of a request, waiting as told.")]
TtftMs = Annotated[float | None, typer.Option(help="Budget: first token.")]
TpotMs = Annotated[float | None, typer.Option(help="Budget: each further token.")]
Processes = Annotated[int, typer.Option(min=1, help="That send.")]
Headers = Annotated[list[str] | None, typer.Option(help="'Name: value'; repeat.")]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for answers of full length.")]
Output = Annotated[Path, typer.Option(help="Folder for JSON, samples, plots.")]


def demo_model(path: Path) -> Path:
    """A tokenizer directory, the demo model's if it is our default."""
    if path == DEMO_MODEL_DIR:
        from workers.simulator.model import make_model_dir

        return make_model_dir(path)
    return path


def not_empty(plan: list[Planned]) -> None:
    """End with an error if a plan has no requests."""
    if not plan:
        fail("nothing to send: no request is left of the trace or workload")


def headers_of(lines: list[str] | None) -> dict[str, str]:
    """Headers of every request, by their names in lower case."""
    headers = {}
    for line in lines or []:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            fail(f"--header {line!r} is not 'Name: value'")
        headers[name.strip().lower()] = value.strip()
    return headers


def seconds(milliseconds: float | None) -> float | None:
    """The same in seconds."""
    return None if milliseconds is None else milliseconds / 1_000


def fail(message: str) -> NoReturn:
    """Say what is wrong with the input and end."""
    typer.echo(f"kvgate bench: {message}", err=True)
    raise typer.Exit(BAD_INPUT)
