"""A plugin process writes what a container may use above its grant, before it starts, and follows its pod's annotations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tests.builders import PodBuilder
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, running, sharing
from vgpu.api.burst import BurstLimits, burst_from_text
from vgpu.api.contract import BURST

__all__ = ["fake_driver", "running"]


async def started(made: Node, one: PodBuilder) -> Path:
    """The pod runs; its file, which may be missing."""
    made.api.put(one.plain())
    await made.kubelet.admit(one.plain())
    folder = made.arbiter_listens(one.name)
    await made.kubelet.start_container(one.name, "main")
    return folder / BURST


def limits(file: Path) -> BurstLimits | None:
    try:
        return burst_from_text(file.read_text())
    except FileNotFoundError:
        return None


async def becomes(file: Path, expected: Callable[[BurstLimits | None], bool]) -> float:
    """Seconds until the file says what is expected."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while True:
            if expected(limits(file)):
                return time.monotonic() - began
            await asyncio.sleep(0.01)


def memory(mib: int) -> Callable[[BurstLimits | None], bool]:
    return lambda found: found is not None and found.gpus[0].mib == mib


async def test_limits_are_there_before_the_start_and_follow_an_edit_within_two_seconds(running: Start) -> None:
    async with running("--burst-enabled", "true", "--burst-max", '{"default": "12Gi"}') as made:
        one = sharing("a", inventory(made), 0, 4)
        file = await started(made, one.annotated(gpu_mem_burst="8Gi", gpu_mem_burst_wait="5"))
        found = limits(file)
        assert found is not None
        assert (found.gpus[0].mib, found.wait_s) == (8192, 5)
        made.api.put(one.annotated(gpu_mem_burst="12Gi").at_version(2).plain())
        assert await becomes(file, memory(12 * 1024)) < 2
        made.api.put(one.annotated(gpu_mem_burst="13Gi").at_version(3).plain())
        assert await becomes(file, lambda found: found is None) < 2
        async with asyncio.timeout(10):
            while not made.api.events:
                await made.api.news.wait()
        (event,) = made.api.events
        assert event["reason"] == "BurstIgnored"
        assert "is 13Gi: a container of namespace default may have 12Gi at most" in event["note"]
        made.api.put(one.annotated(gpu_mem_burst="9Gi").at_version(4).plain())
        assert await becomes(file, memory(9 * 1024)) < 2
        file.unlink()
        await becomes(file, memory(9 * 1024))


async def test_without_the_setting_a_container_has_its_guarantee_alone(running: Start) -> None:
    async with running() as made:
        file = await started(made, sharing("a", inventory(made), 0, 4).annotated(gpu_mem_burst="8Gi"))
        assert limits(file) is None
        assert not made.api.events
