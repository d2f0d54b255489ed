"""MIG instances that a real plugin process makes when the kubelet allocates their slots, on the fake driver."""

from __future__ import annotations

import asyncio
import json
import time

import grpc.aio
import pytest

from deviceplugin.grants.checked_file import boot_id
from deviceplugin.mig.record import FILE, MigRecord, SlotRecord
from deviceplugin.reports import MIG_NOT_ON_DEMAND
from tests.builders import PodBuilder, pod
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, running, until
from vgpu.api.codec import assignment_to_json
from vgpu.api.contract import NVIDIA_ENV
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]

GPUS = "gpu t4 memory_mib=16384\ngpu h100\nmig 1\n"
ON = ("--mig-on-demand", "true")
SMALL, HALF, ALL = (DEFAULT.mig(name) for name in ("1g.10gb", "3g.40gb", "7g.80gb"))
OTHER = "MIG-00000000-0000-0000-0000-000000000001"
WITHIN_S = 2.0
"""Of Allocate. Specified: issue K."""


def slot(made: Node, profile: str, start: int) -> str:
    return slot_device(inventory(made).gpus[1].uuid, MigSlot(start, profile))


def wants(made: Node, name: str, profile: str, start: int) -> PodBuilder:
    given = AssignedGpu(slot(made, profile, start), 1, 10_000, kind="mig", profile=profile)
    return pod(name).asking(mig=profile).on("n1").assigned(given)


def end(made: Node, pod: PodBuilder) -> None:
    """It is deleted, and the kubelet gave its devices back."""
    made.kubelet.remove("default", pod.name)
    made.api.remove(pod.plain())


def record(made: Node) -> bytes:
    path = made.state / "mig" / FILE
    return path.read_bytes() if path.exists() else b""


def mig_events(made: Node) -> list[str]:
    return [one["note"] for one in made.api.events if one["reason"] == MIG_NOT_ON_DEMAND]


def instances(made: Node) -> list[str]:
    """UUIDs of the MIG instances that the driver has."""
    return [one.uuid for one in made.driver.status() if one.gi is not None]


