from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from extproc.errors import PolicyError
from extproc.policy import load_policy, normal_address, parse_address, parse_policy

BAD = Path(__file__).parent / "policies"

# Where each bad policy is wrong, and the part of the message that helps.
COMPLAINTS = {
    "a_list": "(top level): Input should be a valid dictionary",
    "adapter_is_its_own_model": "model name 'llama' is used twice",
    "alias_is_another_model": "model name 'chat' is used twice",
    "api_key_in_clear": "tenants.0.api_key_sha256.0: String should match pattern",
    "api_key_of_two_tenants": "(top level): Value error, API key 'ca978112ca1bbdcafac231b39a23d",
    "block_size_as_text": "pools.0.block_size_tokens: Input should be a valid integer",
    "borrowing_from_a_rule_per_tenant": "rule 'a' cannot borrow from 'b'",
    "borrowing_from_itself": "rule 'a' cannot borrow from 'a'",
    "borrowing_from_nobody": "rule 'a' cannot borrow from 'b'",
    "class_twice": "tenant class 'free' is defined twice",
    "class_with_a_default_lane_it_may_not_use": "uses lane 'online', which is not among batch",
    "class_with_an_unknown_lane": "class 'free' uses lane 'urgent', which is not among online",
    "degrade_step_of_no_kind": "degrade.0: Value error, needs exactly one of max_output",
    "degrade_step_of_two_kinds": "admission.rules.0.degrade.0: Value error, needs exactly one of",
    "digest_capacity_absurd": "pools.0.digest.capacity_blocks: Input should be less than",
    "digest_error_rate_too_high": "pools.0.digest.error_rate: Input should be less than",
    "empty": "(top level): Input should be a valid dictionary",
    "empty_adapter": "pools.0.adapters.0: String should have at least 1 character",
    "empty_alias": "pools.0.aliases.0: String should have at least 1 character",
    "empty_model_name": "pools.0.model: String should have at least 1 character",
    "engine_priority_of_some_lanes": "engine_priority of 'llama' needs the lanes batch, online",
    "fallback_to_an_unknown_model": "rule 'a' falls back to unknown 'lama'",
    "fewer_workers_than_the_floor": "scaling: Value error, needs min_workers <= max_workers",
    "infinite_weight": "pools.0.routing.weights.running: Input should be a finite number",
    "ipv4_in_brackets": "'[10.0.0.1]:8000' is not ip:port",
    "ipv6_without_brackets": "'fd00::5:8000' is not ip:port",
    "lane_twice": "admission: Value error, lane 'a' is defined twice",
    "lost_before_stale": "reports: Value error, needs interval_s <= stale_after_s",
    "minimum_shares_over_the_whole": "min_share of all lanes is over 0.9",
    "missing_pools": "pools: Field required",
    "misspelled_section": "pools.0.addmission: Extra inputs are not permitted",
    "model_name_twice": "model name 'llama' is used twice",
    "negative_queue": "pools.0.admission.max_queue: Input should be greater than or equal to 0",
    "negative_weight": "pools.0.routing.weights.uncached: Input should be greater than",
    "no_endpoints": "pools.0.routing.endpoints: Input should be greater than or equal to 1",
    "no_lanes": "admission.lanes: Tuple should have at least 1 item",
    "no_pools": "pools: Tuple should have at least 1 item",
    "not_a_number_ttl": "pools.0.overlay.ttl_s: Input should be",
    "not_utf8": "not YAML",
    "not_yaml": "not YAML",
    "objective_of_an_unknown_lane": "'critical' uses lane 'urgent', which is not among",
    "pressure_without_hysteresis": "pressure: Value error, needs loosen_below_s < tighten_above_s",
    "python_object": "not YAML",
    "rollout_half_on": "rollout.admission: Input should be 'on', 'off' or 'shadow'",
    "rule_for_an_unknown_model": "rule 'a' matches unknown model 'lama'",
    "rule_for_an_unknown_tenant_class": "'free-tier' matches unknown tenant class 'free'",
    "rule_name_in_capitals": "admission.rules.0.name: String should match pattern",
    "rule_named_as_the_pools_own": "rule name 'pool' belongs to the pools' own limits",
    "rule_twice": "admission: Value error, rule 'a' is defined twice",
    "rule_with_an_unknown_lane": "rule 'a' names unknown lane 'fast'",
    "source_header_in_capitals": "identity.tenant.0.header: String should match pattern",
    "source_of_no_kind": "identity.tenant_class.0: Value error, needs exactly one of header",
    "source_of_two_kinds": "identity.tenant.0: Value error, needs exactly one of header",
    "tenant_name_with_a_space": "tenants.0.name: String should match pattern",
    "tenant_named_as_an_api_key": "tenant 'key-0123456789ab': key- is for unknown API keys",
    "tenant_of_an_unknown_class": "tenant 'acme' is of unknown class 'gold'",
    "tenant_twice": "tenant 'acme' is defined twice",
    "tenant_with_an_unknown_lane": "tenant 'acme' uses lane 'urgent', which is not among",
    "trust_key_file_missing": "pools.0.trust.key_file: No such file or directory",
    "trust_key_file_not_utf8": "pools.0.trust.key_file: not UTF-8",
    "trust_key_file_of_no_key": "pools.0.trust.key_file: the key has fewer than 16 bytes",
    "trust_key_too_short": "pools.0.trust: Value error, the key has fewer than 16 bytes",
    "trust_of_a_tenant_in_two_groups": "tenant 'acme' is in 'a' and 'b'",
    "trust_with_two_keys": "pools.0.trust: Value error, needs exactly one of key, key_file",
    "trust_without_a_key": "pools.0.trust: Value error, needs exactly one of key, key_file",
    "unknown_field": "pools.0.colour: Extra inputs are not permitted (got 'red')",
    "unknown_version": "version: Input should be less than or equal to 1 (got 2)",
    "worker_by_name": "'gpu-1:8000' is not ip:port",
    "worker_port_too_large": "'10.0.0.1:65536' is not ip:port",
    "worker_port_zero": "'10.0.0.1:0' is not ip:port",
    "worker_twice": "pools.0: Value error, worker '10.0.0.1:8000' is listed twice",
    "worker_without_port": "'10.0.0.1' is not ip:port",
    "zero_concurrency": "pools.0.admission.max_concurrency: Input should be greater than 0",
}


