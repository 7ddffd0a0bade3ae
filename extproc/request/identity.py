"""``IdentityReader``: whose request this is, how urgent, and how long it may take.

Tenant and class come from sources that the policy trusts; lane and times are the client's
to choose within what its tenant may. API keys are hashed here and forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from extproc.errors import InvalidIdentity, UnknownTenant
from extproc.policy import (
    IdentityPolicy,
    IdentitySource,
    TenantClassPolicy,
    TenantPolicy,
    TenantSource,
)
from extproc.policy.identity import (
    ANONYMOUS,
    DEFAULT_CLASS,
    KEY_TENANT_PREFIX,
    TENANT_NAME_PATTERN,
)

DRY_RUN_HEADER = "x-kvgate-dry-run"
MAX_HEADER_CHARS = 8_192
"""Longer header values reach nobody here whole; no API key may have that length."""

MetadataPath: TypeAlias = tuple[str, ...]
"""Namespace of Envoy's filter metadata, then the keys down to a value."""

_TENANT_NAME = re.compile(TENANT_NAME_PATTERN)
_BEARER = re.compile(r"^bearer(?: +|$)", re.IGNORECASE)
_MILLISECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?", re.ASCII)
_KEY_NAME_BYTES = 6
_SWITCH = {"1": True, "true": True, "0": False, "false": False, "": False}


class Identity(msgspec.Struct, frozen=True):
    """Whose request this is, and what it asks of admission. Times are from arrival."""

    tenant: str = ANONYMOUS
    tenant_class: str = DEFAULT_CLASS
    lane: str = "online"
    deadline_s: float | None = None
    ttft_budget_s: float | None = None
    max_queue_time_s: float | None = None
    """Longest wait in the queue; 0 never queues."""
    dry_run: bool = False
    """Tell the decision and send nothing on."""


DEFAULT_IDENTITY = Identity()
"""Nobody in particular."""


class _Found(NamedTuple):
    """A value and the header or metadata path that it stood in."""

    where: str
    value: str


