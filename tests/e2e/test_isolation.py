"""Tenants kept apart by salts that kvgate derives, on the running system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from extproc.policy import TrustPolicy
from extproc.request.trust import TrustDomains
from tests.e2e.chat import Answer, ask, asked, client_for, text
from tests.support.system import System, policy_for, running_system

TRUST = {
    "isolate": "tenants",
    "key": "a key of 16 bytes and more",
    "groups": {"lab": ["ada", "bob"]},
}
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    policy = policy_for(model_dir, trust=TRUST) | {
        "identity": {"tenant": [{"header": "x-tenant"}]},
    }
    folder = tmp_path_factory.mktemp("isolation")
    with running_system(
        folder, model_dir, workers=2, policy=policy, simulator_flags=("--speedup", "5")
    ) as running:
        yield running
        running.wait_idle()


async def asks(system: System, tenant: str, prompt: str, **fields: str) -> Answer:
    async with client_for(system.url, headers={"x-tenant": tenant}) as client:
        answer = await ask(client, asked(prompt, "same question", **fields))
    assert answer.status == 200
    return answer


async def test_tenants_never_share_predicted_or_real_cached_tokens(system: System) -> None:
    """Not even with the salt of the other in the body."""
    prompt = text(600, seed=71)
    salts = TrustDomains(TrustPolicy.model_validate(TRUST))
    for tenant in ("acme", "globex"):
        first = await asks(system, tenant, prompt, cache_salt=salts.salt("acme"))
        assert (first.predicted, first.cached) == (0, 0)
        for own in ("acme", "globex", "zoe"):
            again = await asks(system, tenant, prompt, cache_salt=salts.salt(own))
            assert again.cached >= first.prompt_tokens - 2 * BLOCK_TOKENS
            assert abs(again.predicted - again.cached) <= BLOCK_TOKENS


async def test_a_group_shares(system: System) -> None:
    prompt = text(600, seed=72)
    await asks(system, "ada", prompt)
    assert (await asks(system, "bob", prompt)).cached > 500
    assert (await asks(system, "eve", prompt)).cached == 0


async def test_a_compressed_body_is_refused(system: System) -> None:
    async with client_for(system.url, headers={"x-tenant": "acme"}) as client:
        response: httpx.Response = await client.post(
            "/v1/chat/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"}
        )
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "uneditable_body"
