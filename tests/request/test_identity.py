from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import InvalidIdentity, UnknownTenant
from extproc.policy import parse_policy
from extproc.request.identity import (
    DEFAULT_IDENTITY,
    MAX_HEADER_CHARS,
    Identity,
    IdentityReader,
    MetadataPath,
)

JWT = "envoy.filters.http.jwt_authn"
SUB: MetadataPath = (JWT, "payload", "sub")
SUB_SOURCE = {"metadata": {"namespace": JWT, "path": ["payload", "sub"]}}
KEY_SOURCE = {"api_key": ["authorization", "x-api-key", "api-key"]}
GATEWAY = {"header": "x-kvgate-tenant"}
SECRET_KEY = "sk-SECRET-CANARY-123"
GOLD = {"name": "gold", "default_lane": "batch", "lanes": ["batch"]}


def reader(
    *,
    tenants: tuple[dict[str, Any], ...] = (),
    classes: tuple[dict[str, Any], ...] = (),
    **identity: Any,
) -> IdentityReader:
    """A reader of a policy with lanes online and batch, in that order."""
    data = {"pools": [{"model": "m"}], "identity": identity}
    policy = parse_policy({**data, "tenants": tenants, "tenant_classes": classes})
    lanes = [lane.name for lane in policy.admission.lanes]
    return IdentityReader(policy.identity, policy.tenants, lanes, policy.tenant_classes)


def read(
    made: IdentityReader,
    headers: dict[str, str] | None = None,
    metadata: dict[MetadataPath, Any] | None = None,
) -> Identity:
    return made.read(headers or {}, metadata or {})


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ACME = {"name": "acme", "api_key_sha256": [sha256("sk-1"), sha256("sk-2")]}


class TestDefaults:
    def test_a_request_that_says_nothing_is_nobodys_in_particular(self) -> None:
        assert read(reader()) == DEFAULT_IDENTITY == Identity()

    def test_no_header_chooses_a_tenant_or_class_unless_the_policy_says_so(self) -> None:
        """SE1: also where Envoy's configuration is not the generated one."""
        forged = {
            "x-kvgate-tenant": "victim",
            "x-kvgate-tenant-class": "gold",
            "x-llm-d-inference-fairness-id": "victim",
            "x-llm-d-inference-objective": "batch",
            "authorization": f"Bearer {SECRET_KEY}",
        }
        assert read(reader(), forged) == DEFAULT_IDENTITY
        assert not forged.keys() & reader().headers

    def test_the_wanted_headers_and_metadata_are_those_of_the_sources(self) -> None:
        made = reader(tenant=[SUB_SOURCE, KEY_SOURCE, GATEWAY], lane=[], deadline_ms=[])
        assert made.headers == {
            "authorization", "x-api-key", "api-key", "x-kvgate-tenant", "x-kvgate-dry-run",
            "x-kvgate-ttft-budget-ms", "x-kvgate-max-queue-ms",
        }  # fmt: skip
        assert made.metadata_paths == {SUB}


