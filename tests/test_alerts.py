"""The alert rules hold for Prometheus itself, and name metrics that kvgate has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RULES = ROOT / "docs" / "alerts.yaml"


def promtool(*arguments: str) -> None:
    """From Debian's prometheus; `make promtool` brings it."""
    program = shutil.which("promtool")
    assert program, "make promtool"
    done = subprocess.run(
        (program, *arguments), capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "tests/alerts_test.yaml")
    fired = set(re.findall(r"Kvgate\w+", (ROOT / "tests/alerts_test.yaml").read_text()))
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == fired


def test_every_metric_in_the_rules_is_told() -> None:
    told = set(re.findall(r"^\| `(kvgate_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]:
        used = {name.removesuffix("_bucket") for name in re.findall(r"kvgate_\w+", rule["expr"])}
        assert used, rule
        assert used <= told, rule
