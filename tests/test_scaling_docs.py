"""The samples of docs/scaling.md are what autoscalers and kvgate itself can read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.policy import parse_policy
from extproc.reference import metrics_reference

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
SAMPLES: list[Any] = [
    document
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for document in yaml.safe_load_all(block)
]


def sample(kind: str) -> Any:
    (found,) = [each for each in SAMPLES if each.get("kind") == kind]
    return found


def test_the_policy_is_valid() -> None:
    (written,) = [each for each in SAMPLES if "pools" in each]
    policy = parse_policy(written)
    assert policy.rollout.scaling == "shadow"
    assert policy.pools[0].scaling.min_workers == 2


def test_keda_reads_the_number_as_replicas() -> None:
    spec = sample("ScaledObject")["spec"]
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    # KEDA's metadata are strings, numbers and switches too.
    assert set(map(type, trigger["metadata"].values())) == {str}
    assert trigger["metadata"]["threshold"] == "1"
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]


def test_the_hpa_reads_the_number_as_replicas() -> None:
    spec = sample("HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert metric["external"]["metric"]["name"] == "kvgate_desired_workers"
    assert spec["scaleTargetRef"]["name"] == sample("Deployment")["metadata"]["name"]


def test_the_pod_gives_its_agent_time_to_drain() -> None:
    pod = sample("Deployment")["spec"]["template"]["spec"]
    (agent,), (engine,) = pod["containers"], pod["initContainers"]
    drain_s = int(agent["args"][agent["args"].index("--drain-s") + 1])
    assert pod["terminationGracePeriodSeconds"] > drain_s
    assert engine["restartPolicy"] == "Always"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bkvgate_[a-z_]+", PAGE))))
def test_every_metric_on_the_page_exists(name: str) -> None:
    assert f"| `{name}` |" in metrics_reference()
