"""GPUs that are put into a machine and taken out of it while a plugin process runs: the kubelet's devices follow within 10 s."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.fake import FakeDriver, fake_driver
from tests.integration.deviceplugin.harness import Node, node
from vgpu.api.codec import inventory_from_json
from vgpu.api.inventory import Gpu
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver"]

GPU = DEFAULT.gpu
OTHER = "GPU-0000abcd-0000-4000-8000-000000000001"
WITHIN_S = 10.0
"""Specified: issue K."""
Start = Callable[..., AbstractAsyncContextManager[Node]]


@pytest.fixture
def running(fake_driver: Callable[[str], FakeDriver]) -> Start:
    @asynccontextmanager
    async def start(*options: str) -> AsyncIterator[Node]:
        folder = Path(tempfile.mkdtemp(prefix="plug-"))
        try:
            async with node(fake_driver("gpu t4 count=2 memory_mib=16384\n"), folder) as made:
                await made.start_plugin("--probe-s", "3600", *options)
                await made.ready()
                yield made
        finally:
            shutil.rmtree(folder)

    return start


def uuids(made: Node) -> set[str]:
    """Of the GPUs that the kubelet may give away whole."""
    return set(made.kubelet.healthy(GPU))


async def published(made: Node, condition: Callable[[tuple[Gpu, ...]], bool]) -> tuple[Gpu, ...]:
    """The GPUs of the annotation, once they are so."""
    async with asyncio.timeout(60):
        while True:
            assert made.api.inventory
            gpus = inventory_from_json(made.api.inventory).gpus
            if condition(gpus):
                return gpus
            await made.api.news.wait()


async def test_capacity_follows_gpus_that_are_taken_out_put_in_and_replaced(running: Start) -> None:
    async with running() as made:
        first, second = (gpu.uuid for gpu in await published(made, lambda gpus: len(gpus) == 2))
        assert len(uuids(made)) == 2

        async def follows(count: int, *command: str | int) -> tuple[Gpu, ...]:
            began_s = time.monotonic()
            made.driver.ctl(*command)
            gpus = await published(made, lambda gpus: len(gpus) == count and all(gpu.healthy for gpu in gpus))
            await made.kubelet.until(lambda: len(uuids(made)) == count)
            assert time.monotonic() - began_s < WITHIN_S
            return gpus

        assert [gpu.uuid for gpu in await follows(1, "unplug", 0)] == [second]
        (moved, other) = await follows(2, "replug", 0, "bus=0000:81:00.0")
        assert [(gpu.uuid, gpu.pci) for gpu in (other, moved)] == [(first, "00000000:81:00.0"), (second, moved.pci)]
        assert (moved.index, other.index) == (0, 1), "NVML numbers GPUs by their place on the bus"
        await follows(1, "unplug", 1)
        assert {gpu.uuid for gpu in await follows(2, "replug", 1, f"uuid={OTHER}")} == {first, OTHER}
        assert len(await follows(3, "plug", "t4", "memory_mib=8192", "bus=0000:91:00.0")) == 3
