"""``kvgate bench ab``: its options."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from benchmarks import options
from benchmarks.options import DEMO_MODEL_DIR, RESULTS

ROLLED_BACK = 1


def ab(
    a: Annotated[str, typer.Option(help="URL with the policy in force.")],
    b: Annotated[str, typer.Option(help="URL with the new one.")],
    model: options.Model = "sim-8b",
    model_dir: options.ModelDir = DEMO_MODEL_DIR,
    workload: options.WorkloadName = "chats",
    seed: options.Seed = 1,
    rate_per_s: options.RatePerS = None,
    duration_s: options.DurationS = None,
    speedup: options.Speedup = 1.0,
    skip: options.Skip = 0,
    limit: options.Limit = None,
    spread_s: options.SpreadS = 0.0,
    max_prompt_tokens: options.MaxPromptTokens = None,
    tries: options.Tries = 1,
    ttft_ms: options.TtftMs = 1_000.0,
    tpot_ms: options.TpotMs = 50.0,
    processes: options.Processes = 1,
    header: options.Headers = None,
    header_a: Annotated[list[str] | None, typer.Option(help="Of requests to a; repeat.")] = None,
    header_b: Annotated[list[str] | None, typer.Option(help="Of requests to b; repeat.")] = None,
    ignore_eos: options.IgnoreEos = True,
    rounds: Annotated[int, typer.Option(min=1, help="Of both; even numbers: a b b a.")] = 4,
    pause_s: Annotated[float, typer.Option(min=0, help="Between two runs.")] = 5.0,
    max_ttft_p99_ratio: Annotated[float, typer.Option(min=0, help="b over a.")] = 1.1,
    min_goodput_ratio: Annotated[float, typer.Option(min=0, help="b over a.")] = 0.95,
    max_error_rate: Annotated[float, typer.Option(min=0, max=1, help="Of b.")] = 0.01,
    max_refused_ratio: Annotated[
        float, typer.Option(min=0, help="b over a; less than 1% counts as 1%.")
    ] = 1.2,
    output: options.Output = RESULTS / "ab",
) -> None:
    """The same traffic to two clusters in turns: ends with 1 where b should be rolled back."""
    from benchmarks.ab import AB, Arm, Criteria, NothingToCompare, run
    from benchmarks.load.client import Wire
    from benchmarks.load.driver import Drive
    from benchmarks.load.sample import Budgets
    from benchmarks.workloads.plan import PlanError
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
    # Words that no former run has sent: its prompts are still cached on one side or both.
    words = int(1_000 * time.time())
    extra = {"ignore_eos": True} if ignore_eos else {}
    arms = [
        Arm(name, Wire(url, model, tries, extra=extra, headers=options.headers_of(headers)))
        for name, url, headers in (
            ("a", a, [*(header or []), *(header_a or [])]),
            ("b", b, [*(header or []), *(header_b or [])]),
        )
    ]
    try:
        plan = source.requests()
        options.not_empty(plan)
        settings = AB(
            source=source,
            old=arms[0],
            new=arms[1],
            drive=Drive(arms[0].wire, options.demo_model(model_dir), words, processes=processes),
            criteria=Criteria(
                max_ttft_p99_ratio, min_goodput_ratio, max_error_rate, max_refused_ratio
            ),
            budgets=Budgets(options.seconds(ttft_ms), options.seconds(tpot_ms)),
            rounds=rounds,
            pause_s=pause_s,
            output=output,
        )
        result = run(settings, plan)
    except (PlanError, NothingToCompare) as error:
        options.fail(str(error))
    if result["roll_back"]:
        raise typer.Exit(ROLLED_BACK)
