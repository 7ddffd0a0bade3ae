"""The policy: every number that steers kvgate, validated once, frozen afterwards.

One YAML file, units in the names. Unknown fields are errors, and every message names the
field and the value it does not like.
"""

from __future__ import annotations

import ipaddress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from xxhash import xxh3_64_hexdigest

from extproc.errors import PolicyError

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ModelName = Annotated[str, Field(min_length=1)]


def parse_address(text: str) -> tuple[str, int]:
    """Split ``ip:port`` (IPv6 in brackets) into a normal-form ip and a port.

    Names are refused: Envoy's destination header takes addresses only.

    Raises:
        ValueError: anything else.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
        number = int(port) if port.isascii() and port.isdigit() else 0
    except ValueError:
        raise ValueError(f"{text!r} is not ip:port") from None
    if not colon or bracketed != (ip.version == 6) or not 0 < number < 65_536:
        raise ValueError(f"{text!r} is not ip:port")
    return str(ip), number


def normal_address(text: str) -> str:
    """Normal form of ``ip:port``, as Envoy prints it.

    Raises:
        ValueError: not an address.
    """
    host, port = parse_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Address = Annotated[str, AfterValidator(normal_address)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DigestPolicy(_Section):
    """Size and pace of the Bloom digests; one for the whole pool so that columns align."""

    capacity_blocks: Annotated[int, Field(gt=0, le=16_777_216)] = 65_536
    """Keys a worker's digest may hold; at least the engine's number of KV blocks."""
    error_rate: Annotated[float, Field(ge=1e-6, le=0.5)] = 0.01
    """False-positive rate at capacity."""
    snapshot_interval_s: PositiveFloat = 30.0
    """A whole digest at least this often; deltas in between."""
    delta_interval_s: PositiveFloat = 0.2
    """New keys are sent at most this often."""
    max_age_s: PositiveFloat = 90.0
    """An older digest gives no cache credit."""


class OverlayPolicy(_Section):
    """Credit for prefixes just routed, before the worker's digest tells of them."""

    ttl_s: PositiveFloat = 2.0
    """Shortest life of an entry where the worker sends digests; the longest is twice that.
    A longer one goes on claiming prompts that the engine has evicted."""
    ttl_without_digest_s: PositiveFloat = 300.0
    """The same where it sends none: the overlay is then all there is."""
    max_keys_per_worker: PositiveInt = 131_072
    """Keys kept; beyond it the older generation ends early."""


class RoutingPolicy(_Section):
    """Weights of the ``balanced`` cost, all in tokens of prefill work; lowest cost wins."""

    uncached_weight: NonNegativeFloat = 3.0
    """Cost of each prompt token that the worker would have to compute."""
    pending_prefill_weight: NonNegativeFloat = 1.0
    """Cost of each token sent to the worker whose request has no first token yet."""
    running_cost_tokens: NonNegativeFloat = 120.0
    """Cost of each request running or waiting on the worker."""
    min_prefix_tokens: NonNegativeInt = 0
    """A shorter cached prefix gives no credit."""
    host_hit_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """What a block in the engine's host memory is worth beside one where it computes."""
    endpoints: Annotated[int, Field(ge=1, le=16)] = 3
    """Length of the ordered list that Envoy's retries walk."""
    max_in_flight_per_worker: PositiveInt = 256
    """Slots of a worker that does not report how many sequences it runs."""
    suspect_s: NonNegativeFloat = 2.0
    """A worker that Envoy had to retry away from is a last resort for this long."""


class AdmissionPolicy(_Section):
    """Global admission of one pool."""

    max_concurrency: PositiveInt = 1_024
    """Requests of this pool running at once, over all workers."""
    max_queue: NonNegativeInt = 512
    """Requests that may wait; 0 never queues."""
    max_queue_time_s: PositiveFloat = 30.0
    """A request that waited this long gets 429."""


class PoolPolicy(_Section):
    """The workers that serve one base model."""

    model: ModelName
    """Name that requests use; also the pool's name in metrics."""
    aliases: tuple[ModelName, ...] = ()
    """Further names of the same model."""
    adapters: tuple[ModelName, ...] = ()
    """Adapter names that the pool serves; each has keys of its own."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer directory or tokenizer.json; without one, load alone routes."""
    chat_template: Path | None = None
    """A Jinja file in place of the tokenizer's own template."""
    model_revision: str = ""
    """Part of every block key; change it when the weights change under the same name."""
    block_size_tokens: Annotated[int, Field(gt=0, le=4_096)] = 16
    """The engine's `--block-size`; a worker with another one gets no cache credit."""
    workers: tuple[Address, ...] = ()
    """Workers without an agent: always thought ready, balanced by kvgate's own counts."""
    digest: DigestPolicy = DigestPolicy()
    """What agents tell of their caches."""
    overlay: OverlayPolicy = OverlayPolicy()
    """What routing itself expects in the caches."""
    routing: RoutingPolicy = RoutingPolicy()
    """How a worker is chosen."""
    admission: AdmissionPolicy = AdmissionPolicy()
    """How much may run and wait."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every model name that a request may use for this pool."""
        return (self.model, *self.aliases, *self.adapters)

    @model_validator(mode="after")
    def _workers_are_distinct(self) -> Self:
        for number, address in enumerate(self.workers):
            if address in self.workers[:number]:
                raise ValueError(f"worker {address!r} is listed twice")
        return self


