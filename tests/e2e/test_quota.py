"""Kubernetes' own quotas and defaults of a namespace, on what Tangram offers: the objects are those of examples/05-team-quota."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from hack.kubectl import ROOT, CommandFailed
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod, share

EXAMPLE = ROOT / "examples/05-team-quota"
MEM, CORE = "requests.tangram.sh/gpu-mem", "requests.tangram.sh/gpu-core"


def example(kind: str) -> dict[str, Any]:
    """The ResourceQuota or LimitRange of the example, for whatever namespace it is created in."""
    files = [EXAMPLE / "namespace.yaml", EXAMPLE / "defaults.yaml"]
    (found,) = [one for file in files for one in yaml.safe_load_all(file.read_text()) if one["kind"] == kind]
    del found["metadata"]["namespace"]
    return dict(found)


@pytest.fixture
def quota(cluster: Cluster, namespace: str) -> str:
    """A namespace with the quota, which is known to admission."""
    cluster.create(namespace, example("ResourceQuota"))
    eventually(lambda: used(cluster, namespace).get(MEM) == "0", "the quota is counted")
    return namespace


@pytest.fixture
def defaults(cluster: Cluster, namespace: str) -> str:
    """A namespace with the defaults, which are known to admission."""
    cluster.create(namespace, example("LimitRange"))
    eventually(lambda: "is 12, but limit is 13" in past_the_range(cluster, namespace), "the range is in force")
    return namespace


def past_the_range(cluster: Cluster, namespace: str) -> str:
    """The answer to a container past the range, which is never made; empty while the range is not in force."""
    try:
        cluster.kubectl(
            "-n", namespace, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(share("probe", "13Gi"))
        )
    except CommandFailed as error:
        return str(error)
    return ""


def used(cluster: Cluster, namespace: str) -> dict[str, str]:
    """What the quota counts."""
    found = cluster.find("resourcequota", "team", namespace)
    counted: dict[str, str] = (found or {}).get("status", {}).get("used", {})
    return counted


def test_a_quota_counts_gib_and_percent_and_refuses_what_goes_past_it(cluster: Cluster, quota: str) -> None:
    cluster.run(quota, share("share", "8Gi", 30))
    assert (used(cluster, quota)[MEM], used(cluster, quota)[CORE]) == ("8", "30")
    answer = cluster.refused(quota, share("past", "9Gi"))
    assert f"exceeded quota: team, requested: {MEM}=9, used: {MEM}=8, limited: {MEM}=16" in answer
    assert f"{CORE}=31" in cluster.refused(quota, share("busy", 1, 31))
    assert "requests.tangram.sh/gpu=1" in cluster.refused(quota, pod("whole", container(gpu=1)))
    cluster.run(quota, share("rest", "8Gi", 30))
    assert used(cluster, quota)[MEM] == "16"
    cluster.delete(quota, "share", "rest")
    eventually(lambda: used(cluster, quota)[MEM] == "0", "what was used is given back")
    cluster.create(quota, share("again", "16Gi"))


def test_a_quota_on_gpus_requests_nothing_of_pods_without_one(cluster: Cluster, quota: str) -> None:
    cluster.run(quota, pod("plain", container()))
    assert used(cluster, quota)[MEM] == "0"


def test_a_container_that_names_no_limit_gets_the_default_of_its_namespace(cluster: Cluster, defaults: str) -> None:
    cluster.run(defaults, pod("silent", container()))
    (assigned,) = json.loads(cluster.pod(defaults, "silent")["metadata"]["annotations"]["tangram.sh/assignment"])[
        "containers"
    ]["main"]
    assert (assigned["mib"], assigned["core"]) == (4096, 10)
    assert cluster.sees(defaults, "silent") == cluster.assigned(defaults, "silent")


def test_a_container_past_the_range_of_its_namespace_is_refused(cluster: Cluster, defaults: str) -> None:
    answer = cluster.refused(defaults, share("past", "13Gi"))
    assert "maximum tangram.sh/gpu-mem usage per Container is 12, but limit is 13" in answer
    answer = cluster.refused(defaults, pod("whole", container(gpu=1)))
    assert "either a share" in answer
    assert "a LimitRange of the namespace gave the pod some of that: LimitRanger plugin set: " in answer
