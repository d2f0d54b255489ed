"""A plugin process beside another device plugin and a DRA driver: GPUs that are theirs are withdrawn from new pods, and running pods stay."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake import FakeDriver, fake_driver
from tests.integration.deviceplugin.harness import Node, node
from tests.integration.deviceplugin.plugin_kit import GPU, MEM, Start, inventory, published, running, sharing
from tests.other_device_plugin import other_plugin
from vgpu.api.contract import uuid_of
from vgpu.api.inventory import Gpu

__all__ = ["fake_driver", "running"]

WITHIN_S = 10.0
"""Specified: issue K."""


@pytest.fixture
def short() -> Iterator[Path]:
    """The path of a socket has at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="beside-"))
    yield folder
    shutil.rmtree(folder)


async def noted(made: Node, reason: str, *words: str) -> None:
    async with asyncio.timeout(60):
        while not any(
            one["reason"] == reason and all(word in one["note"] for word in words) for one in made.api.events
        ):
            await made.api.news.wait()


def clashing(gpu: Gpu) -> bool:
    return [one.reason for one in gpu.withdrawn] == ["GpuClash"]


async def test_a_gpu_that_another_plugin_offers_is_withdrawn_and_its_pods_stay(running: Start) -> None:
    async with running() as made:
        first, second = inventory(made).gpus
        one = sharing("a", inventory(made), 0, 4)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        ids = set(made.kubelet.records["default", "a"]["main", MEM])
        began_s = time.monotonic()
        made.kubelet.foreign["nvidia.com/gpu.shared"] = [f"{first.uuid}::{at}" for at in range(4)]
        await made.kubelet.until(lambda: {uuid_of(one) for one in made.kubelet.healthy(GPU)} == {second.uuid})
        assert time.monotonic() - began_s < WITHIN_S
        (clash, other) = await published(made, lambda gpus: clashing(gpus[0]))
        assert (clash.shareable, clash.state, other.shareable) == (False, "healthy", True)
        await noted(made, "GpuWithdrawn", first.uuid, "GpuClash", "nvidia.com/gpu.shared")
        of_first = {one: health for one, health in made.kubelet.devices[MEM].items() if uuid_of(one) == first.uuid}
        assert of_first == dict.fromkeys(ids, "Healthy"), "IDs in use stay, and no others"
        made.arbiter_listens("a")
        await made.kubelet.start_container("a", "main")  # it may start again
        assert not made.kubelet.harmed
        _, metrics = await made.get("/metrics")
        assert f'tangram_deviceplugin_gpu_healthy{{gpu_index="0",gpu_uuid="{first.uuid}"}} 1.0' in metrics
        assert 'reason="GpuClash",state="withdrawn"' in metrics
        assert (
            f'tangram_gpu_memory_free_bytes{{gpu_index="0",gpu_uuid="{first.uuid}",model="{first.model}",node="n1"}} 0.0'
            in metrics
        )


async def test_a_second_plugin_process_is_seen_in_each_form_of_its_ids(running: Start) -> None:
    async with running() as made:
        first, second = inventory(made).gpus
        with other_plugin(made.kubelet.plugins) as other:

            async def withdraws(gpu: Gpu, *ids: str) -> None:
                began_s = time.monotonic()
                await asyncio.to_thread(other.offer, *ids)
                await made.kubelet.until(lambda: gpu.uuid not in made.kubelet.healthy(GPU))
                assert time.monotonic() - began_s < WITHIN_S
                await noted(made, "GpuWithdrawn", gpu.uuid, "GpuClash", "nvidia.com/gpu")

            await withdraws(first, f"{first.uuid}::0", f"{first.uuid}::1")
            assert made.kubelet.healthy(GPU) == {second.uuid}
            await withdraws(second, str(second.index))
            await published(made, lambda gpus: all(map(clashing, gpus)))
            other.end()
            await made.kubelet.until(lambda: not made.kubelet.healthy("nvidia.com/gpu"))
        assert not made.kubelet.healthy(MEM), "another plugin that restarts is gone for some seconds too"