async def test_a_slot_becomes_an_instance_in_time_and_rules_out_others(running: Start) -> None:
    async with running(*ON, "--mig-idle-s", "0", gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        await made.kubelet.until(lambda: made.kubelet.healthy(ALL) == {slot(made, "7g.80gb", 0)})
        assert inventory(made).gpus[1].on_demand
        one = wants(made, "m", "1g.10gb", 6)
        made.api.put(one.plain())
        made.driver.ctl("fault", "hang", "nvmlDeviceCreateGpuInstanceWithPlacement", "seconds=1")
        began_s = time.monotonic()
        await made.kubelet.admit(one.plain())
        assert time.monotonic() - began_s < WITHIN_S
        (uuid,) = instances(made)
        answer = made.kubelet.answers["m", "main", SMALL]
        assert [d.name for d in answer.cdi_devices] == [f"tangram.sh/gpu={uuid}"]
        assert answer.envs[NVIDIA_ENV] == uuid
        spec = json.loads((made.folder / "cdi/tangram.sh-gpu.json").read_text())
        assert uuid in [d["name"] for d in spec["devices"]]
        await made.kubelet.until(lambda: not made.kubelet.healthy(ALL))
        assert slot(made, "1g.10gb", 6) in made.kubelet.healthy(SMALL)
        await made.kubelet.start_container("m", "main")
        await made.kubelet.start_container("m", "main")
        assert instances(made) == [uuid]


async def test_with_nvidias_runtime_the_variable_alone_names_the_instance(running: Start) -> None:
    async with running(*ON, gpus=GPUS, access="nvidia") as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        one = wants(made, "m", "1g.10gb", 6)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        (uuid,) = instances(made)
        answer = made.kubelet.answers["m", "main", SMALL]
        assert (answer.envs[NVIDIA_ENV], list(answer.cdi_devices)) == (uuid, [])
        await made.kubelet.start_container("m", "main")
        assert not (made.folder / "cdi/tangram.sh-gpu.json").exists()


@pytest.mark.parametrize("access", ["cdi", "nvidia"])
async def test_instances_swapped_by_the_kubelet_fail_the_start_and_have_the_pod_replaced(
    running: Start, access: str
) -> None:
    async with running(*ON, gpus=GPUS, access=access) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        for name, start in (("a", 5), ("b", 6)):
            one = wants(made, name, "1g.10gb", start)
            made.api.put(one.plain())
            await made.kubelet.admit(one.plain())
        made.kubelet.swap("a", "b")
        with pytest.raises(grpc.aio.AioRpcError, match="mixed up two pods of the same size"):
            await made.kubelet.start_container("a", "main")
        async with asyncio.timeout(20):
            while "a" not in [name for name, _ in made.api.deleted]:
                await made.api.news.wait()


async def test_an_id_that_the_kubelet_offers_late_is_refused_with_what_is_in_use(running: Start) -> None:
    async with running(*ON, gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        small, large = wants(made, "small", "1g.10gb", 6), wants(made, "large", "7g.80gb", 0)
        made.api.put(small.plain())
        await made.kubelet.admit(small.plain())
        await made.kubelet.until(lambda: not made.kubelet.healthy(ALL))
        made.kubelet.devices[ALL] = {slot(made, "7g.80gb", 0): "Healthy"}
        made.api.put(large.plain())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.kubelet.admit(large.plain())
        gpu = inventory(made).gpus[1].uuid
        assert refused.value.details() == (
            f"GPU {gpu} has no room for a MIG instance 7g.80gb at slice 0: in use are 1g.10gb at slice 6"
        )
        assert len(instances(made)) == 1
        made.api.put(large.with_phase("Failed", started=False).plain())
        end(made, small)
        again = wants(made, "again", "7g.80gb", 0)
        made.api.put(again.plain())
        made.kubelet.devices[ALL] = {slot(made, "7g.80gb", 0): "Healthy"}
        await made.kubelet.admit(again.plain())
        assert len(instances(made)) == 1


async def test_an_idle_instance_goes_after_its_time_and_what_it_ruled_out_comes_back(running: Start) -> None:
    async with running(*ON, "--mig-idle-s", "0.5", gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        pods = [wants(made, name, "1g.10gb", start) for name, start in (("a", 5), ("b", 6))]
        for one in pods:
            made.api.put(one.plain())
            await made.kubelet.admit(one.plain())
            await made.kubelet.start_container(one.name, "main")
            made.api.put(one.with_phase("Running").plain())
        kept = made.kubelet.answers["b", "main", SMALL].envs[NVIDIA_ENV]
        end(made, pods[0])
        await until(lambda: instances(made) == [kept])
        end(made, pods[1])
        await until(lambda: instances(made) == [])
        await made.kubelet.until(lambda: made.kubelet.healthy(ALL) == {slot(made, "7g.80gb", 0)})
        _, metrics = await made.get("/metrics")
        assert 'tangram_deviceplugin_mig_changes_total{change="made"} 2.0' in metrics
        assert 'tangram_deviceplugin_mig_changes_total{change="removed"} 2.0' in metrics


@pytest.mark.parametrize(
    ("waits_in", "there"),
    [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 0),
        ("nvmlGpuInstanceCreateComputeInstance", 1),
        ("nvmlDeviceGetAttributes_v2", 1),
    ],
    ids=["recorded", "GPU instance made", "compute instance made"],
)
async def test_a_plugin_killed_while_an_instance_is_made_leaves_none_behind(
    running: Start, waits_in: str, there: int
) -> None:
    async with running(*ON, "--mig-idle-s", "0", gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        one = wants(made, "m", "1g.10gb", 6)
        made.api.put(one.plain())
        made.driver.ctl("fault", "hang", waits_in, "seconds=2")
        admitting = asyncio.create_task(made.kubelet.admit(one.plain()))
        await until(lambda: b'"making"' in record(made) and len(instances(made)) == there)
        await made.stop_plugin(kill=True)
        with pytest.raises(grpc.aio.AioRpcError):
            await admitting
        made.api.put(one.with_phase("Failed", started=False).plain())
        made.driver.ctl("fault", "none")
        await made.start_plugin(*ON, "--mig-idle-s", "0")
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        other = wants(made, "n", "7g.80gb", 0)
        made.api.put(other.plain())
        await made.kubelet.until(lambda: made.kubelet.healthy(ALL))
        await made.kubelet.admit(other.plain())
        assert len(instances(made)) == 1
        end(made, other)
        await until(lambda: instances(made) == [])


async def test_a_plugin_killed_after_its_answer_keeps_the_instance_of_the_pod(running: Start) -> None:
    async with running(*ON, "--mig-idle-s", "0", gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        one, other = wants(made, "m", "1g.10gb", 6), wants(made, "n", "1g.10gb", 5)
        for built in (one, other):
            made.api.put(built.plain())
            await made.kubelet.admit(built.plain())
        (kept,) = made.kubelet.answers["m", "main", SMALL].envs[NVIDIA_ENV].split(",")
        await made.stop_plugin(kill=True)
        end(made, other)
        await made.start_plugin(*ON, "--mig-idle-s", "0")
        await until(lambda: instances(made) == [kept])
        await made.kubelet.until(lambda: slot(made, "1g.10gb", 6) in made.kubelet.healthy(SMALL))
        await made.kubelet.start_container("m", "main")
        assert instances(made) == [kept]


async def test_a_foreign_instance_stops_creation_with_an_event_and_stays(running: Start) -> None:
    async with running(*ON, "--mig-idle-s", "0", "--probe-s", "5", gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(HALF)) == 2)
        late = wants(made, "late", "3g.40gb", 0)
        made.driver.ctl("mig", 1, "create", "3g.40gb")
        (foreign,) = instances(made)
        made.api.put(late.plain())
        made.kubelet.devices[HALF] = {slot(made, "3g.40gb", 0): "Healthy"}
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"1 MIG instances that Tangram did not make, the first a 3g\.40gb at slice"
        ):
            await made.kubelet.admit(late.plain())
        made.api.put(late.with_phase("Failed", started=False).plain())
        await made.kubelet.until(lambda: made.kubelet.healthy(HALF) == {foreign})
        assert instances(made) == [foreign]
        async with asyncio.timeout(20):
            while not mig_events(made):
                await made.api.news.wait()
        assert "did not make" in mig_events(made)[0]
        made.driver.ctl("mig", 1, "destroy", next(one.gi for one in made.driver.status() if one.uuid == foreign))
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)


async def test_nothing_is_made_beside_a_foreign_process_and_after_it_everything_is(running: Start) -> None:
    async with running(*ON, gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        first, second, third = (wants(made, name, "1g.10gb", at) for at, name in enumerate("abc"))
        made.api.put(first.plain())
        await made.kubelet.admit(first.plain())
        (kept,) = instances(made)
        (number,) = (one.gi for one in made.driver.status() if one.uuid == kept)
        made.driver.ctl("process", f"1:{number}", 4711, 100, "of-the-pod")
        made.api.put(second.plain())
        await made.kubelet.admit(second.plain())
        made.api.put(second.with_phase("Succeeded").plain())
        made.kubelet.remove("default", "b")
        other = next(one.gi for one in made.driver.status() if one.gi is not None and one.uuid != kept)
        made.driver.ctl("process", f"1:{other}", 4712, 100, "stranger")
        made.api.put(third.plain())
        with pytest.raises(grpc.aio.AioRpcError, match="has processes in no MIG instance of a pod, the first is 4712"):
            await made.kubelet.admit(third.plain())
        assert len(instances(made)) == 2
        made.driver.ctl("gone", 4712)
        made.api.put(third.with_phase("Failed", started=False).plain())
        again = wants(made, "d", "1g.10gb", 2)
        made.api.put(again.plain())
        await made.kubelet.admit(again.plain())
        assert len(instances(made)) == 3


async def test_after_a_restart_a_replaced_instance_of_an_init_container_has_its_pod_replaced(running: Start) -> None:
    """The kubelet lists no init container, so neither it nor the ledger of the next plugin knows whose the devices are."""
    async with running(*ON, gpus=GPUS, access="nvidia") as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        given = AssignedGpu(slot(made, "1g.10gb", 6), 1, 10_000, kind="mig", profile="1g.10gb")
        text = assignment_to_json(Assignment({"warm": (given,)}, frozenset({"warm"})))
        one = pod("m").asking().asking(container="warm", mig="1g.10gb", init=True).on("n1").assigned(text=text)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        await made.kubelet.start_container("m", "warm")
        await made.stop_plugin(kill=True)
        (number,) = (one.gi for one in made.driver.status() if one.gi is not None)
        made.driver.ctl("mig", 1, "destroy", number)
        kept = MigRecord(made.state / "mig", boot_id())
        kept.load()
        kept.enter(SlotRecord(given.uuid, "lost", answered=OTHER))  # the fake driver names an instance by its slot
        await made.start_plugin(*ON)
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        with pytest.raises(grpc.aio.AioRpcError, match=r"was made again .*: the pod has to be replaced"):
            await made.kubelet.start_container("m", "warm")
        async with asyncio.timeout(20):
            while not (made.api.deleted and made.api.events):
                await made.api.news.wait()
        assert [name for name, _ in made.api.deleted] == ["m"]
        assert made.api.events[0]["reason"] == "DevicesSwapped"
