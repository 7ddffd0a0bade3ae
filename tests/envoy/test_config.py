"""The generator: its text, its settings and the checked-in files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.envoy_config import (
    BodyMode,
    EnvoyConfigError,
    EnvoySettings,
    bootstrap,
    default_settings,
    render,
    to_yaml,
    validate_with_envoy,
    write,
)

ENVOY = Path(__file__).resolve().parents[2] / "envoy"
CHECKED_IN: dict[str, BodyMode] = {
    "bootstrap.yaml": "full_duplex",
    "bootstrap-buffered.yaml": "buffered",
}


@pytest.mark.parametrize(("name", "mode"), CHECKED_IN.items())
def test_the_checked_in_file_is_what_the_generator_writes(name: str, mode: BodyMode) -> None:
    assert (ENVOY / name).read_text() == render(default_settings(mode))


@pytest.mark.parametrize("name", CHECKED_IN)
def test_the_real_envoy_accepts_the_checked_in_file(name: str) -> None:
    validate_with_envoy(ENVOY / name)


def test_the_folder_holds_yaml_only() -> None:
    """A Python package of this name would hide Envoy's protobuf classes."""
    assert {path.suffix for path in ENVOY.iterdir()} == {".yaml"}


def test_the_real_envoy_accepts_every_option_away_from_its_default(tmp_path: Path) -> None:
    settings = EnvoySettings(
        workers=("[::1]:8001", "10.0.0.2:8000"),
        listen_host="::1",
        processor_host="localhost",
        client_headers=("x-kvgate-dry-run", "x-kvgate-tenant", "x-kvgate-dry"),
        access_log=True,
        retries=5,
    )
    write(settings, tmp_path / "new" / "envoy.yaml")
    validate_with_envoy(tmp_path / "new" / "envoy.yaml")


def test_what_envoy_says_of_a_bad_file_is_passed_on(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("static_resources: {listeners: [{nonsense: 1}]}\n")
    with pytest.raises(EnvoyConfigError, match="nonsense"):
        validate_with_envoy(bad)


def test_a_file_that_cannot_be_written_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(EnvoyConfigError, match="Is a directory"):
        write(default_settings(), tmp_path)


def test_the_text_is_the_same_every_time() -> None:
    assert to_yaml(bootstrap(default_settings())) == to_yaml(bootstrap(default_settings()))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"workers": ()}, "at least one"),
        ({"workers": ("worker-1:8001",)}, "'worker-1:8001' is not ip:port"),
        ({"admin_port": 0}, "admin_port: 0"),
        ({"client_headers": ("authorization",)}, "'authorization'"),
        ({"queue_time_s": 600.0}, "stream_idle_timeout_s: 300 .* 600"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EnvoyConfigError, match=complaint):
        replace(default_settings(), **changes)


def test_only_a_buffered_envoy_counts_held_time() -> None:
    assert default_settings("full_duplex").message_timeout_s == 5
    assert default_settings("buffered").message_timeout_s == 35


@pytest.mark.parametrize(
    "kept", [(), ("dry-run",), ("dry-run", "dry", "tenant"), ("a", "b", "a-b")]
)
def test_every_internal_header_but_the_named_ones_is_stripped(kept: tuple[str, ...]) -> None:
    settings = replace(
        default_settings(), client_headers=tuple(f"x-kvgate-{each}" for each in kept)
    )
    (pattern,) = re.findall(r"regex: (\S*x-kvgate-\S*)", render(settings))
    others = ("", "d", "dry-", "dry-runs", "dry-rum", "lease", "t", "tenants", "-", "ab", "c")
    for name in {*others, "dry-run", "dry", "tenant", "a", "b", "a-b"}:
        assert bool(re.fullmatch(pattern, f"x-kvgate-{name}")) == (name not in kept), name


def test_the_access_log_names_no_body_and_no_query() -> None:
    config = yaml.safe_load(render(replace(default_settings(), access_log=True)))
    chain = config["static_resources"]["listeners"][0]["filter_chains"][0]
    (log,) = chain["filters"][0]["typed_config"]["access_log"]
    line = log["typed_config"]["log_format"]["json_format"]
    assert "BODY" not in str(line)
    assert line["path"] == "%PATH(NQ:ORIG)%"
