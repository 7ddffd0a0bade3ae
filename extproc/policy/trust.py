"""Whose requests may share what engines have cached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from extproc.policy.admission import RuleName
from extproc.policy.base import Section
from extproc.policy.identity import TenantName

MIN_KEY_BYTES = 16


class TrustPolicy(Section):
    """Whose requests may share cached prefixes. Whoever shares can tell by the time to first
    token whether another has asked the same before; whoever does not gains nothing from others'
    prefixes."""

    isolate: Literal["off", "tenants"] = "off"
    """`tenants`: each tenant, and each of `groups`, shares with itself alone: `cache_salt` in
    the body is replaced by one derived from its name, and bodies that cannot be edited are
    refused. `off`: the client's own `cache_salt` counts."""
    key: SecretStr | None = None
    """Secret from which salts are derived, at least 16 bytes; the same for all schedulers.
    Another one makes every cached prefix useless at once."""
    key_file: Path | None = None
    """File that holds the secret, in place of `key`; space around it is no part of it."""
    groups: dict[RuleName, Annotated[tuple[TenantName, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Tenants that trust one another and share, by the group's name."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        given = [self.key is not None, self.key_file is not None]
        if all(given) or (self.isolate != "off" and not any(given)):
            raise ValueError("needs exactly one of key, key_file")
        if self.key is not None:
            check_key(self.key)
        return self

    @model_validator(mode="after")
    def _groups_are_apart(self) -> Self:
        seen: dict[str, str] = {}
        for group, tenants in self.groups.items():
            for tenant in tenants:
                if tenant in seen:
                    raise ValueError(f"tenant {tenant!r} is in {seen[tenant]!r} and {group!r}")
                seen[tenant] = group
        return self


def check_key(key: SecretStr) -> None:
    """A key is long enough to be one.

    Raises:
        ValueError: it is not; the message does not show it.
    """
    if len(key.get_secret_value().encode()) < MIN_KEY_BYTES:
        raise ValueError(f"the key has fewer than {MIN_KEY_BYTES} bytes")