class IdentityReader:
    """Reads identities by one policy.

    Args:
        lanes: every lane there is; the first is the default.
    """

    def __init__(
        self,
        policy: IdentityPolicy,
        tenants: Sequence[TenantPolicy],
        lanes: Sequence[str],
        classes: Sequence[TenantClassPolicy] = (),
    ) -> None:
        self._policy = policy
        self._lanes = tuple(lanes)
        self._tenants = {each.name: each for each in tenants}
        self._classes = {each.name: each for each in classes}
        self._by_key = {key: each.name for each in tenants for key in each.api_key_sha256}
        secret = policy.api_key_hash_secret
        self._secret = secret.get_secret_value().encode() if secret else b""
        sources = [*policy.tenant, *policy.tenant_class, *policy.lane]
        sources += [*policy.deadline_ms, *policy.ttft_budget_ms, *policy.max_queue_ms]
        keys = [name for source in policy.tenant for name in source.api_key]
        named = [source.header for source in sources if source.header is not None]
        self.headers: frozenset[str] = frozenset([*named, *keys, DRY_RUN_HEADER])
        """Headers that ``read`` wants; one that came twice with its values joined by commas,
        which no good value has."""
        self.metadata_paths: frozenset[MetadataPath] = frozenset(
            _path(source) for source in sources if source.metadata is not None
        )
        """Metadata that ``read`` wants."""

    def read(self, headers: Mapping[str, str], metadata: Mapping[MetadataPath, Any]) -> Identity:
        """Identity of a request.

        Raises:
            InvalidIdentity: a value is not what it should be; ``param`` names its place.
            UnknownTenant: the tenant has no entry and the policy wants one.
        """
        policy = self._policy
        name = self._tenant(headers, metadata)
        tenant = self._tenants.get(name)
        if tenant is None and policy.unknown_tenants == "refuse":
            raise UnknownTenant("This service is for known tenants only.")
        class_name = tenant.tenant_class if tenant else None
        if class_name is None:
            class_name = self._class(headers, metadata)
        return Identity(
            tenant=name,
            tenant_class=class_name,
            lane=self._lane(tenant, class_name, headers, metadata),
            deadline_s=self._time_s(_found(policy.deadline_ms, headers, metadata)),
            ttft_budget_s=self._time_s(_found(policy.ttft_budget_ms, headers, metadata)),
            max_queue_time_s=self._time_s(
                _found(policy.max_queue_ms, headers, metadata), zero=True
            ),
            dry_run=_dry_run(headers.get(DRY_RUN_HEADER, "")),
        )

    def _tenant(self, headers: Mapping[str, str], metadata: Mapping[MetadataPath, Any]) -> str:
        for source in self._policy.tenant:
            if source.api_key:
                key = _api_key(source, headers)
                if key is not None:
                    return self._tenant_of_key(key)
            found = _found((source,), headers, metadata)
            if found is not None:
                if not _TENANT_NAME.fullmatch(found.value):
                    raise _invalid(found.where, "names no possible tenant")
                return found.value
        return ANONYMOUS

    def _tenant_of_key(self, key: bytes) -> str:
        known = self._by_key.get(hashlib.sha256(key).hexdigest())
        if known is not None:
            return known
        return KEY_TENANT_PREFIX + hmac.digest(self._secret, key, "sha256")[:_KEY_NAME_BYTES].hex()

    def _class(self, headers: Mapping[str, str], metadata: Mapping[MetadataPath, Any]) -> str:
        found = _found(self._policy.tenant_class, headers, metadata)
        if found is None:
            return DEFAULT_CLASS
        if found.value != DEFAULT_CLASS and found.value not in self._classes:
            raise _invalid(found.where, "names no known tenant class")
        return found.value

    def _lane(
        self,
        tenant: TenantPolicy | None,
        class_name: str,
        headers: Mapping[str, str],
        metadata: Mapping[MetadataPath, Any],
    ) -> str:
        terms = self._classes.get(class_name)
        allowed = (tenant and tenant.lanes) or (terms and terms.lanes) or self._lanes
        found = _found(self._policy.lane, headers, metadata)
        if found is None:
            default = (terms and terms.default_lane) or self._lanes[0]
            return default if default in allowed else allowed[0]
        lane = self._policy.objectives.get(found.value, found.value)
        if lane not in allowed:
            raise _invalid(found.where, "names no lane that this tenant may use")
        return lane

    def _time_s(self, found: _Found | None, *, zero: bool = False) -> float | None:
        if found is None:
            return None
        longest_s = self._policy.max_time_s
        if _MILLISECONDS.fullmatch(found.value):
            time_s = float(found.value) / 1000
            if time_s <= longest_s and (zero or time_s > 0):
                return time_s
        least = "from 0" if zero else "over 0 and"
        raise _invalid(found.where, f"must be milliseconds {least} up to {longest_s * 1000:.0f}")


def _found(
    sources: Sequence[IdentitySource],
    headers: Mapping[str, str],
    metadata: Mapping[MetadataPath, Any],
) -> _Found | None:
    """The first value there is; an empty one is none."""
    for source in sources:
        if source.header is not None:
            where, value = source.header, headers.get(source.header, "").strip(" \t")
        elif source.metadata is not None:
            path = _path(source)
            where = "/".join(path)
            value = _text(where, metadata.get(path))
        else:
            continue
        if value:
            return _Found(where, value)
    return None


def _path(source: IdentitySource) -> MetadataPath:
    where = source.metadata
    return () if where is None else (where.namespace, *where.path)


def _text(where: str, value: Any) -> str:
    """A metadata value as text; claims may be numbers, which Envoy keeps as floats."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str):
        return value.strip(" \t")
    raise _invalid(where, "must be a string or a whole number")


def _api_key(source: TenantSource, headers: Mapping[str, str]) -> bytes | None:
    for name in source.api_key:
        value = headers.get(name, "")
        if len(value) >= MAX_HEADER_CHARS or "," in value:
            raise _invalid(name, "must hold one API key")
        key = _BEARER.sub("", value.strip(" \t"))
        if key:
            return key.encode("utf-8", "replace")
    return None


def _dry_run(value: str) -> bool:
    switch = _SWITCH.get(value.strip(" \t").lower())
    if switch is None:
        raise _invalid(DRY_RUN_HEADER, "must be 1 or 0")
    return switch


def _invalid(where: str, problem: str) -> InvalidIdentity:
    return InvalidIdentity(f"'{where}' {problem}.", param=where)