class TestBadPolicies:
    """Each is refused with a message that names the file, the field and the value."""

    def test_every_file_has_its_complaint(self) -> None:
        assert {path.stem for path in BAD.glob("*.yaml")} == set(COMPLAINTS)

    @pytest.mark.parametrize("fault", COMPLAINTS)
    def test_it_is_refused_by_its_fault(self, fault: str) -> None:
        path = BAD / f"{fault}.yaml"
        with pytest.raises(PolicyError) as caught:
            load_policy(path)
        assert str(path) in str(caught.value)
        assert COMPLAINTS[fault] in str(caught.value)

    def test_no_complaint_shows_an_api_key(self) -> None:
        """SE3: a key put where its hash belongs, or a secret of the wrong type."""
        bad = {"api_key_hash_secret": ["SECRET-CANARY"], "tenant": [{"api_key": ["X-Canary"]}]}
        for data in (yaml.safe_load((BAD / "api_key_in_clear.yaml").read_text()),
                     {"pools": [{"model": "m"}], "identity": bad},
                     {"pools": [{"model": "m", "trust": {"key": ["SECRET"]}}]}):  # fmt: skip
            with pytest.raises(PolicyError) as caught:
                parse_policy(data)
            assert "SECRET" not in str(caught.value)
            named = "X-Canary" in str(caught.value)
            assert named is ("tenant" in data.get("identity", {})), "names of headers are no secret"

    def test_every_wrong_field_gets_a_line(self) -> None:
        pools = [{"model": ""}, {"model": "m"}]
        data = {"pools": pools, "requests": {"max_prompts": 0, "max_body_bytes": "x"}}
        with pytest.raises(PolicyError) as caught:
            parse_policy(data, source="p.yaml")
        fields = [line.split(": ")[1] for line in str(caught.value).splitlines()]
        assert fields == ["pools.0.model", "requests.max_body_bytes", "requests.max_prompts"]

    def test_an_unreadable_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match=r"missing\.yaml: No such file"):
            load_policy(tmp_path / "missing.yaml")
        with pytest.raises(PolicyError, match="Is a directory"):
            load_policy(tmp_path)


