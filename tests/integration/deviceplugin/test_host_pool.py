"""A plugin process takes the copier's memory off its GPUs, and names the GPUs that have a copier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from tests.builders import pod
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, running
from vgpu.api.grant import AssignedGpu
from vgpu.api.host_pool import NO_STATUS, SharedGpus, from_text
from vgpu.api.names import DEFAULT

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


async def summary(made: Node, expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The node's annotation about bursts, once it says what is expected."""
    async with asyncio.timeout(20):
        while True:
            text = (made.api.objects["/api/v1/nodes"]["n1"]["metadata"].get("annotations") or {}).get(DEFAULT.bursts)
            if text and expected(found := json.loads(text)):
                return dict(found)
            await made.api.news.wait()


async def test_a_node_shows_why_it_has_no_pool_and_how_far_limits_add_up(running: Start) -> None:
    async with running("--burst-enabled", "true", "--host-pool", "1Gi", "--copier-context-mib", "0") as made:
        found = await summary(made, lambda _: True)
        assert (found["hostPool"], found["ready"], found["why"]) == ("1Gi", False, NO_STATUS)
        uuid = inventory(made).gpus[0].uuid
        assert found["gpus"][0] == {"uuid": uuid, "memory": "16Gi", "guaranteed": "0", "limits": "0"}
        await made.stop_plugin()
        bursting = pod("a").asking(mib=4096).on("n1").annotated(gpu_mem_burst="10Gi").with_phase("Running")
        made.api.put(bursting.assigned(AssignedGpu(uuid, 0, 4096)).plain())
        await made.start_plugin("--burst-enabled", "true")
        found = await summary(made, lambda one: one["why"] == "burst.hostPool is not set")
        assert (found["gpus"][0]["guaranteed"], found["gpus"][0]["limits"]) == ("4Gi", "10Gi")
        await made.stop_plugin()
        await made.start_plugin()
        async with asyncio.timeout(20):
            while made.api.objects["/api/v1/nodes"]["n1"]["metadata"]["annotations"].get(DEFAULT.bursts):
                await made.api.news.wait()