class TestTenants:
    def test_the_first_source_that_has_a_value_counts(self) -> None:
        made = reader(tenant=[SUB_SOURCE, GATEWAY])
        both = read(made, {"x-kvgate-tenant": "b"}, {SUB: "a"})
        assert both.tenant == "a"
        assert read(made, {"x-kvgate-tenant": " b\t"}, {SUB: ""}).tenant == "b"
        assert read(made, {"x-kvgate-tenant": "  "}).tenant == "anonymous"

    @pytest.mark.parametrize(
        "name", ["acme", "auth0|5f7c", "a.b@c.org", "spiffe://td/ns/x", "a" * 128]
    )
    def test_names_as_identity_providers_make_them_are_taken(self, name: str) -> None:
        assert read(reader(tenant=[GATEWAY]), {"x-kvgate-tenant": name}).tenant == name

    @pytest.mark.parametrize(
        "name", ["a" * 129, "a b", "a,b", "acme\n", 'a"b', "caf\ufffd", "a;b", "\x00", "é"]
    )
    def test_other_names_are_refused_and_not_passed_over(self, name: str) -> None:
        """SE1, PR3: two copies of a header arrive joined by a comma, odd bytes replaced."""
        with pytest.raises(InvalidIdentity) as caught:
            read(reader(tenant=[GATEWAY, SUB_SOURCE]), {"x-kvgate-tenant": name}, {SUB: "a"})
        assert caught.value.param == "x-kvgate-tenant"
        assert name not in caught.value.message

    @pytest.mark.parametrize(("claim", "name"), [("acme", "acme"), (42.0, "42"), (None, "a")])
    def test_a_claim_may_be_a_number(self, claim: Any, name: str) -> None:
        made = reader(tenant=[SUB_SOURCE, GATEWAY])
        assert read(made, {"x-kvgate-tenant": "a"}, {SUB: claim}).tenant == name

    @pytest.mark.parametrize("claim", [True, (), 0.5, float("inf"), float("nan")])
    def test_a_claim_of_another_type_is_refused(self, claim: Any) -> None:
        with pytest.raises(InvalidIdentity) as caught:
            read(reader(tenant=[SUB_SOURCE]), {}, {SUB: claim})
        assert caught.value.param == f"{JWT}/payload/sub"

    def test_a_fairness_id_is_a_source_where_the_policy_names_it(self) -> None:
        names = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
        made = reader(tenant=[{"header": name} for name in names])
        assert [read(made, {name: "flow"}).tenant for name in names] == ["flow", "flow"]


class TestApiKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer sk-1"},
            {"authorization": "bearer   sk-2 "},
            {"authorization": "sk-1"},
            {"x-api-key": "sk-2"},
            {"api-key": "sk-1"},
            {"authorization": "Bearer", "x-api-key": "sk-1"},
            {"authorization": "Bearer sk-1", "x-api-key": "sk-3"},
        ],
    )
    def test_a_known_key_is_its_tenant(self, headers: dict[str, str]) -> None:
        made = reader(tenant=[KEY_SOURCE], tenants=(ACME,))
        assert read(made, headers).tenant == "acme"

    def test_an_unknown_key_is_a_tenant_of_its_own(self) -> None:
        made = reader(tenant=[KEY_SOURCE, GATEWAY], tenants=(ACME,))
        names = [read(made, {"x-api-key": key}).tenant for key in ("a", "b", "a")]
        assert names[0] == names[2] != names[1]
        assert all(name.startswith("key-") and len(name) == 16 for name in names)
        assert read(made, {"x-kvgate-tenant": "t"}).tenant == "t"

    def test_its_name_tells_nothing_of_the_key_to_who_lacks_the_secret(self) -> None:
        """SE3: names stand in logs."""
        names = {
            read(reader(tenant=[KEY_SOURCE], api_key_hash_secret=secret), {"x-api-key": "k"}).tenant
            for secret in (None, "one", "two", "x" * 200)
        }
        assert len(names) == 4
        assert not any(sha256("k")[:12] in name for name in names)

    @pytest.mark.parametrize("key", ["sk-1,sk-1", "a" * MAX_HEADER_CHARS])
    def test_two_keys_or_a_cut_one_are_refused(self, key: str) -> None:
        """SE1: whichever of two the gateway has checked, it must not be the other one here."""
        with pytest.raises(InvalidIdentity) as caught:
            read(reader(tenant=[KEY_SOURCE], tenants=(ACME,)), {"authorization": key})
        assert caught.value.param == "authorization"

    def test_neither_reader_nor_identity_nor_refusal_shows_a_key(self) -> None:
        """SE3."""
        headers = {"authorization": f"Bearer {SECRET_KEY}", "x-kvgate-lane": SECRET_KEY}
        made = reader(tenant=[KEY_SOURCE], unknown_tenants="allow")
        with pytest.raises(InvalidIdentity) as caught:
            read(made, headers)
        told = [str(caught.value), repr(caught.value), repr(vars(caught.value)), repr(vars(made))]
        told.append(repr(read(made, {"authorization": SECRET_KEY})))
        assert not any("CANARY" in text for text in told)


