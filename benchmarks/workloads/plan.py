"""``Planned``: one request before it is sent, and the file format that holds many.

A prompt is a list of segments. A segment has an id and a length in tokens: the same id is the
same text in every prompt, and a shorter segment is the beginning of a longer one of its id, so
two prompts share exactly the segments that they begin with. docs/benchmarks.md describes the
JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
SegmentId = int | str
MAX_SEGMENT_TOKENS = 131_072
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class PlanError(ValueError):
    """A trace or workload file is wrong; the message names file, line and field."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """``[id, tokens]`` or ``[id, tokens, role]``; a role begins a new message."""

    id: SegmentId
    tokens: Tokens
    role: Role | None = None


class Planned(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request. ``at_s`` counts from the start of the run.

    ``session`` names a conversation (header ``x-session-id``), ``tenant`` and ``lane`` who asks
    and how urgently (``x-kvgate-tenant``, ``x-kvgate-lane``); empty ones are not sent.
    """

    at_s: Seconds
    prompt: Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1)]
    output_tokens: Tokens
    session: str = ""
    tenant: str = ""
    lane: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prompt is to have."""
        return sum(segment.tokens for segment in self.prompt)


def write_plan(path: Path, requests: Iterable[Planned]) -> None:
    """Write kvgate JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    path.write_bytes(encoder.encode_lines(list(requests)))


def read_plan(path: Path) -> list[Planned]:
    """Read kvgate JSON lines, in order of time.

    Raises:
        PlanError: the file cannot be read, or a line of it is wrong.
    """
    decoder = msgspec.json.Decoder(Planned)
    requests = [_decoded(decoder, path, *line) for line in numbered_lines(path)]
    return sorted(requests, key=lambda request: request.at_s)


def numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _decoded(
    decoder: msgspec.json.Decoder[Planned], path: Path, number: int, line: bytes
) -> Planned:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise PlanError(f"{path}:{number}: {error}") from error
