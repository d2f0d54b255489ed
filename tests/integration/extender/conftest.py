"""A real API server for the tests that need one, shared by all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, KUBERNETES
from tests.apiserver import ApiServer, running
from tests.integration.extender.harness import Cluster, Proxy


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """kube-apiserver and etcd."""
    programs = build(cache_folder(), [KUBERNETES, ETCD], Steps())
    with running(programs, tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture
async def cluster(apiserver: ApiServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """An empty cluster before extenders that the test starts."""
    async with Proxy(apiserver, tmp_path).running() as proxy, httpx.AsyncClient(trust_env=False, timeout=30) as http:
        made = Cluster(apiserver, proxy, http)
        try:
            yield made
        finally:
            await made.leave()
