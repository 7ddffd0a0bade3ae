"""How near the simulated engine comes to vLLM as measured on two GPUs.

Replays the requests of LLMServingSim's validation runs (vLLM 0.19.0, Llama-3.1-8B, 300
ShareGPT requests at 10/s) through the simulator's engine in virtual time: the arrivals,
prompt and answer lengths are the run's own. The traces are not part of this project:
``python -m benchmarks.simulator_fit --traces DIR`` with the folder that holds
``RTX4090_Llama-3.1-8B__requests.jsonl`` and its neighbours.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, median, percentile, print_table, write_json
from workers.simulator.chain import TokenChain
from workers.simulator.config import EngineConfig
from workers.simulator.engine import Engine
from workers.simulator.requests import EngineRequest
from workers.simulator.timing import RTX_4090, RTX_PRO_6000, StepTimes

BLOCK_TOKENS = 16
TOKEN_BYTES = 4
QUEUE_SAMPLES_S = (5, 10, 20, 30, 60, 90, 120)


@dataclass(frozen=True)
class Run:
    """One measured run and the engine that should repeat it."""

    name: str
    file: str
    timing: StepTimes
    max_num_seqs: int
    kv_tokens: int
    """What the GPU's memory held; the larger GPU never came near its end."""


RUNS = (
    Run("RTX PRO 6000", "RTXPRO6000_Llama-3.1-8B", RTX_PRO_6000, 128, 480_000),
    Run("RTX 4090", "RTX4090_Llama-3.1-8B", RTX_4090, 256, 41_408),
)


@dataclass(frozen=True)
class Request:
    """One request's life in seconds since the first arrival."""

    prompt_tokens: int
    answer_tokens: int
    arrived_s: float
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True)
class Life:
    """A run, measured or simulated."""

    requests: list[Request]
    waiting: dict[int, float]
    """Requests queued inside the engine, by second."""
    running_peak: int


def main() -> None:
    """Print both runs, measured and simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the measured runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulator_fit.json")
    options = parser.parse_args()
    write_json(options.out, compare(options.traces))


def compare(folder: Path) -> dict[str, Any]:
    """Figures of every run: measured, simulated."""
    result: dict[str, Any] = {}
    for run in RUNS:
        measured = read(folder, run)
        simulated = simulate(run, measured.requests)
        pair = (figures(measured), figures(simulated))
        rows = [(name, f"{pair[0][name]:.1f}", f"{pair[1][name]:.1f}") for name in pair[0]]
        print_table(run.name, ("", "measured", "simulated"), rows)
        result[run.name] = {"measured": pair[0], "simulated": pair[1]}
    return result


def figures(life: Life) -> dict[str, float]:
    """What a run is compared by."""
    requests = life.requests
    ttft_s = [r.first_token_s - r.arrived_s for r in requests]
    tpot_ms = [
        1e3 * (r.last_token_s - r.first_token_s) / (r.answer_tokens - 1)
        for r in requests
        if r.answer_tokens > 1
    ]
    span_s = max(r.last_token_s for r in requests) - min(r.arrived_s for r in requests)
    told = {
        "output tok/s": sum(r.answer_tokens for r in requests) / span_s,
        "TPOT p50 ms": median(tpot_ms),
        "TPOT p95 ms": percentile(tpot_ms, 0.95),
        "TTFT p50 s": median(ttft_s),
        "TTFT p95 s": percentile(ttft_s, 0.95),
        "running, peak": float(life.running_peak),
        "waiting, peak": max(life.waiting.values()),
    }
    told |= {f"waiting at {at} s": life.waiting.get(at, 0.0) for at in QUEUE_SAMPLES_S}
    return told


def read(folder: Path, run: Run) -> Life:
    """A measured run.

    Raises:
        OSError: its files are not in the folder.
    """
    lines = (folder / f"{run.file}__requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["queued_ts"])
    start = rows[0]["queued_ts"]
    requests = [
        Request(
            row["input_toks"],
            row["output_toks"],
            row["queued_ts"] - start,
            row["first_token_ts"] - start,
            row["last_token_ts"] - start,
        )
        for row in rows
    ]
    with (folder / f"{run.file}__timeseries.csv").open(encoding="utf-8", newline="") as file:
        ticks = list(csv.DictReader(file))
    waiting = {round(float(tick["t"])): float(tick["waiting"]) for tick in ticks}
    return Life(requests, waiting, max(int(tick["running"]) for tick in ticks))


def simulate(run: Run, measured: list[Request]) -> Life:
    """The same arrivals and lengths through the simulator's engine, in virtual time."""
    rng = random.Random(0)
    config = EngineConfig(
        block_size=BLOCK_TOKENS,
        num_blocks=run.kv_tokens // BLOCK_TOKENS,
        max_num_seqs=run.max_num_seqs,
        timing=run.timing,
        record_events=False,
    )
    engine = Engine(config)
    queue = [
        (given.arrived_s, _request(str(number), given, rng))
        for number, given in enumerate(measured)
    ]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    waiting: dict[int, float] = {}
    running_peak, now, coming = 0, 0.0, 0
    while coming < len(queue) or engine.busy:
        while coming < len(queue) and queue[coming][0] <= now:
            engine.add(queue[coming][1], now)
            coming += 1
        result = engine.step(now)
        now = result.ended_s if result else queue[coming][0]
        for output in result.outputs if result else ():
            first.setdefault(output.request.request_id, now)
            last[output.request.request_id] = now
        waiting[int(now)] = float(len(engine.waiting))
        running_peak = max(running_peak, len(engine.running))
    requests = [
        Request(g.prompt_tokens, g.answer_tokens, g.arrived_s, first[str(n)], last[str(n)])
        for n, g in enumerate(measured)
    ]
    return Life(requests, waiting, running_peak)


def _request(name: str, given: Request, rng: random.Random) -> EngineRequest:
    tokens = given.prompt_tokens + given.answer_tokens
    chain = TokenChain(rng.randbytes(TOKEN_BYTES * tokens), BLOCK_TOKENS)
    return EngineRequest(name, chain, given.prompt_tokens, given.answer_tokens)


if __name__ == "__main__":
    main()
