"""``kvgate bench``: load tests and comparisons from the command line.

Imports happen inside the commands, so that ``kvgate serve`` does not pay for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from benchmarks.workloads.plan import Planned

BAD_INPUT = 2
DEMO_MODEL_DIR = Path(".kvgate/model")
_RESULTS = Path(".kvgate/bench")

bench = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Load tests and comparisons (docs/benchmarks.md).",
)

Seed = Annotated[int, typer.Option(help="Of arrivals, lengths and words.")]


@bench.command()
def load(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")],
    model: Annotated[str, typer.Option(help="Model name in the requests.")] = "sim-8b",
    model_dir: Annotated[
        Path, typer.Option(help="Its tokenizer directory; ours is made if missing.")
    ] = DEMO_MODEL_DIR,
    workload: Annotated[
        str,
        typer.Option(
            help="shared, chats, agents, rag, mix, tenants or their YAML; or a trace: "
            "Mooncake or kvgate .jsonl, Azure .csv."
        ),
    ] = "chats",
    seed: Seed = 1,
    rate_per_s: Annotated[float | None, typer.Option(help="Of a workload.")] = None,
    duration_s: Annotated[float | None, typer.Option(help="Of arrivals.")] = None,
    speedup: Annotated[float, typer.Option(min=0.001, help="Of a trace.")] = 1.0,
    skip: Annotated[int, typer.Option(min=0, help="First rows of a trace left out.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of a trace.")] = None,
    spread_s: Annotated[
        float, typer.Option(min=0, help="Spread clumps of a trace; 3 for Mooncake's chats.")
    ] = 0.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave longer prompts out.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="Of a request, waiting as told.")] = 1,
    ttft_ms: Annotated[float | None, typer.Option(help="Budget: first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Budget: each further token.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That send.")] = 1,
    engine: Annotated[list[str] | None, typer.Option(help="Engine URL to watch; repeat.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="'Name: value'; repeat.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = True,
    plan_to: Annotated[
        Path | None, typer.Option(help="Write the plan as kvgate JSONL, send nothing.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for JSON, samples, plots.")] = (
        _RESULTS / "load"
    ),
) -> None:
    """Send a trace or a workload at its times and measure what clients see.

    An API key comes from KVGATE_BENCH_API_KEY in the environment.
    """
    from benchmarks.load.client import Wire
    from benchmarks.load.driver import Drive
    from benchmarks.load.run import LoadRun, run
    from benchmarks.load.sample import Budgets
    from benchmarks.workloads.plan import PlanError, write_plan
    from benchmarks.workloads.source import Source

    source = Source(
        name=workload,
        seed=seed,
        duration_s=duration_s,
        rate_per_s=rate_per_s,
        speedup=speedup,
        skip=skip,
        limit=limit,
        spread_s=spread_s,
        max_prompt_tokens=max_prompt_tokens,
    )
    wire = Wire(
        url=url,
        model=model,
        max_tries=tries,
        extra={"ignore_eos": True} if ignore_eos else {},
        headers=_headers(header or []),
    )
    try:
        plan = source.requests()
        if plan_to is not None:
            write_plan(plan_to, plan)
            return
        _not_empty(plan)
        settings = LoadRun(
            source=source,
            drive=Drive(wire, demo_model(model_dir), seed, processes=processes),
            budgets=Budgets(_seconds(ttft_ms), _seconds(tpot_ms)),
            output=output,
            engines=tuple(engine or ()),
        )
        run(settings, plan)
    except PlanError as error:
        _fail(str(error))


@bench.command()
def overload(
    seed: Seed = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals, for each arm.")] = 60.0,
    factor: Annotated[float, typer.Option(help="Times the sustainable rate.")] = 3.0,
    rate_per_s: Annotated[
        float | None, typer.Option(help="Sustainable rate, in place of calibrating.")
    ] = None,
    calibration_rounds: Annotated[int, typer.Option(min=1, help="Requests a slot.")] = 12,
    on: Annotated[Path | None, typer.Option(help="Policy with admission.")] = None,
    off: Annotated[Path | None, typer.Option(help="Policy without.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That send.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder for JSON, samples, plots.")] = (
        _RESULTS / "overload"
    ),
) -> None:
    """Three times the sustainable rate, with admission on and off, on a simulated cluster."""
    from benchmarks.overload import Overload, run

    defaults = Overload()
    settings = Overload(
        seed=seed,
        seconds=seconds,
        factor=factor,
        rate_per_s=rate_per_s,
        calibration_rounds=calibration_rounds,
        on=on or defaults.on,
        off=off or defaults.off,
        processes=processes,
        output=output,
    )
    run(settings, demo_model(DEMO_MODEL_DIR))


@bench.command()
def compare(
    arm: Annotated[
        list[str] | None,
        typer.Option(help="kvgate, kvgate:PROFILE, envoy:..., PACKAGE:POLICY; repeat. All."),
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Kind, YAML or trace file; repeat.")
    ] = None,
    seed: Seed = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of every arm; medians are shown.")] = 1,
    duration_s: Annotated[float, typer.Option(min=1, help="Of arrivals.")] = 45.0,
    rate_per_s: Annotated[float | None, typer.Option(help="Of every workload.")] = None,
    trace_speedup: Annotated[float, typer.Option(min=0.001)] = 2.0,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 8,
    num_blocks: Annotated[int, typer.Option(min=2_048, help="KV blocks of a worker.")] = 4_096,
    timing: Annotated[str, typer.Option(help="Step times of a worker.")] = "peers-mock",
    policy: Annotated[Path | None, typer.Option(help="kvgate's, in place of ours.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That send.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder for JSON, samples, plots.")] = (
        _RESULTS / "compare"
    ),
) -> None:
    """kvgate, Envoy's own policies and other routers on the same simulated cluster."""
    from benchmarks.cluster import Cluster
    from benchmarks.compare import Comparison, run
    from benchmarks.workloads.plan import PlanError

    defaults = Comparison()
    settings = Comparison(
        arms=tuple(arm or defaults.arms),
        workloads=tuple(workload or defaults.workloads),
        seed=seed,
        rounds=rounds,
        duration_s=duration_s,
        rate_per_s=rate_per_s,
        trace_speedup=trace_speedup,
        cluster=Cluster(workers=workers, num_blocks=num_blocks, timing=timing),
        policy=policy or defaults.policy,
        processes=processes,
        output=output,
    )
    try:
        run(settings, demo_model(DEMO_MODEL_DIR))
    except PlanError as error:
        _fail(str(error))


