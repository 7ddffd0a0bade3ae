"""The ``kvgate`` command: each subcommand reads its flags and hands over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from benchmarks.cli import bench
from extproc.errors import KvgateError, PolicyError
from extproc.policy import Policy, load_policy, normal_address
from extproc.telemetry.logs import LogFormat, set_up_logging

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cache-aware admission and routing for vLLM behind Envoy.",
)
app.add_typer(bench, name="bench")

START_FAILED = 3
"""Exit status of a process that could not start, so that supervisors stop restarting it."""
BAD_INPUT = 2

_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def serve(
    policy: Annotated[Path, typer.Option(help="Policy file (YAML).")],
    host: Annotated[str, typer.Option(help="Address of the gRPC ports.")] = "127.0.0.1",
    extproc_port: Annotated[int, typer.Option(help="Envoy's ext_proc streams.")] = 9002,
    control_port: Annotated[int, typer.Option(help="Agents' reports, Scheduler API.")] = 9003,
    admin_host: Annotated[str, typer.Option(help="Address of the admin port.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option(help="Metrics, probes, API.")] = 9090,
    grace_s: Annotated[float, typer.Option(help="Seconds to drain at shutdown.")] = 10.0,
    access_log: Annotated[bool, typer.Option(help="Log a line for each request.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="json or text.")] = "json",
) -> None:
    """Run the scheduler."""
    from extproc import event_loop
    from extproc.server import ServeSettings
    from extproc.server import serve as run

    set_up_logging(log_format)
    settings = ServeSettings(
        host=host,
        extproc_port=extproc_port,
        control_port=control_port,
        admin_host=admin_host,
        admin_port=admin_port,
        grace_s=grace_s,
        access_log=access_log,
        policy_path=policy,
    )
    try:
        event_loop.run(run(_policy(policy), settings))
    except KvgateError as error:
        _fail(str(error))


@app.command()
def check(policy: Annotated[Path, typer.Argument(help="Policy file (YAML).")]) -> None:
    """Validate a policy file and load what it names."""
    from extproc.server import build_keyer

    loaded = _policy(policy)
    for pool in loaded.pools:
        try:
            build_keyer(pool, loaded)
        except PolicyError as error:
            _fail(str(error))
    typer.echo(f"{policy}: ok, {len(loaded.pools)} pool(s), version {loaded.digest}")


@app.command()
def estimate(
    body: Annotated[str, typer.Argument(help="File with the request's body; - reads it.")] = "-",
    path: Annotated[str, typer.Option(help="What the client would call.")] = "/v1/chat/completions",
    header: Annotated[list[str] | None, typer.Option(help="name:value; repeat for each.")] = None,
    server: Annotated[str, typer.Option(help="Control port of a scheduler.")] = "127.0.0.1:9003",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1)] = 10.0,
) -> None:
    """Show what a scheduler would decide for a request, and every cost behind it.

    Ends with 0 where it would run or wait, 1 where it would be refused, 2 where nobody
    could be asked.
    """
    from extproc.console import estimate as command

    try:
        content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
        request = command.request_of(path, header or [], content)
    except (OSError, ValueError) as error:
        _fail(str(error), command.NOT_ASKED)
    raise typer.Exit(command.estimate(server, request, as_json=as_json, timeout_s=timeout_s))


@app.command()
def drain(
    name: Annotated[str, typer.Argument(help="A worker's address, ip:port.")],
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing runs on it.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0, help="For what runs to end.")] = 120.0,
    server: Annotated[str, typer.Option(help="Admin URL.")] = "http://127.0.0.1:9090",
) -> None:
    """Take a worker out of rotation; what runs on it goes on."""
    from extproc.console import drain as command

    raise typer.Exit(command.drain(server, _address(name), timeout_s, wait=wait))


@app.command()
def resume(
    name: Annotated[str, typer.Argument(help="A worker's address, ip:port.")],
    server: Annotated[str, typer.Option(help="Admin URL.")] = "http://127.0.0.1:9090",
) -> None:
    """Undo a drain."""
    from extproc.console import drain as command

    raise typer.Exit(command.resume(server, _address(name)))


@app.command()
def reference(folder: Annotated[Path, typer.Argument()] = Path("docs")) -> None:
    """Write the policy and metrics reference pages into a folder."""
    from extproc.reference import write_references

    write_references(folder)


@app.command("envoy-config")
def envoy_config(
    output: Annotated[Path | None, typer.Option(help="File; standard output if left out.")] = None,
    worker: Annotated[list[str] | None, typer.Option(help="ip:port; repeat for each.")] = None,
    listen_host: Annotated[str, typer.Option()] = "127.0.0.1",
    listen_port: Annotated[int, typer.Option()] = 10_000,
    envoy_admin_port: Annotated[int, typer.Option()] = 9_901,
    processor_host: Annotated[str, typer.Option(help="kvgate's address.")] = "127.0.0.1",
    processor_port: Annotated[int, typer.Option(help="kvgate's ext_proc port.")] = 9_002,
    body_mode: Annotated[
        Literal["full_duplex", "buffered"], typer.Option(help="How Envoy hands over bodies.")
    ] = "full_duplex",
    queue_time_s: Annotated[
        float, typer.Option(help="Longest max_queue_time_s of the policy.")
    ] = 30.0,
    client_header: Annotated[
        list[str] | None, typer.Option(help="Header that clients may set; repeat for each.")
    ] = None,
    metadata_namespace: Annotated[
        list[str] | None, typer.Option(help="Filter metadata that kvgate sees; repeat for each.")
    ] = None,
    validate: Annotated[bool, typer.Option(help="Check with the real Envoy.")] = False,
) -> None:
    """Write a complete Envoy bootstrap."""
    from dataclasses import replace

    from extproc import envoy_config as config

    try:
        defaults = config.default_settings(body_mode)
        settings = replace(
            defaults,
            listen_host=listen_host,
            listen_port=listen_port,
            admin_port=envoy_admin_port,
            processor_host=processor_host,
            processor_port=processor_port,
            queue_time_s=queue_time_s,
            workers=tuple(worker or defaults.workers),
            client_headers=tuple(client_header or defaults.client_headers),
            metadata_namespaces=tuple(metadata_namespace or defaults.metadata_namespaces),
        )
        if output is None:
            typer.echo(config.render(settings), nl=False)
            return
        config.write(settings, output)
        if validate:
            config.validate_with_envoy(output)
    except (KvgateError, ValueError) as error:
        _fail(str(error))


@app.command()
def up(
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="3 simulated workers, or 2 real ones.")
    ] = None,
    envoy_port: Annotated[int, typer.Option(help="Where clients connect.")] = 10_000,
    envoy_admin_port: Annotated[int, typer.Option()] = 9_901,
    extproc_port: Annotated[int, typer.Option()] = 9_002,
    control_port: Annotated[int, typer.Option()] = 9_003,
    admin_port: Annotated[int, typer.Option()] = 9_090,
    worker_port: Annotated[int, typer.Option(help="First worker's port.")] = 8_001,
    kv_events_port: Annotated[int, typer.Option(help="First worker's KV events.")] = 5_557,
    kv_replay_port: Annotated[int, typer.Option(help="First worker's KV replay.")] = 5_657,
    model: Annotated[str, typer.Option(help="Model name to serve.")] = "sim-8b",
    engine: Annotated[
        Literal["simulator", "vllm"], typer.Option(help="vllm: the real one, see make vllm.")
    ] = "simulator",
    speedup: Annotated[float, typer.Option(help="Simulated workers run this much faster.")] = 1.0,
    policy: Annotated[Path | None, typer.Option(help="Policy file in place of ours.")] = None,
    state_dir: Annotated[Path, typer.Option(help="Model, configuration.")] = Path(".kvgate"),
    body_mode: Annotated[Literal["full_duplex", "buffered"], typer.Option()] = "full_duplex",
) -> None:
    """Run the whole system on loopback: Envoy, scheduler, simulated workers with agents."""
    from extproc.up import UpSettings
    from extproc.up import up as run

    settings = UpSettings(
        workers=workers or (2 if engine == "vllm" else 3),
        envoy_port=envoy_port,
        envoy_admin_port=envoy_admin_port,
        extproc_port=extproc_port,
        control_port=control_port,
        admin_port=admin_port,
        worker_port=worker_port,
        kv_events_port=kv_events_port,
        kv_replay_port=kv_replay_port,
        model=model,
        engine=engine,
        speedup=speedup,
        policy=policy,
        state_dir=state_dir,
        body_mode=body_mode,
    )
    raise typer.Exit(run(settings))


@app.command(context_settings=_FORWARD)
def agent(context: typer.Context) -> None:
    """Run the agent beside one worker (see kvgate agent --help)."""
    from workers.agent import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=_FORWARD)
def simulator(context: typer.Context) -> None:
    """Run one simulated worker (see kvgate simulator --help)."""
    from workers.simulator.__main__ import main as run

    raise typer.Exit(run(context.args))


def _policy(path: Path) -> Policy:
    try:
        return load_policy(path)
    except PolicyError as error:
        _fail(str(error))


def _address(text: str) -> str:
    try:
        return normal_address(text)
    except ValueError as error:
        _fail(str(error), BAD_INPUT)


def _fail(message: str, status: int = START_FAILED) -> NoReturn:
    typer.echo(f"kvgate: {message}", err=True)
    raise typer.Exit(status)


def main() -> None:
    """Entry point of the ``kvgate`` command."""
    app()


if __name__ == "__main__":
    main()
