"""A real API server for the tests that need one, shared by all of them; and real schedulers for those that need them too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, HELM, KUBERNETES
from tests.apiserver import ApiServer, running
from tests.contract.chart.rendering import Helm
from tests.integration.extender.harness import ExtenderOnApiServer, Proxy
from tests.integration.extender.scheduling import Stack, connected, prepare

GANG_GATES: Final = "GenericWorkload=true,GangScheduling=true"


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """Built when the cache lacks them."""
    return build(cache_folder(), [KUBERNETES, ETCD, HELM], Steps())


@pytest.fixture(scope="session")
def apiserver(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """kube-apiserver and etcd."""
    with running(programs, tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture(scope="session")
def gang_apiserver(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One that serves PodGroups."""
    flags = f"--feature-gates={GANG_GATES}", "--runtime-config=scheduling.k8s.io/v1alpha2=true"
    with running(programs, tmp_path_factory.mktemp("gang-apiserver"), *flags) as server:
        yield server


@pytest.fixture
async def cluster(apiserver: ApiServer, tmp_path: Path) -> AsyncIterator[ExtenderOnApiServer]:
    """An empty cluster before extenders that the test starts."""
    async with Proxy(apiserver, tmp_path).running() as proxy, httpx.AsyncClient(trust_env=False, timeout=30) as http:
        made = ExtenderOnApiServer(apiserver, proxy, http)
        try:
            yield made
        finally:
            await made.leave()


@asynccontextmanager
async def _stack(server: ApiServer, programs: dict[str, Path], folder: Path, *flags: str) -> AsyncIterator[Stack]:
    async with connected(server) as api, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        await prepare(api)
        made = Stack(server, programs["kube-scheduler"], Helm(programs["helm"]), folder, api, http, *flags)
        try:
            yield made
        finally:
            await made.leave()


@pytest.fixture
async def stack(apiserver: ApiServer, programs: dict[str, Path], tmp_path: Path) -> AsyncIterator[Stack]:
    """An empty cluster before kube-schedulers that the test starts."""
    async with _stack(apiserver, programs, tmp_path) as made:
        yield made


@pytest.fixture
async def gang_stack(gang_apiserver: ApiServer, programs: dict[str, Path], tmp_path: Path) -> AsyncIterator[Stack]:
    """The same, with kube-schedulers that schedule gangs."""
    async with _stack(gang_apiserver, programs, tmp_path, f"--feature-gates={GANG_GATES}") as made:
        yield made
