"""The policy file as a whole: reading and validating it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator
from xxhash import xxh3_64_hexdigest

from extproc.errors import PolicyError
from extproc.policy.admission import AdmissionPolicy, RolloutPolicy
from extproc.policy.base import Section
from extproc.policy.identity import (
    DEFAULT_CLASS,
    IdentityPolicy,
    TenantClassPolicy,
    TenantPolicy,
    check_tenants,
)
from extproc.policy.pool import PoolPolicy
from extproc.policy.reports import ReportPolicy
from extproc.policy.requests import RequestPolicy, TokenizationPolicy
from extproc.policy.trust import TrustPolicy, check_key


class Policy(Section):
    """The whole policy file."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of this format."""
    pools: Annotated[tuple[PoolPolicy, ...], Field(min_length=1)]
    """One entry for each base model."""
    requests: RequestPolicy = RequestPolicy()
    """Bounds on requests."""
    tokenization: TokenizationPolicy = TokenizationPolicy()
    """Where text becomes tokens."""
    admission: AdmissionPolicy = AdmissionPolicy()
    """Lanes and quotas over all pools."""
    rollout: RolloutPolicy = RolloutPolicy()
    """What acts and what only watches."""
    identity: IdentityPolicy = IdentityPolicy()
    """Whose a request is and how urgent."""
    tenants: tuple[TenantPolicy, ...] = ()
    """Tenants with terms of their own."""
    tenant_classes: tuple[TenantClassPolicy, ...] = ()
    """Terms of many tenants at once; further names of classes are refused."""
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

    @model_validator(mode="after")
    def _rules_name_known_models(self) -> Self:
        pools = {pool.model for pool in self.pools}
        names = {name for pool in self.pools for name in pool.names}
        for rule in self.admission.rules:
            for model in rule.match.models:
                if model not in pools:
                    raise ValueError(f"rule {rule.name!r} matches unknown model {model!r}")
            for step in rule.degrade:
                if step.model is not None and step.model not in names:
                    raise ValueError(f"rule {rule.name!r} falls back to unknown {step.model!r}")
        return self

    @model_validator(mode="after")
    def _engine_priorities_cover_all_lanes(self) -> Self:
        lanes = {lane.name for lane in self.admission.lanes}
        for pool in self.pools:
            if pool.engine_priority and pool.engine_priority.keys() != lanes:
                wanted = ", ".join(sorted(lanes))
                raise ValueError(f"engine_priority of {pool.model!r} needs the lanes {wanted}")
        return self

    @model_validator(mode="after")
    def _tenants_fit(self) -> Self:
        lanes = [lane.name for lane in self.admission.lanes]
        check_tenants(self.tenants, self.tenant_classes, self.identity.objectives, lanes)
        classes = {DEFAULT_CLASS, *(each.name for each in self.tenant_classes)}
        for rule in self.admission.rules:
            for name in rule.match.tenant_classes:
                if name not in classes:
                    raise ValueError(f"rule {rule.name!r} matches unknown tenant class {name!r}")
        return self

    def tenant_weight(self, tenant: str, tenant_class: str) -> float:
        """A tenant's share of work: its entry's weight, else its class's, else 1."""
        tenants, classes = self._weights
        return tenants.get(tenant) or classes.get(tenant_class, 1.0)

    @cached_property
    def _weights(self) -> tuple[dict[str, float], dict[str, float]]:
        own = {each.name: each.weight for each in self.tenants if each.weight is not None}
        return own, {each.name: each.weight for each in self.tenant_classes}

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
        raise PolicyError(f"{path}: not YAML: {_misread(error)}") from error
    return parse_policy(data, base=path.parent, source=str(path))


def parse_policy(data: Any, *, base: Path | None = None, source: str = "policy") -> Policy:
    """Validate policy data that YAML has already decoded; secrets in files are read.

    Raises:
        PolicyError: one line for each wrong field.
    """
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise PolicyError("\n".join(_complaints(error, source))) from error
    pools = []
    for number, pool in enumerate(policy.pools):
        place = f"{source}: pools.{number}.trust.key_file"
        changes = {"trust": _with_key(pool.trust, base or Path(), place)}
        pools.append(pool.model_copy(update=changes | _absolute(pool, base)))
    return policy.model_copy(update={"pools": tuple(pools)})


def _absolute(pool: PoolPolicy, base: Path | None) -> dict[str, Any]:
    paths = {"tokenizer": pool.tokenizer, "chat_template": pool.chat_template}
    if base is None:
        return {}
    return {name: (base / path).resolve() for name, path in paths.items() if path is not None}


def _with_key(trust: TrustPolicy, base: Path, place: str) -> TrustPolicy:
    """Trust with the secret that its file holds."""
    if trust.key_file is None:
        return trust
    try:
        key = SecretStr((base / trust.key_file).read_text(encoding="utf-8").strip())
        check_key(key)
    except OSError as error:
        raise PolicyError(f"{place}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise PolicyError(f"{place}: not UTF-8") from None
    except ValueError as error:
        raise PolicyError(f"{place}: {error}") from None
    return trust.model_copy(update={"key": key})


def _misread(error: Exception) -> str:
    """What is wrong and where, without the text of the file, which may hold a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    harmless = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
    problem = error.problem if harmless else "an alias or tag that means nothing here"
    return f"{problem} (line {error.problem_mark.line + 1})"


def _complaints(error: ValidationError, source: str) -> list[str]:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "(top level)"
        given = item["input"]
        secret = "api_key_" in field or field.endswith("trust.key")
        hidden = secret or isinstance(given, dict | list | BaseModel)
        shown = "" if hidden else f" (got {given!r})"
        lines.append(f"{source}: {field}: {item['msg']}{shown}")
    return lines
