from __future__ import annotations

import hmac
from typing import Any

import pytest
from pydantic import SecretStr

from extproc.errors import UneditableBody
from extproc.policy import TrustPolicy
from extproc.request.identity import Identity
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.trust import TrustDomains

KEY = "a key of more than 16 bytes"


def domains(**policy: Any) -> TrustDomains:
    return TrustDomains(TrustPolicy(isolate="tenants", key=SecretStr(KEY), **policy))


def of(tenant: str, **changes: Any) -> RequestProfile:
    defaults = {"cache_salt": "the client's", "editable": True}
    return RequestProfile(Endpoint.CHAT, identity=Identity(tenant=tenant), **(defaults | changes))


class TestSalts:
    def test_a_salt_is_the_hmac_of_the_tenants_name(self) -> None:
        wanted = hmac.new(KEY.encode(), b"tenant:acme", "sha256").hexdigest()
        isolated = domains().isolate(of("acme"))
        assert (isolated.cache_salt, isolated.isolated) == (wanted, True)

    def test_the_clients_own_salt_changes_nothing(self) -> None:
        salts = {domains().isolate(of("acme", cache_salt=own)).cache_salt for own in ("", "x")}
        assert len(salts) == 1

    def test_tenants_of_a_group_share_and_nobody_else_does(self) -> None:
        """A tenant named as a group is not in it."""
        grouped = domains(groups={"lab": ("a", "b")})
        a, b, c, lab = (grouped.salt(name) for name in ("a", "b", "c", "lab"))
        assert a == b
        assert len({a, c, lab}) == 3

    def test_another_key_makes_other_salts(self) -> None:
        other = TrustPolicy(isolate="tenants", key=SecretStr(KEY + "!"))
        assert TrustDomains(other).salt("acme") != domains().salt("acme")

    def test_engines_take_it(self) -> None:
        """vLLM: at most 128 characters, no path separators."""
        salt = domains().salt("@/\\")
        assert len(salt) == 64
        assert set(salt) <= set("0123456789abcdef")


class TestBodies:
    def test_off_leaves_the_clients_salt(self) -> None:
        profile = of("acme", editable=False)
        assert TrustDomains(TrustPolicy()).isolate(profile) is profile

    def test_what_takes_no_salt_is_refused(self) -> None:
        with pytest.raises(UneditableBody):
            domains().isolate(of("acme", editable=False))

    def test_a_request_without_a_body_needs_none(self) -> None:
        profile = RequestProfile(Endpoint.PASS, counted=False)
        assert domains().isolate(profile) is profile
