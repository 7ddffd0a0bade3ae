"""``kvgate bench``: load tests and comparisons from the command line.

Imports happen inside the commands, so that ``kvgate serve`` does not pay for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import options
from benchmarks.ab_command import ab
from benchmarks.options import DEMO_MODEL_DIR, Seed, demo_model
from benchmarks.options import RESULTS as _RESULTS
from benchmarks.options import fail as _fail

bench = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Load tests and comparisons (docs/benchmarks.md).",
)
bench.command()(ab)


@bench.command()
def load(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")],
    model: options.Model = "sim-8b",
    model_dir: options.ModelDir = DEMO_MODEL_DIR,
    workload: options.WorkloadName = "chats",
    seed: Seed = 1,
    rate_per_s: options.RatePerS = None,
    duration_s: options.DurationS = None,
    speedup: options.Speedup = 1.0,
    skip: options.Skip = 0,
    limit: options.Limit = None,
    spread_s: options.SpreadS = 0.0,
    max_prompt_tokens: options.MaxPromptTokens = None,
    tries: options.Tries = 1,
    ttft_ms: options.TtftMs = None,
    tpot_ms: options.TpotMs = None,
    processes: options.Processes = 1,
    engine: Annotated[list[str] | None, typer.Option(help="Engine URL to watch; repeat.")] = None,
    header: options.Headers = None,
    ignore_eos: options.IgnoreEos = True,
    plan_to: Annotated[
        Path | None, typer.Option(help="Write the plan as kvgate JSONL, send nothing.")
    ] = None,
    output: options.Output = _RESULTS / "load",
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
        headers=options.headers_of(header),
    )
    try:
        plan = source.requests()
        if plan_to is not None:
            write_plan(plan_to, plan)
            return
        options.not_empty(plan)
        settings = LoadRun(
            source=source,
            drive=Drive(wire, demo_model(model_dir), seed, processes=processes),
            budgets=Budgets(options.seconds(ttft_ms), options.seconds(tpot_ms)),
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


@bench.command("overload-sweep")
def overload_sweep(
    trace: Annotated[Path, typer.Option(help="Azure .csv, Mooncake or kvgate .jsonl.")],
    factors: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Times the sustainable rate; repeat.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals in virtual time.")] = 120.0,
    wall_clock: Annotated[
        bool, typer.Option("--wall-clock", help="Through the real Envoy, too.")
    ] = False,
    wall_seconds: Annotated[float, typer.Option(min=1, help="Of arrivals there.")] = 30.0,
    output: Annotated[Path, typer.Option(help="Folder for JSON and plots.")] = (
        _RESULTS / "overload-sweep"
    ),
) -> None:
    """A trace at several times the sustainable rate, with admission on and off."""
    from benchmarks.overload_sweep import Sweep, run
    from benchmarks.workloads.plan import PlanError

    settings = Sweep(
        trace=trace,
        factors=tuple(factors or Sweep(trace).factors),
        seconds=seconds,
        wall_clock=wall_clock,
        wall_seconds=wall_seconds,
        output=output,
    )
    try:
        run(settings, demo_model(DEMO_MODEL_DIR))
    except PlanError as error:
        _fail(str(error))


@bench.command()
def failures(
    arm: Annotated[list[str] | None, typer.Option(help="ROUTER: EVENT; repeat. All.")] = None,
    seed: Seed = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals, for each arm.")] = 75.0,
    rate_per_s: Annotated[float, typer.Option(help="Conversations that begin.")] = 2.0,
    output: Annotated[Path, typer.Option(help="Folder for JSON, samples, plots.")] = (
        _RESULTS / "failures"
    ),
) -> None:
    """Workers that die, freeze, restart and join, on a simulated cluster behind the real Envoy."""
    from benchmarks.failures import Failures, run
    from benchmarks.workloads.plan import PlanError

    settings = Failures(
        arms=tuple(arm or Failures().arms),
        seed=seed,
        seconds=seconds,
        rate_per_s=rate_per_s,
        output=output,
    )
    try:
        run(settings, demo_model(DEMO_MODEL_DIR))
    except PlanError as error:
        _fail(str(error))


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
    trace_duration_s: Annotated[
        float | None, typer.Option(help="Of traces; as the others.")
    ] = None,
    trace_speedup: Annotated[float, typer.Option(min=0.001)] = 2.0,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 8,
    num_blocks: Annotated[int, typer.Option(min=2_048, help="KV blocks of a worker.")] = 4_096,
    trace_num_blocks: Annotated[
        int | None, typer.Option(min=2_048, help="The same for traces; as the others.")
    ] = None,
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
        trace_duration_s=trace_duration_s,
        trace_speedup=trace_speedup,
        cluster=Cluster(
            workers=workers,
            num_blocks=num_blocks,
            timing=timing,
            stream_interval=defaults.cluster.stream_interval,
        ),
        trace_num_blocks=trace_num_blocks,
        policy=policy or defaults.policy,
        processes=processes,
        output=output,
    )
    try:
        run(settings, demo_model(DEMO_MODEL_DIR))
    except PlanError as error:
        _fail(str(error))


@bench.command("load-check")
def load_check(
    workload: Annotated[str, typer.Option(help="Kind, YAML or trace file.")] = "shared",
    seed: Seed = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of each tool; medians are shown.")] = 3,
    duration_s: Annotated[float, typer.Option(min=1, help="Of arrivals.")] = 30.0,
    rate_per_s: Annotated[float, typer.Option(help="Of a workload.")] = 8.0,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 4,
    output: Annotated[Path, typer.Option(help="Folder for JSON.")] = _RESULTS / "load-check",
) -> None:
    """Our load generator against aiperf, on the same requests: do both measure the same?"""
    from benchmarks.cluster import Cluster
    from benchmarks.load_check import LoadCheck, run
    from benchmarks.rig import RigFailure
    from benchmarks.workloads.plan import PlanError

    settings = LoadCheck(
        workload=workload,
        seed=seed,
        rounds=rounds,
        duration_s=duration_s,
        rate_per_s=rate_per_s,
        cluster=Cluster(workers=workers),
        output=output,
    )
    try:
        run(settings, demo_model(DEMO_MODEL_DIR))
    except (PlanError, RigFailure) as error:
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
    queued: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Requests waiting, for the core's cost; repeat."),
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
            queued=tuple(queued or ()),
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


@bench.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder that the benchmarks wrote to.")] = Path(
        "benchmarks/results"
    ),
    readme: Annotated[
        Path | None, typer.Option(help="File whose summary table is written again.")
    ] = None,
) -> None:
    """Write REPORT.md from the JSON that is there: tables, plots, targets met and missed."""
    from benchmarks.report_page.page import run
    from benchmarks.report_page.readme import NoMarkers

    try:
        run(results, readme)
    except (NoMarkers, OSError) as error:
        _fail(str(error))
