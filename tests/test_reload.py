"""The policy file read again while requests run and wait."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext

from extproc.call import Call
from extproc.desk import Desk
from extproc.errors import PolicyError
from extproc.policy import load_policy
from extproc.reload import PolicyReloader
from tests.support.builders import MODEL, join, keyer, profile
from tests.support.builders import scheduler as scheduler_of
from tests.support.scheduler_api import Clock, desk_of

SECRET = "SECRET-CANARY-456"


class Reloads:
    """A scheduler of one file, with one worker."""

    def __init__(self, path: Path, **policy: Any) -> None:
        self.path = path
        self.write(**policy)
        loaded = load_policy(path)
        keyers = {pool.model: keyer(pool=pool) for pool in loaded.pools}
        scheduler = scheduler_of(*loaded.pools, keyers=keyers)
        self.clock = Clock()
        self.desk: Desk = desk_of(scheduler, self.clock)
        self.desk.adopt(loaded)
        join(scheduler.models[MODEL].pool, 0)
        self.reloader = PolicyReloader(path, self.desk)

    def write(self, *, pool: Any = (), **policy: Any) -> None:
        document = {"pools": [{"model": MODEL, **dict(pool)}], **policy}
        self.path.write_text(yaml.safe_dump(document))

    def counted(self, result: str) -> float:
        return self.desk.metrics.policy_reloads.labels(result)._value.get()


@pytest.fixture
def reloads(tmp_path: Path) -> Reloads:
    return Reloads(tmp_path / "policy.yaml", pool={"admission": {"max_concurrency": 2}})


async def test_new_limits_hold_for_what_runs_and_waits(reloads: Reloads) -> None:
    desk = reloads.desk
    first, second = [await desk.arrive(profile()) for _ in range(2)]
    third = await desk.arrive(profile())
    turn = asyncio.create_task(desk.turn(third))
    await asyncio.sleep(0)
    before = desk.policy.digest

    reloads.write(pool={"admission": {"max_concurrency": 3}})
    assert await reloads.reloader.reload() == "applied"
    assert (await turn).id == third.id
    assert desk.policy.digest != before

    reloads.write(pool={"admission": {"max_concurrency": 1, "max_queue": 0}})
    await reloads.reloader.reload()
    desk.finish(first)
    desk.finish(second)
    assert desk.scheduler.admission.running == 1
    with pytest.raises(Exception, match="no room"):
        await desk.arrive(profile())
    desk.finish(third)
    assert (await desk.arrive(profile())).decision is not None
    assert reloads.counted("applied") == 2


async def test_the_same_file_changes_nothing(reloads: Reloads) -> None:
    before = reloads.desk.policy
    assert await reloads.reloader.reload() == "unchanged"
    assert reloads.desk.policy is before
    assert reloads.counted("unchanged") == 1


@pytest.mark.parametrize(
    "bad",
    [
        "pools: [",
        f'identity: {{api_key_hash_secret: "{SECRET}',
        f"identity: {{api_key_hash_secret: *{SECRET}}}",
        f"identity: {{api_key_hash_secret: !{SECRET} x}}",
        f"pools: [{{model: {MODEL}}}]\nidentity: {{api_key_hash_secert: {SECRET}}}",
        "pools: []",
    ],
)
async def test_a_bad_file_keeps_the_policy_and_no_secret_is_logged(
    reloads: Reloads, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, identities = reloads.desk.policy, reloads.desk.identities
    reloads.path.write_text(bad)
    with pytest.raises(PolicyError) as raised:
        await reloads.reloader.reload()
    assert SECRET not in str(raised.value)
    assert reloads.desk.policy is before
    assert reloads.desk.identities is identities
    assert reloads.counted("refused") == 1
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    facts = record.facts  # type: ignore[attr-defined]
    assert facts["policy"] == before.digest
    assert SECRET not in str(facts)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": {"block_size_tokens": 32}},
        {"pool": {"routing": {"profile": "random"}}},
        {"requests": {"max_body_bytes": 1}},
        {"reports": {"interval_s": 0.5}},
    ],
)
async def test_what_needs_a_restart_is_refused_as_a_whole(
    reloads: Reloads, changes: dict[str, Any]
) -> None:
    before = reloads.desk.policy
    reloads.write(**changes, admission={"default_output_tokens": 7})
    with pytest.raises(PolicyError, match="restart"):
        await reloads.reloader.reload()
    assert reloads.desk.policy is before
    assert reloads.desk.scheduler.work.default_output_tokens == 256


async def test_a_file_that_is_gone_and_no_file_at_all_are_refused(reloads: Reloads) -> None:
    reloads.path.unlink()
    with pytest.raises(PolicyError, match="No such file"):
        await reloads.reloader.reload()
    with pytest.raises(PolicyError, match="without a policy file"):
        await PolicyReloader(None, reloads.desk).reload()


async def test_waiting_requests_go_on_with_their_tenants_new_weight(reloads: Reloads) -> None:
    desk = reloads.desk
    tickets = [await desk.arrive(profile()) for _ in range(3)]
    waiting = tickets[2].demand
    assert waiting is not None
    assert waiting.weight == 1.0
    reloads.write(
        pool={"admission": {"max_concurrency": 2}}, tenants=[{"name": "anonymous", "weight": 5.0}]
    )
    await reloads.reloader.reload()
    assert waiting.weight == 5.0
    flows = desk.scheduler.admission.pools[MODEL].queue.lanes["online"].flows
    assert flows["anonymous"].weight == 5.0


class _Stream:
    """Envoy's end of a stream, message by message."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: list[Any] = []

    async def read(self) -> Any:
        return await self.messages.get()

    async def write(self, answer: Any) -> None:
        self.answers.append(answer)


