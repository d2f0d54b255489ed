"""The real cluster that these tests run on: Tangram installed by its chart over the fake driver, once a session.

`make cluster-up` brings the cluster up; a KUBECONFIG may name another one. Each test has a namespace of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.demo import clear_away
from hack.kubectl import Kubectl
from hack.stack import install_chart, install_fake_driver
from tests.e2e.api import served
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import GPUS

_numbers = itertools.count(1)
TIMEOUT_S = 400
"""For one test with its fixtures: an upgrade of the chart waits for every part to be replaced."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder that name no time of their own have more than a unit test's."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def bare() -> Iterator[Cluster]:
    """The cluster, before anything of ours is on it."""
    kubectl = Kubectl.local()
    with served(kubectl) as api:
        yield Cluster(kubectl, api)


@pytest.fixture(scope="session")
def cluster(bare: Cluster) -> Cluster:
    """The cluster with the fake driver and Tangram in access mode `cdi`. The demo's pods leave it; others' are in the way."""
    clear_away(bare.kubectl)
    if others := bare.pods_with_gpus():
        pytest.exit(f"the tests need every GPU of the cluster, and these pods request some: {', '.join(others)}", 1)
    install_fake_driver(bare.kubectl, GPUS)
    install_chart(bare.kubectl)
    bare.wait_for_gpus()
    return bare


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own. Its pods are gone when the test ends, so the next finds the GPUs free."""
    name = f"e2e-{next(_numbers)}"
    cluster.make_namespace(name)
    yield name
    cluster.drop_namespaces(name)


@pytest.fixture(scope="module")
def pooled(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The chart with the bursts and the host pool of the module's `BURST`; afterwards as the other tests need it."""
    cluster.upgrade({"burst": request.module.BURST})
    yield cluster
    cluster.upgrade({})
