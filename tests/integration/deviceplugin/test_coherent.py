"""A plugin process on a node with coherent memory: the GPU is offered whole, no units of it are, and an Event of the node says why."""

from __future__ import annotations

import asyncio

from tests.builders import pod
from tests.fake import fake_driver
from tests.integration.deviceplugin.plugin_kit import Start, inventory, running
from vgpu.api.grant import AssignedGpu
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]


async def test_a_gpu_with_coherent_memory_is_offered_whole_and_the_event_says_why(running: Start) -> None:
    async with running(gpus="gpu h100-96 coherent=numa\ngpu h100-96 coherent=cdmm\n") as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(DEFAULT.gpu)) == 2)
        coherent, managed = inventory(made).gpus
        assert (coherent.coherent, managed.coherent) == ("numa", "driver")
        for resource in (DEFAULT.gpu_mem, DEFAULT.gpu_core):
            assert {one[: len(managed.uuid)] for one in made.kubelet.healthy(resource)} == {managed.uuid}
        async with asyncio.timeout(60):
            while not (notes := [one["note"] for one in made.api.events if one["reason"] == "GpuWholeOnly"]):
                await made.api.news.wait()
        assert [coherent.uuid in note and "NUMA node" in note for note in notes] == [True]
        given = AssignedGpu(coherent.uuid, 0, coherent.mib, 100, kind="whole")
        one = pod("w").asking(gpus=1).on("n1").assigned(given).plain()
        made.api.put(one)
        await made.kubelet.admit(one)
