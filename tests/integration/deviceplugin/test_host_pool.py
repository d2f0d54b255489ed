"""A plugin process takes the copier's memory off its GPUs, and names the GPUs that have a copier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.builders import pod
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, running
from vgpu.api.grant import AssignedGpu
from vgpu.api.host_pool import SharedGpus, from_text

__all__ = ["fake_driver", "running"]


async def named(made: Node, expected: Callable[[SharedGpus], bool]) -> SharedGpus:
    """The file, once it says what is expected."""
    path = made.state / "plugin/shared-gpus.json"
    async with asyncio.timeout(20):
        while True:
            if path.exists() and expected(found := from_text(SharedGpus, path.read_bytes())):
                return found
            await asyncio.sleep(0.02)


async def test_with_a_host_pool_gpus_are_smaller_and_named_for_its_program(running: Start) -> None:
    async with running("--host-pool", "1Gi", "--copier-context-mib", "520") as made:
        gpus = inventory(made).gpus
        assert [gpu.mib for gpu in gpus] == [16384 - 520] * 2
        found = await named(made, lambda shared: len(shared.gpus) == 2)
        assert found.served == tuple(sorted(gpu.uuid for gpu in gpus))
        whole = AssignedGpu(gpus[0].uuid, 0, gpus[0].mib, 100, kind="whole")
        made.api.put(pod("a").asking(gpus=1).on("n1").assigned(whole).plain())
        assert (await named(made, lambda shared: bool(shared.whole))).served == (gpus[1].uuid,)
        (made.state / "plugin/nvml.released").touch()
        await named(made, lambda shared: shared.released)
        assert "tangram_node_host_pool_ready 0.0" in (await made.get("/metrics"))[1]


async def test_without_a_host_pool_nothing_is_taken_off_or_written(running: Start) -> None:
    async with running("--burst-enabled", "true") as made:
        assert [gpu.mib for gpu in inventory(made).gpus] == [16384] * 2
        assert not (made.state / "plugin/shared-gpus.json").exists()
