"""helm, and a real API server with nothing behind it: no node, no controller. Both as the local cluster builds them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, HELM, KUBERNETES
from tests.apiserver import ApiServer, running
from tests.contract.chart.rendering import NAMESPACE, Helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    """helm. Built when the cache lacks it."""
    return Helm(build(cache_folder(), [HELM], Steps())["helm"])


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server of the session's own."""
    programs = build(cache_folder(), [KUBERNETES, ETCD], Steps())
    with running(programs, tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def release_namespace(api: ApiServer) -> str:
    """The release's namespace, which is there."""
    found = api("GET", "/api/v1/namespaces")["items"]
    if NAMESPACE not in {thing["metadata"]["name"] for thing in found}:
        api("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    return NAMESPACE