class TestUnknownTenants:
    def test_refused_where_the_policy_says_so(self) -> None:
        made = reader(
            tenant=[KEY_SOURCE, GATEWAY],
            unknown_tenants="refuse",
            tenants=({"name": "acme", "api_key_sha256": [sha256("sk-1")]},),
        )
        assert read(made, {"authorization": "Bearer sk-1"}).tenant == "acme"
        assert read(made, {"x-kvgate-tenant": "acme"}).tenant == "acme"
        for headers in ({}, {"x-api-key": "sk-3"}, {"x-kvgate-tenant": "other"}):
            with pytest.raises(UnknownTenant) as caught:
                read(made, headers)
            assert caught.value.http_status == 401

    def test_everybody_else_can_have_an_entry(self) -> None:
        made = reader(
            unknown_tenants="refuse", tenants=({"name": "anonymous", "lanes": ["batch"]},)
        )
        assert read(made) == Identity(lane="batch")


class TestClasses:
    def read(self, headers: dict[str, str], **acme: Any) -> Identity:
        made = reader(
            tenant=[GATEWAY],
            tenants=({"name": "acme", **acme},),
            classes=(GOLD, {"name": "free"}),
            tenant_class=[{"header": "x-kvgate-tenant-class"}],
        )
        return read(made, {"x-kvgate-tenant": "acme", **headers})

    def test_the_entrys_class_is_above_that_of_the_sources(self) -> None:
        header = {"x-kvgate-tenant-class": "free"}
        assert self.read(header, tenant_class="gold").tenant_class == "gold"
        assert self.read(header).tenant_class == "free"
        assert self.read({}).tenant_class == "default"
        assert self.read({"x-kvgate-tenant-class": "default"}).tenant_class == "default"

    @pytest.mark.parametrize("name", ["silver", "gold,free", "Gold"])
    def test_an_unknown_class_is_refused(self, name: str) -> None:
        """ME1: classes are those of the policy, and so fit for labels."""
        with pytest.raises(InvalidIdentity) as caught:
            self.read({"x-kvgate-tenant-class": name})
        assert caught.value.param == "x-kvgate-tenant-class"

    def test_a_class_has_a_lane_of_its_own(self) -> None:
        assert self.read({}, tenant_class="gold").lane == "batch"
        assert self.read({}, tenant_class="free").lane == "online"

    def test_a_tenants_lanes_are_above_its_classs(self) -> None:
        online = {"x-kvgate-lane": "online"}
        assert self.read(online, tenant_class="gold", lanes=["online"]).lane == "online"
        with pytest.raises(InvalidIdentity):
            self.read(online, tenant_class="gold")


class TestLanes:
    def test_the_client_may_choose(self) -> None:
        assert read(reader(), {"x-kvgate-lane": "batch"}).lane == "batch"

    @pytest.mark.parametrize("lane", ["urgent", "batch,online", "BATCH", "caf\ufffd"])
    def test_but_not_a_lane_that_is_not_there(self, lane: str) -> None:
        with pytest.raises(InvalidIdentity) as caught:
            read(reader(), {"x-kvgate-lane": lane})
        assert caught.value.param == "x-kvgate-lane"
        assert lane not in caught.value.message

    def test_without_a_choice_a_tenant_gets_a_lane_that_it_may_use(self) -> None:
        made = reader(tenant=[GATEWAY], tenants=({"name": "acme", "lanes": ["batch"]},))
        acme = {"x-kvgate-tenant": "acme"}
        assert read(made, acme).lane == "batch"
        with pytest.raises(InvalidIdentity):
            read(made, {**acme, "x-kvgate-lane": "online"})
        assert read(made, {"x-kvgate-tenant": "other"}).lane == "online"

    def test_an_endpoint_pickers_objective_is_a_lane_by_another_name(self) -> None:
        made = reader(
            lane=[{"header": "x-kvgate-lane"}, {"header": "x-llm-d-inference-objective"}],
            objectives={"offline-summaries": "batch"},
        )
        objective = {"x-llm-d-inference-objective": "offline-summaries"}
        assert read(made, objective).lane == "batch"
        assert read(made, {**objective, "x-kvgate-lane": "online"}).lane == "online"
        with pytest.raises(InvalidIdentity) as caught:
            read(made, {"x-llm-d-inference-objective": "other"})
        assert caught.value.param == "x-llm-d-inference-objective"


TIMES = {
    "x-kvgate-deadline-ms": "deadline_s",
    "x-kvgate-ttft-budget-ms": "ttft_budget_s",
    "x-kvgate-max-queue-ms": "max_queue_time_s",
}


