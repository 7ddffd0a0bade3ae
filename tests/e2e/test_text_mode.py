"""A pool without a tokenizer: conversations still find their way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chat import ask, chat, client_for, text
from tests.support.system import MODEL, System, fetch, policy_for, running_system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    policy = policy_for(model_dir, tokenizer=None, routing={"zone": "a"})
    with running_system(
        tmp_path_factory.mktemp("text-mode"),
        model_dir,
        policy=policy,
        simulator_flags=("--speedup", "5"),
        agent_flags=("--label", "zone=b", "--label", "role=both"),
    ) as running:
        yield running
        running.wait_idle()


async def test_turns_go_where_the_engine_has_the_conversation(system: System) -> None:
    conversations = [[{"role": "system", "content": text(300, seed=n)}] for n in range(6)]
    found = asked = 0
    async with client_for(system.url) as client:
        for turn in range(5):
            for number, messages in enumerate(conversations):
                messages.append({"role": "user", "content": text(40, seed=100 * turn + number)})
                answer = await ask(client, chat(messages))
                assert answer.status == 200
                messages.append({"role": "assistant", "content": answer.content})
                if turn:
                    asked += 1
                    found += answer.cached > 300
                    assert answer.predicted > 200
    assert found >= 0.9 * asked


def test_status_and_metrics_say_so(system: System) -> None:
    _, told = fetch(f"http://127.0.0.1:{system.admin_port}/api/v1/routing")
    page: dict[str, Any] = json.loads(told)[MODEL]
    assert page["keys"] == "text"
    assert system.metric("kvgate_exact_keys") == 0


def test_labels_of_the_agents_are_shown(system: System) -> None:
    assert [worker["labels"] for worker in system.fleet()] == 3 * [{"zone": "b", "role": "both"}]
