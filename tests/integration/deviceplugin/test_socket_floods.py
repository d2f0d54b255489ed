"""Programs of the node's root flood the device plugin's sockets: the kubelet is answered, tokens are reviewed, and the plugin stays small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from bench.process import memory_mib
from tests.fake import fake_driver
from tests.flooder import CLIENTS, flooded
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.test_access import REVIEW, arbiter, knows, status
from tests.integration.deviceplugin.test_nvml import Start, running
from vgpu_pb import deviceplugin_pb2 as dp
from vgpu_pb import deviceplugin_pb2_grpc as dp_grpc

__all__ = ["fake_driver", "running"]

KUBELET_S = 10.0
"""The kubelet waits so long for a connection, and without a limit for an answer."""

MORE_MIB = 64.0
MORE_DESCRIPTORS = 2 * CLIENTS
"""Each client has one connection, and one that is being closed."""


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@asynccontextmanager
async def flood_of(made: Node, path: Path, kind: str) -> AsyncIterator[None]:
    """Meanwhile; then the plugin is as large as before."""
    assert made.process is not None
    pid = made.process.pid
    before_mib, before = memory_mib(pid), descriptors(pid)
    flood = flooded(path, kind)
    await asyncio.to_thread(flood.__enter__)
    try:
        yield
        assert memory_mib(pid) - before_mib <= MORE_MIB
        assert descriptors(pid) - before <= MORE_DESCRIPTORS
    finally:
        await asyncio.to_thread(flood.__exit__, None, None, None)


@pytest.mark.parametrize("kind", ["silent", "unread", "reconnect"])
async def test_the_kubelet_is_answered_while_its_socket_is_flooded(running: Start, kind: str) -> None:
    async with running() as made:
        sockets = [path for path in made.kubelet.plugins.glob("*.sock") if path.name != "kubelet.sock"]
        assert sockets
        async with flood_of(made, sockets[0], kind):
            for _ in range(5):
                for resource in made.kubelet.devices:
                    await asyncio.wait_for(made.kubelet.request_options(resource), KUBELET_S)
                async with grpc.aio.insecure_channel(f"unix://{sockets[0]}") as channel:  # a kubelet that starts
                    await asyncio.wait_for(
                        dp_grpc.DevicePluginStub(channel).GetDevicePluginOptions(dp.Empty()), KUBELET_S
                    )


@pytest.mark.parametrize("kind", ["silent", "unread", "reconnect"])
async def test_the_arbiters_clients_are_let_in_while_the_socket_of_reviews_is_flooded(
    running: Start, kind: str
) -> None:
    async with running(*REVIEW) as made, arbiter(made) as port:
        knows(made)
        async with flood_of(made, made.state / "plugin/access.sock", kind):
            assert await status(port, "prometheus") == 200
            assert await status(port, "container") == 403
