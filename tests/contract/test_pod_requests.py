"""What a pod requests, against Kubernetes' own helper, which kube-scheduler counts by."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import POD_REQUESTS
from kube.objects import Pod
from kube.pod_requests import bound_pod_requests, pending_pod_requests
from tests.contract.pod_kinds import made_up
from tests.examples import examples

SEED = 21
LIMIT_S = 60


@pytest.fixture(scope="module")
def helper() -> Path:
    """The program that says it. Built when the cache lacks it."""
    return build(cache_folder(), [POD_REQUESTS], Steps(quiet=True))[POD_REQUESTS.name]


def said_by(helper: Path, pods: list[dict[str, Any]]) -> list[dict[str, dict[str, int]]]:
    ran = subprocess.run(
        [helper], input="\n".join(map(json.dumps, pods)), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.timeout(600)  # the first time a compiler may have to be fetched
def test_a_pod_requests_what_kubernetes_says_that_it_requests(helper: Path) -> None:
    random_ = random.Random(SEED)
    pods = [made_up(random_) for _ in range(examples(10_000))]
    said = said_by(helper, pods)
    assert len(said) == len(pods)
    for plain, expected in zip(pods, said, strict=True):
        pod = msgspec.convert(plain, Pod, strict=False)
        found = {"holder": bound_pod_requests(pod), "applicant": pending_pod_requests(pod.spec)}
        assert found == expected, f"seed {SEED}: {json.dumps(plain)}"
    kinds = [one["holder"] != one["applicant"] for one in said]
    assert any(kinds)
    assert not all(kinds)
