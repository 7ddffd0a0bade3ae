"""The engine under virtual time against a real vLLM run.

vLLM 0.19.0, Llama-3.1-8B on an RTX PRO 6000, 300 ShareGPT requests at 10/s, max_num_seqs 128
(measured by LLMServingSim, MIT). The requests are drawn from that run's deciles.
"""

from __future__ import annotations

import random
from statistics import median

from workers.simulator.chain import TokenChain
from workers.simulator.config import EngineConfig
from workers.simulator.engine import Engine
from workers.simulator.requests import EngineRequest

PROMPT_DECILES = [262, 363, 434, 521, 621, 731, 833, 1017, 1214, 1460, 3998]
ANSWER_DECILES = [512, 530, 550, 574, 592, 632, 699, 751, 768, 770, 1021]
MEASURED = {"output_tok_s": 2969, "tpot_p50_ms": 33.4, "ttft_p50_s": 9.4}
"""As the run's own summary has them; loose bounds, since the draw is not the run."""


def _draw(rng: random.Random, deciles: list[int]) -> int:
    place = rng.random() * (len(deciles) - 1)
    low = int(place)
    return round(deciles[low] + (place - low) * (deciles[low + 1] - deciles[low]))


def _replay(seed: int, requests: int = 300) -> dict[str, float]:
    rng = random.Random(seed)
    engine = Engine(EngineConfig(num_blocks=20_000, max_num_seqs=128, record_events=False))
    arrivals, at = [], 0.0
    for number in range(requests):
        at += rng.expovariate(10.0)
        prompt, answer = _draw(rng, PROMPT_DECILES), _draw(rng, ANSWER_DECILES)
        chain = TokenChain(rng.randbytes(4 * (prompt + answer)), 16)
        arrivals.append((at, EngineRequest(str(number), chain, prompt, answer)))
    now, first, last = 0.0, {}, {}
    queue = arrivals[::-1]
    while queue or engine.busy:
        while queue and queue[-1][0] <= now:
            engine.add(queue.pop()[1], now)
        result = engine.step(now)
        now = result.ended_s if result else queue[-1][0]
        for output in result.outputs if result else ():
            first.setdefault(output.request.request_id, now)
            last[output.request.request_id] = now
    done = [(r, at, first[r.request_id], last[r.request_id]) for at, r in arrivals]
    return {
        "output_tok_s": sum(r.answer_tokens for r, *_ in done) / now,
        "tpot_p50_ms": 1e3 * median((e - f) / (r.answer_tokens - 1) for r, _, f, e in done),
        "ttft_p50_s": median(f - at for _, at, f, _ in done),
    }


def test_throughput_and_latencies_are_those_of_the_measured_run() -> None:
    simulated = _replay(seed=1)
    for name, measured in MEASURED.items():
        print(f"{name}: simulated {simulated[name]:.1f}, measured {measured}")
        tolerance = 0.4 if name == "ttft_p50_s" else 0.15
        assert abs(simulated[name] / measured - 1) < tolerance


def test_the_same_seed_gives_the_same_run() -> None:
    assert _replay(seed=2, requests=40) == _replay(seed=2, requests=40)