@bench.command()
def simulate(
    workers: Annotated[
        list[int] | None, typer.Option(min=1, max=4_096, help="Size of cluster; repeat.")
    ] = None,
    source: Annotated[str, typer.Option(help="Kind, YAML or trace file.")] = "chats",
    seed: Seed = 1,
    duration_s: Annotated[float, typer.Option(min=1, help="Of arrivals, simulated.")] = 300.0,
    rate_per_worker: Annotated[float, typer.Option(help="Of a workload's arrivals.")] = 0.5,
    trace_speedup: Annotated[float, typer.Option(help="Of a trace on 8 workers.")] = 1.0,
    policy: Annotated[Path | None, typer.Option(help="In place of ours.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="YAML list of kill, freeze, roll and add.")
    ] = None,
    validate: Annotated[
        bool, typer.Option(help="Run the smallest size in wall-clock time too.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for JSON, samples, plots.")] = (
        _RESULTS / "simulate"
    ),
) -> None:
    """Clusters of up to thousands of workers in virtual time, on the scheduler's own core."""
    from benchmarks.simulation.run import Simulate, run
    from benchmarks.simulation.script import read_script
    from benchmarks.workloads.plan import PlanError

    defaults = Simulate()
    try:
        settings = Simulate(
            workers=tuple(workers or defaults.workers),
            source=source,
            seed=seed,
            duration_s=duration_s,
            rate_per_worker=rate_per_worker,
            trace_speedup=trace_speedup,
            policy=policy or defaults.policy,
            script=read_script(script) if script else (),
            validate=validate,
            output=output,
        )
        run(settings, demo_model(DEMO_MODEL_DIR))
    except PlanError as error:
        _fail(str(error))


@bench.command()
def overhead(
    seed: Seed = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of every arm; medians are shown.")] = 5,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Static workers.")] = 8,
    output: Annotated[Path, typer.Option(help="JSON file.")] = _RESULTS / "overhead.json",
) -> None:
    """Added latency and CPU a request, against Envoy alone and a bare processor."""
    from benchmarks.overhead import Settings, run

    run(Settings(seed=seed, rounds=rounds, workers=workers, output=output))


@bench.command("hot-path")
def hot_path(
    seed: Seed = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Decisions of each kind.")] = 200,
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Repeat for each.")] = None,
    output: Annotated[Path, typer.Option(help="JSON file.")] = _RESULTS / "hot_path.json",
) -> None:
    """Time of each step of a decision, in process."""
    from benchmarks.hot_path import Settings, run

    sizes = tuple(workers) if workers else Settings().workers
    run(Settings(seed=seed, rounds=rounds, workers=sizes, output=output))


def demo_model(path: Path) -> Path:
    """A tokenizer directory, the demo model's if it is our default."""
    if path == DEMO_MODEL_DIR:
        from workers.simulator.model import make_model_dir

        return make_model_dir(path)
    return path


def _not_empty(plan: list[Planned]) -> None:
    if not plan:
        _fail("nothing to send: no request is left of the trace or workload")


def _headers(lines: list[str]) -> dict[str, str]:
    """Headers of every request."""
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            _fail(f"--header {line!r} is not 'Name: value'")
        headers[name.strip().lower()] = value.strip()
    return headers


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1_000


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvgate bench: {message}", err=True)
    raise typer.Exit(BAD_INPUT)
