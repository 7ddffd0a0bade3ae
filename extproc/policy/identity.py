"""Who a request belongs to: trusted sources, tenants and their classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from extproc.policy.admission import RuleName
from extproc.policy.base import PositiveFloat, Section

ANONYMOUS = "anonymous"
"""Tenant of requests that no source names one for."""
DEFAULT_CLASS = "default"
"""Class of tenants that nothing gives another; it needs no entry."""
KEY_TENANT_PREFIX = "key-"
"""Tenants of unknown API keys are named so, and no entry of the policy may be."""
TENANT_NAME_PATTERN = r"^[A-Za-z0-9._:@/|+=~-]{1,128}$"

TenantName = Annotated[str, Field(pattern=TENANT_NAME_PATTERN)]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Sha256Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MetadataSource(Section):
    """A value in the dynamic metadata that an earlier Envoy filter set for the request."""

    namespace: Annotated[str, Field(min_length=1)]
    """Filter metadata namespace, `envoy.filters.http.jwt_authn` say; Envoy must forward it
    to kvgate (`metadata_options.forwarding_namespaces`)."""
    path: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """Keys down to the value, `[payload, sub]` say."""


class IdentitySource(Section):
    """Where to find a value; exactly one field is given."""

    header: HeaderName | None = None
    """A request header, in lower case. For tenants and classes: one that the gateway sets
    and takes out of what clients send, as the generated configuration does with
    `x-kvgate-`, `x-llm-d-` and `x-gateway-inference-`. Sent twice it is refused."""
    metadata: MetadataSource | None = None
    """Dynamic metadata of the request."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(type(self).model_fields)}")
        return self


class TenantSource(IdentitySource):
    """Where to find the tenant; exactly one field is given."""

    api_key: tuple[HeaderName, ...] = ()
    """Headers that may hold an API key, with or without `Bearer`; the first that does
    counts. kvgate keeps neither key nor header: a key is known by its SHA-256."""


class TenantPolicy(Section):
    """What is agreed with one tenant."""

    name: TenantName
    """Name that the sources give; `anonymous` is everybody without one."""
    tenant_class: RuleName | None = None
    """Its class, whatever the sources say; without one theirs counts, or `default`."""
    weight: PositiveFloat | None = None
    """Share of work beside other tenants of its lane; without one its class's."""
    api_key_sha256: tuple[Sha256Hex, ...] = ()
    """SHA-256 of each API key that is this tenant's, in hex."""
    lanes: tuple[RuleName, ...] = ()
    """Lanes it may use; empty: those of its class."""


class TenantClassPolicy(Section):
    """What is agreed with all tenants of a class."""

    name: RuleName
    """Name that tenants and sources use."""
    weight: PositiveFloat = 1.0
    """Share of work of each of its tenants beside others of their lane."""
    default_lane: RuleName | None = None
    """Lane of requests that name none; without one the policy's first lane."""
    lanes: tuple[RuleName, ...] = ()
    """Lanes its tenants may use; empty: all."""


class IdentityPolicy(Section):
    """Where a request's tenant, lane and times come from. In each list the first source that
    has a value counts, and a wrong value is refused, not passed over."""

    tenant: tuple[TenantSource, ...] = ()
    """Sources of the tenant. Without any, everybody is `anonymous`: only you know which header
    clients cannot set."""
    tenant_class: tuple[IdentitySource, ...] = ()
    """Sources of the class of tenants whose entry names none."""
    unknown_tenants: Literal["allow", "refuse"] = "allow"
    """`refuse`: a tenant without an entry gets 401, `anonymous` included."""
    api_key_hash_secret: SecretStr | None = None
    """Secret in the names `key-...` of unknown API keys, so that nobody can try out keys on
    logs and metrics. Must be the same for all schedulers."""
    lane: tuple[IdentitySource, ...] = (IdentitySource(header="x-kvgate-lane"),)
    """Sources of the lane; clients may choose among those that their tenant may use."""
    objectives: dict[str, RuleName] = Field(default_factory=dict)
    """Further names of lanes: an Endpoint Picker's objectives, where a source of `lane` is
    its objective header."""
    deadline_ms: tuple[IdentitySource, ...] = (IdentitySource(header="x-kvgate-deadline-ms"),)
    """Sources of the time from arrival after which the answer is of no use."""
    ttft_budget_ms: tuple[IdentitySource, ...] = (IdentitySource(header="x-kvgate-ttft-budget-ms"),)
    """Sources of the time from arrival by which the first token is wanted."""
    max_queue_ms: tuple[IdentitySource, ...] = (IdentitySource(header="x-kvgate-max-queue-ms"),)
    """Sources of the longest wait in kvgate's queue; 0 never queues."""
    max_time_s: PositiveFloat = 3_600.0
    """A longer deadline, budget or queue time is refused."""


def check_tenants(
    tenants: Sequence[TenantPolicy],
    classes: Sequence[TenantClassPolicy],
    objectives: dict[str, str],
    lanes: Sequence[str],
) -> None:
    """Names are defined once and used as defined.

    Raises:
        ValueError: the message names the entry.
    """
    _once("tenant", [tenant.name for tenant in tenants])
    _once("tenant class", [each.name for each in classes])
    _once("API key", [key for tenant in tenants for key in tenant.api_key_sha256])
    known = {DEFAULT_CLASS, *(each.name for each in classes)}
    for tenant in tenants:
        if tenant.name.startswith(KEY_TENANT_PREFIX):
            raise ValueError(f"tenant {tenant.name!r}: {KEY_TENANT_PREFIX} is for unknown API keys")
        if tenant.tenant_class is not None and tenant.tenant_class not in known:
            raise ValueError(f"tenant {tenant.name!r} is of unknown class {tenant.tenant_class!r}")
        _known(f"tenant {tenant.name!r}", tenant.lanes, lanes)
    for each in classes:
        _known(f"tenant class {each.name!r}", each.lanes, lanes)
        if each.default_lane is not None:
            _known(f"tenant class {each.name!r}", (each.default_lane,), each.lanes or lanes)
    for name, lane in objectives.items():
        _known(f"objective {name!r}", (lane,), lanes)


def _once(what: str, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"{what} {name!r} is defined twice")


def _known(who: str, used: Sequence[str], lanes: Sequence[str]) -> None:
    for lane in used:
        if lane not in lanes:
            raise ValueError(f"{who} uses lane {lane!r}, which is not among {', '.join(lanes)}")