async def test_a_request_is_read_by_the_policy_that_saw_its_headers(tmp_path: Path) -> None:
    """Headers of the old sources were collected; the new ones would find nobody there."""
    reloads = Reloads(tmp_path / "policy.yaml", identity={"tenant": [{"header": "x-old"}]})
    stream = _Stream()
    call = Call(reloads.desk, stream)  # type: ignore[arg-type]
    running = asyncio.create_task(call.run())
    pairs = {":path": "/v1/chat/completions", ":method": "POST", "x-old": "acme"}
    headers = HeaderMap(
        headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in pairs.items()]
    )
    stream.messages.put_nowait(ext.ProcessingRequest(request_headers={"headers": headers}))
    await asyncio.sleep(0)

    reloads.write(
        identity={"tenant": [{"header": "x-new"}], "unknown_tenants": "refuse"},
        tenants=[{"name": "globex"}],
    )
    await reloads.reloader.reload()
    body = b'{"model": "sim", "messages": [{"role": "user", "content": "hi"}]}'
    piece = {"body": body, "end_of_stream": True}
    stream.messages.put_nowait(ext.ProcessingRequest(request_body=piece))
    while not stream.answers:
        await asyncio.sleep(0.001)
    (lease,) = reloads.desk.scheduler.admission.leases
    assert lease.demand.tenant == "acme"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    call.end()


async def test_six_hundred_reloads_leak_nothing(reloads: Reloads) -> None:
    """CO1."""
    desk = reloads.desk
    held = [await desk.arrive(profile()) for _ in range(2)]
    turns = [asyncio.create_task(desk.turn(await desk.arrive(profile()))) for _ in range(20)]
    await asyncio.sleep(0)

    async def reload(number: int) -> None:
        rules = [{"name": f"rule-{number % 7}", "concurrency": 9, "per": ["tenant"]}]
        admission = {"max_concurrency": 2, "max_queue": 30 + number % 3}
        reloads.write(
            pool={"admission": admission},
            admission={"rules": rules},
            tenants=[{"name": f"tenant-{number % 5}"}],
        )
        await reloads.reloader.reload()
        desk.wake(desk.scheduler.tick(0.0))

    async def objects_after(reloads: range) -> int:
        for number in reloads:
            await reload(number)
        gc.collect()
        return len(gc.get_objects())

    tasks = len(asyncio.all_tasks())
    early = await objects_after(range(105))
    late = await objects_after(range(105, 600))
    assert abs(late - early) < 200, "objects grow with reloads"
    assert len(asyncio.all_tasks()) == tasks
    assert reloads.counted("applied") == 600

    admission = desk.scheduler.admission
    assert (admission.running, admission.waiting) == (2, 20)
    assert len(desk.waiters) == 20
    for ticket in held:
        desk.finish(ticket)
    for turn in asyncio.as_completed(turns):
        ticket = desk.scheduler.ticket((await turn).id)
        assert ticket is not None
        desk.finish(ticket)
    assert (admission.running, admission.waiting) == (0, 0)
    for pool, rule in admission.rules():
        assert all(counter.requests == 0 for counter in rule.counters.values()), (pool, rule.name)