class TestGoodPolicies:
    def test_a_model_alone_is_a_policy(self) -> None:
        policy = parse_policy({"pools": [{"model": "llama"}]})
        assert policy.pools[0].block_size_tokens == 16
        assert policy.pools[0].tokenizer is None
        assert policy.pools[0].admission.max_concurrency is None

    def test_a_pool_answers_to_model_aliases_and_adapters(self) -> None:
        pool = {"model": "base", "aliases": ["b"], "adapters": ["lora"]}
        assert parse_policy({"pools": [pool]}).pools[0].names == ("base", "b", "lora")

    def test_paths_start_at_the_folder_of_the_policy(self, tmp_path: Path) -> None:
        pool = {"model": "m", "tokenizer": "models/m", "chat_template": "/etc/chat.jinja"}
        path = tmp_path / "policy.yaml"
        path.write_text(yaml.safe_dump({"pools": [pool, {"model": "plain"}]}))
        first, second = load_policy(path).pools
        assert first.tokenizer == (tmp_path / "models/m").resolve()
        assert first.chat_template == Path("/etc/chat.jinja")
        assert (second.tokenizer, second.chat_template) == (None, None)

    def test_without_a_folder_paths_stay_as_they_are(self) -> None:
        pool = {"model": "m", "tokenizer": "models/m"}
        assert parse_policy({"pools": [pool]}).pools[0].tokenizer == Path("models/m")

    def test_the_digest_tells_contents_apart(self) -> None:
        def digest(**changes: Any) -> str:
            return parse_policy({"pools": [{"model": "m"}], **changes}).digest

        assert digest() == digest()
        assert digest(response_headers=False) != digest()

    def test_a_tenants_weight_is_its_own_or_its_classs(self) -> None:
        policy = parse_policy({
            "pools": [{"model": "m"}],
            "tenants": [{"name": "a", "weight": 3}, {"name": "b"}],
            "tenant_classes": [{"name": "gold", "weight": 2}],
            "admission": {"rules": [
                {"name": "r", "match": {"tenant_classes": ["gold", "default"]}, "concurrency": 1},
            ]},
        })  # fmt: skip
        asked = [("a", "gold"), ("b", "gold"), ("c", "gold"), ("b", "default"), ("c", "default")]
        assert [policy.tenant_weight(*each) for each in asked] == [3, 2, 2, 1, 1]

    def test_the_secret_of_key_names_is_in_no_dump(self) -> None:
        """SE3."""
        identity = {"api_key_hash_secret": "SECRET-CANARY"}
        policy = parse_policy({"pools": [{"model": "m"}], "identity": identity})
        assert "CANARY" not in f"{policy!r} {policy.model_dump()} {policy.model_dump_json()}"

    def test_the_secret_of_salts_may_be_in_a_file_and_is_in_no_dump(self, tmp_path: Path) -> None:
        """SE3."""
        (tmp_path / "salt.key").write_text("SECRET-CANARY-OF-SALTS\n")
        trust = {"isolate": "tenants", "key_file": "salt.key"}
        path = tmp_path / "policy.yaml"
        path.write_text(yaml.safe_dump({"pools": [{"model": "m", "trust": trust}]}))
        policy = load_policy(path)
        key = policy.pools[0].trust.key
        assert key is not None
        assert key.get_secret_value() == "SECRET-CANARY-OF-SALTS"
        assert "CANARY" not in f"{policy!r} {policy.model_dump()} {policy.model_dump_json()}"

    def test_a_policy_is_frozen(self) -> None:
        policy = parse_policy({"pools": [{"model": "m"}]})
        with pytest.raises(ValidationError, match="frozen"):
            policy.pools[0].routing.endpoints = 5  # type: ignore[misc]

    def test_equal_times_of_silence_are_in_order(self) -> None:
        reports = {"interval_s": 2, "stale_after_s": 2, "lost_after_s": 2}
        policy = parse_policy({"pools": [{"model": "m"}], "reports": reports})
        assert policy.reports.lost_after_s == 2


class TestAddresses:
    """RT1: destinations are ip:port, IPv6 in brackets, in the form that Envoy prints."""

    @pytest.mark.parametrize(
        ("given", "normal"),
        [
            ("10.0.0.1:8000", "10.0.0.1:8000"),
            ("10.0.0.1:08000", "10.0.0.1:8000"),
            ("[fd00::5]:8000", "[fd00::5]:8000"),
            ("[FD00:0:0::05]:1", "[fd00::5]:1"),
            ("127.0.0.1:65535", "127.0.0.1:65535"),
        ],
    )
    def test_an_address_has_one_normal_form(self, given: str, normal: str) -> None:
        assert normal_address(given) == normal
        assert normal_address(normal) == normal

    def test_it_splits_into_ip_and_port(self) -> None:
        assert parse_address("[::1]:80") == ("::1", 80)

    @pytest.mark.parametrize(
        "text",
        ["", ":", "8000", "localhost:1", "10.0.0.1:", "10.0.0.1:-1", "10.0.0.1:+1", "10.0.0.1:1_0",
         "10.0.0.1:٣", "10.0.0.1:x", "[::1]", "::1:80", "[::1:80", "10.0.0.1:80, 10.0.0.2:80",
         "10.0.0.1:" + "9" * 5_000],
    )  # fmt: skip
    def test_everything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="is not ip:port"):
            parse_address(text)

    def test_static_workers_are_kept_in_normal_form(self) -> None:
        pool = {"model": "m", "workers": ["[FD00::5]:8000"]}
        assert parse_policy({"pools": [pool]}).pools[0].workers == ("[fd00::5]:8000",)


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("shadow", "shadow")])
def test_switches_are_read_as_yaml_writes_them(text: str, value: str) -> None:
    """YAML takes a bare ``off`` for false."""
    data = yaml.safe_load(f"pools: [{{model: llama}}]\nrollout: {{admission: {text}}}")
    assert parse_policy(data).rollout.admission == value