@pytest.mark.parametrize("form", ["uuid", "index", "replica"])
async def test_a_gpu_of_a_plugin_that_came_first_is_never_offered(
    fake_driver: Callable[[str], FakeDriver], short: Path, form: str
) -> None:
    async with node(fake_driver("gpu t4 count=2 memory_mib=16384\n"), short) as made:
        uuids = [gpu.uuid for gpu in made.driver.status()]
        with other_plugin(made.kubelet.plugins) as other:
            ids = {"uuid": uuids[0], "index": "0", "replica": f"{uuids[0]}::0"}
            await asyncio.to_thread(other.offer, ids[form])
            await made.start_plugin()
            (first, second) = await published(made, lambda gpus: len(gpus) == 2)
            assert (first.uuid, clashing(first), clashing(second)) == (uuids[0], True, False), "the first inventory"
            await made.kubelet.until(lambda: made.kubelet.healthy(GPU))
            assert {uuid_of(one) for one in made.kubelet.devices[MEM]} == {second.uuid}


async def test_the_other_plugin_came_first_and_ids_that_cannot_be_read_count_for_every_gpu(
    fake_driver: Callable[[str], FakeDriver], short: Path
) -> None:
    async with node(fake_driver("gpu t4 count=2 memory_mib=16384\n"), short) as made:
        made.kubelet.foreign["nvidia.com/gpu"] = ["1"]
        await made.start_plugin()
        (first, second) = await published(made, lambda gpus: len(gpus) == 2)
        assert (clashing(first), clashing(second)) == (False, True), "the first inventory already"
        await made.kubelet.until(lambda: made.kubelet.healthy(GPU) == {first.uuid})
        made.kubelet.foreign["nvidia.com/gpu"] = ["1", "who-knows"]
        await made.kubelet.until(lambda: not made.kubelet.healthy(GPU))
        await published(made, lambda gpus: all(map(clashing, gpus)))


async def test_only_selected_gpus_are_offered_and_others_processes_are_no_clash(
    fake_driver: Callable[[str], FakeDriver], short: Path
) -> None:
    async with node(fake_driver("gpu t4 count=2 memory_mib=16384\n"), short) as made:
        made.kubelet.foreign["nvidia.com/gpu"] = ["0"]
        await made.start_plugin("--gpus", '["index=1"]')
        (first, second) = await published(made, lambda gpus: len(gpus) == 2)
        assert ([one.reason for one in first.withdrawn], first.shareable) == (["NotSelected"], False)
        assert second.shareable
        await made.kubelet.until(lambda: made.kubelet.healthy(GPU) == {second.uuid})
        assert {uuid_of(one) for one in made.kubelet.healthy(MEM)} == {second.uuid}
        assert not any(one["reason"] == "GpuWithdrawn" for one in made.api.events)


async def test_a_gpu_of_the_dra_driver_is_withdrawn(fake_driver: Callable[[str], FakeDriver], short: Path) -> None:
    async with node(fake_driver("gpu t4 count=2 memory_mib=16384\n"), short) as made:
        made.api.serve_slices("v1", "v2")
        await made.start_plugin()
        (first, _) = await published(made, lambda gpus: len(gpus) == 2 and all(gpu.shareable for gpu in gpus))
        device = {"name": "gpu-0", "attributes": {"uuid": {"string": first.uuid}, "index": {"int": 0}}}
        made.api.put(
            {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "s"},
                "spec": {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": [device]},
            }
        )  # fmt: skip
        await published(made, lambda gpus: clashing(gpus[0]) and gpus[1].shareable)
        await noted(made, "GpuWithdrawn", first.uuid, "gpu.nvidia.com")


async def test_while_the_kubelet_does_not_answer_nothing_is_offered_at_the_start(
    fake_driver: Callable[[str], FakeDriver], short: Path
) -> None:
    async with node(fake_driver("gpu t4 count=2 memory_mib=16384\n"), short) as made:
        made.kubelet.silent = True
        await made.start_plugin()
        gpus = await published(made, lambda gpus: len(gpus) == 2)
        assert [[one.reason for one in gpu.withdrawn] for gpu in gpus] == [["OwnerUnknown"]] * 2
        status, text = await made.get("/readyz")
        assert status == 503
        assert "GPUs are not offered: the kubelet's list of devices did not answer yet" in text
        assert not made.kubelet.registered
        made.kubelet.silent = False
        await made.ready()
        await published(made, lambda gpus: all(gpu.shareable for gpu in gpus))