class TestTimes:
    @pytest.mark.parametrize(("header", "field"), TIMES.items())
    @pytest.mark.parametrize(
        ("text", "time_s"), [("200", 0.2), ("1.5", 0.0015), (" 3600000 ", 3600), ("0001", 0.001)]
    )
    def test_milliseconds_become_seconds(
        self, header: str, field: str, text: str, time_s: float
    ) -> None:
        assert read(reader(), {header: text}) == Identity(**{field: time_s})

    @pytest.mark.parametrize("header", TIMES)
    @pytest.mark.parametrize(
        "text",
        ["-5", "abc", "1e18", "1e3", "inf", "nan", "3600001", "9" * 400, "1_000", "٣", "1,1",
         "0x10", "+5", ".5", "5."],
    )  # fmt: skip
    def test_anything_else_is_refused(self, header: str, text: str) -> None:
        """QU3: negative, text, ten years."""
        with pytest.raises(InvalidIdentity) as caught:
            read(reader(), {header: text})
        assert caught.value.param == header
        assert "3600000" in caught.value.message

    def test_zero_is_a_queue_time_and_no_deadline(self) -> None:
        """QU3: not to wait can be asked for, to be late cannot."""
        assert read(reader(), {"x-kvgate-max-queue-ms": "0"}).max_queue_time_s == 0
        for header in ("x-kvgate-deadline-ms", "x-kvgate-ttft-budget-ms"):
            with pytest.raises(InvalidIdentity):
                read(reader(), {header: "0"})

    def test_the_longest_is_the_policys(self) -> None:
        made = reader(max_time_s=10)
        assert read(made, {"x-kvgate-deadline-ms": "10000"}).deadline_s == 10
        with pytest.raises(InvalidIdentity, match="up to 10000"):
            read(made, {"x-kvgate-deadline-ms": "10001"})

    def test_an_endpoint_pickers_budget_is_a_source_where_the_policy_names_it(self) -> None:
        name = "x-llm-d-slo-ttft-ms"
        assert read(reader(ttft_budget_ms=[{"header": name}]), {name: "250"}).ttft_budget_s == 0.25


class TestDryRun:
    @pytest.mark.parametrize(
        ("text", "dry"), [("1", True), ("true", True), (" True ", True), ("0", False), ("", False)]
    )
    def test_it_is_asked_for_by_a_switch(self, text: str, dry: bool) -> None:
        assert read(reader(), {"x-kvgate-dry-run": text}).dry_run is dry

    @pytest.mark.parametrize("text", ["2", "yes", "1,1"])
    def test_another_word_is_refused_rather_than_run_for_real(self, text: str) -> None:
        with pytest.raises(InvalidIdentity) as caught:
            read(reader(), {"x-kvgate-dry-run": text})
        assert caught.value.param == "x-kvgate-dry-run"


ALL_SOURCES = reader(
    tenant=[SUB_SOURCE, KEY_SOURCE, GATEWAY],
    tenant_class=[{"header": "x-kvgate-tenant-class"}],
    classes=({"name": "gold"},),
)


@given(
    headers=st.dictionaries(
        st.sampled_from(sorted(ALL_SOURCES.headers)),
        st.text(max_size=20) | st.sampled_from(["batch", "5", "gold", "acme", "true", "Bearer x"]),
    ),
    claim=st.none() | st.text(max_size=20) | st.floats() | st.booleans() | st.just(()),
)
def test_whatever_comes_there_is_an_identity_or_a_refusal(
    headers: dict[str, str], claim: Any
) -> None:
    """PR3: and every field of the identity is bounded."""
    identity: Identity | InvalidIdentity
    try:
        identity = ALL_SOURCES.read(headers, {SUB: claim})
    except InvalidIdentity as refusal:
        identity = refusal
    if isinstance(identity, InvalidIdentity):
        assert identity.param
        return
    assert 0 < len(identity.tenant) <= 128
    assert identity.tenant.isprintable()
    assert identity.tenant_class in ("default", "gold")
    assert identity.lane in ("online", "batch")
    for time_s in (identity.deadline_s, identity.ttft_budget_s, identity.max_queue_time_s):
        assert time_s is None or 0 <= time_s <= 3600
