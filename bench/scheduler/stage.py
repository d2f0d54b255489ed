"""A cluster of objects before a kube-scheduler comes: what all its measurements begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

from tests.apiserver import ApiServer
from tests.contract.chart.rendering import Helm
from tests.integration.extender.scheduling import Stack, Thing, connected, prepare

PODS: Final = "/api/v1/namespaces/default/pods"
NODES: Final = "/api/v1/nodes"


@asynccontextmanager
async def staged(
    programs: dict[str, Path], server: ApiServer, folder: Path, nodes: Iterable[Thing], pods: Iterable[Thing]
) -> AsyncIterator[Stack]:
    """The API server has these nodes, and these pods wait. The pairs that are started in it are gone in the end."""
    async with connected(server) as api, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        await prepare(api)
        stack = Stack(server, programs["kube-scheduler"], Helm(programs["helm"]), folder, api, http)
        await api.create(NODES, nodes)
        await api.create(PODS, pods)
        try:
            yield stack
        finally:
            for pair in stack.pairs:
                await pair.kill()
