"""``kvgate estimate``: what a scheduler would decide for a request, and why.

Ends with 0 where the request would run or wait, 1 where it would be refused, 2 where nobody
could be asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from extproc.generated.kvgate.v1 import scheduler_pb2 as pb

_METHOD = "/kvgate.v1.Scheduler/Estimate"
_WIDTH_IN_FILES = 160

REFUSED = 1
NOT_ASKED = 2


def estimate(server: str, request: pb.InferenceRequest, *, as_json: bool, timeout_s: float) -> int:
    """Ask and show; returns the exit status."""
    err = Console(stderr=True, highlight=False)
    try:
        response = _ask(server, request, timeout_s)
    except grpc.RpcError as error:
        said = f"kvgate estimate: {server}: {error.code().name}: {error.details()}"
        err.print(said, markup=False, soft_wrap=True)
        return NOT_ASKED
    result = response.WhichOneof("result")
    said = getattr(response, result)
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=_WIDTH_IN_FILES)
    if as_json:
        out.out(json.dumps({result: plain(said)}, indent=2), highlight=False)
    else:
        out.print(shown(said) if result == "estimate" else refused(said))
    runs = result == "estimate" and said.verdict in ("allow", "wait")
    return 0 if runs else REFUSED


def request_of(path: str, headers: Iterable[str], body: bytes) -> pb.InferenceRequest:
    """A request with headers given as ``name: value``.

    Raises:
        ValueError: a header without a colon.
    """
    given = []
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"{header!r} is not name:value")
        given.append(pb.Header(key=name.strip(), value=value.strip()))
    return pb.InferenceRequest(path=path, headers=given, body=body)


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON would have it, with numbers as numbers and None for what is absent."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def shown(said: pb.Estimate) -> RenderableType:
    """An estimate for the eye."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(said):
        facts.add_row(Text(name, style="bold"), Text(value))
    terms = sorted({term for worker in said.workers for term in worker.terms})
    workers = Table(box=box.SIMPLE_HEAD, title="workers", title_justify="left")
    workers.add_column("address")
    workers.add_column("takes it")
    for name in ("cost", *terms):
        workers.add_column(name.replace("_", " "), justify="right")
    for worker in said.workers:
        numbers = (worker.cost, *(worker.terms[term] for term in terms))
        cells = (worker.address, _takes(worker), *(f"{number:,.1f}" for number in numbers))
        workers.add_row(*map(Text, cells))
    return Group(facts, workers)


def refused(said: pb.Refusal) -> RenderableType:
    """A refusal for the eye."""
    return Text(f"refused: {said.code} ({said.http_status}): {said.message}", style="red")


def _ask(server: str, request: pb.InferenceRequest, timeout_s: float) -> pb.EstimateResponse:
    with grpc.insecure_channel(server) as channel:
        call = channel.unary_unary(
            _METHOD,
            request_serializer=pb.InferenceRequest.SerializeToString,
            response_deserializer=pb.EstimateResponse.FromString,
        )
        response: pb.EstimateResponse = call(request, timeout=timeout_s)
    return response


def _facts(said: pb.Estimate) -> Iterator[tuple[str, str]]:
    yield "verdict", said.verdict
    yield "reason", said.reason or "-"
    known = said.HasField("expected_wait_s")
    yield "expected wait", f"{said.expected_wait_s:.3g} s" if known else "not known yet"
    if said.HasField("retry_after_s"):
        yield "come back in", f"{said.retry_after_s:.3g} s"
    yield "pool, lane, tenant", f"{said.pool}, {said.lane}, {said.tenant}"
    yield (
        "prompt tokens",
        f"{said.prompt_tokens:,}: {said.cached_tokens:,} cached, {said.uncached_tokens:,} to do",
    )
    yield "expected output", f"{said.output_tokens:,} tokens"
    if said.prefiller:
        yield "prefilled by", said.prefiller


def _takes(worker: pb.WorkerCost) -> str:
    if worker.has_slot:
        return "yes"
    return "full" if worker.ready else "no"


def _value(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.name == "workers":
        return [plain(each) for each in value]
    return dict(value) if field.name == "terms" else value