class RequestPolicy(_Section):
    """Bounds on what one request may be."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """A longer body gets 413."""
    max_decoded_bytes: PositiveInt = 64 * 1024 * 1024
    """Cap on what a compressed body may expand to before kvgate stops reading it."""
    max_prompts: PositiveInt = 16
    """Prompts of a batch that are looked up; the rest is estimated."""
    media_part_tokens: PositiveInt = 576
    """Charge for an image, audio or video part, whose real size only the engine knows."""


class TokenizationPolicy(_Section):
    """Where and how much kvgate tokenises."""

    inline_max_chars: PositiveInt = 8_192
    """Cold text up to this long is tokenised on the event loop (about 3 ms)."""
    threads: PositiveInt = 1
    """Threads for longer cold text."""
    max_pending: PositiveInt = 64
    """Cold prompts waiting for a thread; beyond it a request is routed by load."""
    timeout_s: PositiveFloat = 5.0
    """A prompt not tokenised by then is routed by load."""
    max_prompt_chars: PositiveInt = 2_097_152
    """Only so much of a prompt is tokenised; the rest is estimated."""
    segment_cache_bytes: PositiveInt = 128 * 1024 * 1024
    """Token ids kept by text, per pool."""
    boundary_cache_bytes: PositiveInt = 64 * 1024 * 1024
    """Block keys kept by conversation prefix, per pool."""


class ReportPolicy(_Section):
    """What silence of an agent means."""

    interval_s: PositiveFloat = 1.0
    """Pace of the agents' load reports."""
    stale_after_s: PositiveFloat = 3.0
    """Without a report for this long a worker is a last resort."""
    lost_after_s: PositiveFloat = 15.0
    """Without a report for this long a worker leaves the pool."""
    ready_timeout_s: PositiveFloat = 10.0
    """At start, serve degraded if no worker has reported by then."""
    max_workers: PositiveInt = 4_096
    """Workers of one pool; further agents are refused."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.interval_s <= self.stale_after_s <= self.lost_after_s:
            raise ValueError("needs interval_s <= stale_after_s <= lost_after_s")
        return self


class Policy(_Section):
    """The whole policy file."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of this format."""
    pools: Annotated[tuple[PoolPolicy, ...], Field(min_length=1)]
    """One entry for each base model."""
    requests: RequestPolicy = RequestPolicy()
    """Bounds on requests."""
    tokenization: TokenizationPolicy = TokenizationPolicy()
    """Where text becomes tokens."""
    reports: ReportPolicy = ReportPolicy()
    """Agents' pace and silence."""
    response_headers: bool = True
    """Tell clients the worker, cached tokens, queue wait and decision id."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        seen: set[str] = set()
        for pool in self.pools:
            for name in pool.names:
                if name in seen:
                    raise ValueError(f"model name {name!r} is used twice")
                seen.add(name)
        return self

    @cached_property
    def digest(self) -> str:
        """Short hash of the content, for logs and metrics."""
        return xxh3_64_hexdigest(self.model_dump_json().encode())


def load_policy(path: Path) -> Policy:
    """Read and validate a policy file; relative paths in it start at its folder.

    Raises:
        PolicyError: unreadable, not YAML, or invalid.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: not YAML: {error}") from error
    return parse_policy(data, base=path.parent, source=str(path))


def parse_policy(data: Any, *, base: Path | None = None, source: str = "policy") -> Policy:
    """Validate policy data that YAML has already decoded.

    Raises:
        PolicyError: one line for each wrong field.
    """
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise PolicyError("\n".join(_complaints(error, source))) from error
    if base is None:
        return policy
    pools = tuple(pool.model_copy(update=_absolute(pool, base)) for pool in policy.pools)
    return policy.model_copy(update={"pools": pools})


def _absolute(pool: PoolPolicy, base: Path) -> dict[str, Path]:
    paths = {"tokenizer": pool.tokenizer, "chat_template": pool.chat_template}
    return {name: (base / path).resolve() for name, path in paths.items() if path is not None}


def _complaints(error: ValidationError, source: str) -> list[str]:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "(top level)"
        given = item["input"]
        shown = "" if isinstance(given, dict | list | BaseModel) else f" (got {given!r})"
        lines.append(f"{source}: {field}: {item['msg']}{shown}")
    return lines
