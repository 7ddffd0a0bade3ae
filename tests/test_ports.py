"""What the gRPC ports take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import grpc

from extproc.api import SERVICE, SchedulerService
from extproc.generated.kvgate.v1 import scheduler_pb2 as pb
from extproc.ports import server_options
from tests.support.builders import Fleet
from tests.support.scheduler_api import Clock, desk_of

BURST = 3_200
"""gRPC's own limit of calls that wait for a handler is 1,000, and 3,000 without exception."""


async def test_a_burst_waits_for_the_event_loop_and_none_is_dropped() -> None:
    desk = desk_of(Fleet(workers=1).scheduler, Clock())
    server = grpc.aio.server(options=server_options(1_000_000))
    server.add_generic_rpc_handlers((SchedulerService(desk).handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    call = channel.unary_unary(
        f"/{SERVICE}/Renew",
        request_serializer=pb.RenewRequest.SerializeToString,
        response_deserializer=pb.RenewResponse.FromString,
    )

    def burst() -> list[grpc.Future]:
        grpc.channel_ready_future(channel).result(10)
        return [call.future(pb.RenewRequest(lease="none"), timeout=60) for _ in range(BURST)]

    def answers(calls: list[grpc.Future]) -> Counter[str]:
        return Counter(each.code().name for each in calls)

    try:
        sending = asyncio.get_running_loop().run_in_executor(None, burst)
        await asyncio.sleep(0.5)
        time.sleep(1.5)  # noqa: ASYNC251  # the event loop is busy while the calls come
        got = await asyncio.to_thread(answers, await sending)
    finally:
        channel.close()
        await server.stop(0)
    assert got == {"OK": BURST}
