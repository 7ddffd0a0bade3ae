"""Who a request belongs to, on the running system."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.chat import asked, client_for
from tests.support.system import System, eventually, fetch, policy_for, running_system

CHAT = "/v1/chat/completions"
KNOWN, UNKNOWN = "sk-KNOWN-CANARY", "sk-UNKNOWN-CANARY"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    policy = policy_for(model_dir) | {
        "identity": {"tenant": [{"api_key": ["authorization", "x-api-key"]}]},
        "tenants": [
            {
                "name": "acme",
                "api_key_sha256": [hashlib.sha256(KNOWN.encode()).hexdigest()],
                "lanes": ["batch"],
            }
        ],
    }
    folder = tmp_path_factory.mktemp("identity")
    with running_system(
        folder, model_dir, workers=1, policy=policy, simulator_flags=("--speedup", "5")
    ) as running:
        yield running
        running.wait_idle()


async def ask(system: System, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client_for(system.url, headers=named) as client:
        return await client.post(CHAT, json=asked("short", "hello"))


def logged(system: System, *parts: str) -> None:
    """A line of the scheduler's log comes to hold all of these."""
    log = system.folder / "scheduler.log"
    eventually(
        lambda: any(all(part in line for part in parts) for line in log.read_text().splitlines()),
        f"{parts} are logged",
        5,
    )


async def test_an_api_key_is_its_tenant_and_no_header_changes_that(system: System) -> None:
    """SE1."""
    forged = {"x_kvgate_tenant": "victim", "x_llm_d_inference_fairness_id": "victim"}
    response = await ask(system, authorization=f"Bearer {KNOWN}", **forged)
    assert response.status_code == 200
    assert response.headers["x-kvgate-lane"] == "batch"
    logged(system, response.headers["x-kvgate-decision-id"], "acme", "batch")


async def test_keys_stand_nowhere(system: System) -> None:
    """SE3: not even of a tenant without an entry, who gets a name of its own."""
    response = await ask(system, x_api_key=UNKNOWN)
    assert response.status_code == 200
    logged(system, response.headers["x-kvgate-decision-id"], "key-", "online")
    await ask(system, x_api_key=UNKNOWN, x_kvgate_lane=UNKNOWN)
    pages = [fetch(f"http://127.0.0.1:{system.admin_port}/{page}")[1]
             for page in ("metrics", "api/v1/workers")]  # fmt: skip
    assert "CANARY" not in system.logs() + "".join(pages)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-kvgate-lane", "urgent"),
        ("x-kvgate-deadline-ms", "-5"),
        ("x-kvgate-deadline-ms", "1e18"),
        ("x-kvgate-ttft-budget-ms", "0.000"),
        ("x-kvgate-max-queue-ms", "soon"),
        ("x-kvgate-dry-run", "maybe"),
        ("authorization", "sk-a,sk-b"),
    ],
)
async def test_a_wrong_header_is_named_and_not_quoted(
    system: System, header: str, value: str
) -> None:
    """QU3, SE3."""
    response = await ask(system, **{header: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_identity", header)
    assert error["type"] == "invalid_request_error"
    assert value not in error["message"]
    assert response.headers["x-kvgate-refusal"] == "invalid_identity"
    assert response.headers["x-should-retry"] == "false"


async def test_a_dry_run_is_told_and_sends_nothing_on(system: System) -> None:
    assert (await ask(system)).status_code == 200
    before = system.engine_metric(0, "vllm:request_success_total")
    assert before > 0
    response = await ask(system, x_kvgate_dry_run="1")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert system.workers[0].address in response.text
    assert "choices" not in response.json()
    assert system.engine_metric(0, "vllm:request_success_total") == before
