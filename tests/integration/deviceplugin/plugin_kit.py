"""A running plugin between a kubelet, an API server and the fake driver, and pods that share its GPUs."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.builders import PodBuilder, pod
from tests.fake import FakeDriver, fake_driver
from tests.integration.deviceplugin.harness import Node, node
from vgpu.api.codec import inventory_from_json
from vgpu.api.contract import uuid_of
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver"]

MEM, CORE, GPU = DEFAULT.gpu_mem, DEFAULT.gpu_core, DEFAULT.gpu
TWO_GPUS = "gpu t4 memory_mib=16384\ngpu t4 memory_mib=16384\n"

Start = Callable[..., AbstractAsyncContextManager[Node]]


@pytest.fixture
def running(fake_driver: Callable[[str], FakeDriver]) -> Start:
    @asynccontextmanager
    async def start(*options: str, gpus: str = TWO_GPUS, access: str = "cdi", seed: int = 0) -> AsyncIterator[Node]:
        folder = Path(tempfile.mkdtemp(prefix="dp-"))
        try:
            async with node(fake_driver(gpus), folder, access=access, seed=seed) as made:
                await made.start_plugin(*options)
                await made.ready()
                yield made
        finally:
            shutil.rmtree(folder)

    return start


@pytest.fixture
def unprobed(running: Start) -> Start:
    """As `running`. GPUs are probed when something happens to them, and not each minute."""
    return partial(running, "--probe-s", "3600")


async def until(condition: Callable[[], object]) -> None:
    """What a driver or a disk shows has no event to wait for."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def published(made: Node, condition: Callable[[tuple[Gpu, ...]], bool]) -> tuple[Gpu, ...]:
    """The GPUs of the annotation, once they are so."""
    async with asyncio.timeout(60):
        while True:
            if made.api.inventory and condition(gpus := inventory(made).gpus):
                return gpus
            await made.api.news.wait()


def inventory(on: Node) -> Inventory:
    assert on.api.inventory
    return inventory_from_json(on.api.inventory)


def sharing(name: str, on: Inventory, gpu: int, units: int, core: int = 0, container: str = "main") -> PodBuilder:
    requests = pod(name).asking(mib=units * 1024, core=core, container=container).on("n1")
    return requests.assigned(AssignedGpu(on.gpus[gpu].uuid, gpu, units * 1024, core), container=container)


def gpus_of(ids: tuple[str, ...]) -> set[str]:
    return {uuid_of(one) for one in ids}
