"""A real plugin process between a kubelet, an API server and the fake driver."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.builders import pod
from tests.fake import FakeDriver
from tests.integration.deviceplugin.harness import Node, node
from tests.integration.deviceplugin.plugin_kit import (
    CORE,
    GPU,
    MEM,
    TWO_GPUS,
    Start,
    fake_driver,
    gpus_of,
    inventory,
    running,
    sharing,
)
from vgpu.api.codec import grant_from_text
from vgpu.api.grant import AssignedGpu, GrantGpu
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]


async def test_the_node_offers_each_unit_of_memory_each_percent_and_each_gpu(running: Start) -> None:
    async with running() as made:
        gpus = inventory(made).gpus
        assert [gpu.model for gpu in gpus] == ["Tesla T4", "Tesla T4"]
        for resource, per_gpu in ((MEM, gpus[0].mib // 1024), (CORE, 100), (GPU, 1)):
            ids = made.kubelet.healthy(resource)
            assert len(ids) == 2 * per_gpu
            assert gpus_of(tuple(ids)) == {gpu.uuid for gpu in gpus}
        assert sorted(made.kubelet.registered) == sorted([MEM, CORE, GPU])
        assert made.kubelet.starts_with == {MEM: True, CORE: False, GPU: True}
        for resource, wants in made.kubelet.starts_with.items():
            assert (await made.kubelet.request_options(resource)).pre_start_required == wants
        status, text = await made.get("/readyz")
        assert (status, text) == (200, "ok\n")


@pytest.mark.parametrize("seed", range(4))
async def test_a_share_gets_its_gpu_its_grant_and_its_mounts_whatever_order_the_kubelet_requests_in(
    running: Start, seed: int
) -> None:
    async with running(seed=seed) as made:
        one = sharing("a", inventory(made), 1, 8, 30)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        uuid = inventory(made).gpus[1].uuid
        records = made.kubelet.records["default", "a"]
        assert gpus_of(records["main", MEM]) == gpus_of(records["main", CORE]) == {uuid}

        answer = made.kubelet.answers["a", "main", MEM]
        assert [d.name for d in answer.cdi_devices] == [f"tangram.sh/gpu={uuid}"]
        assert {m.container_path for m in answer.mounts} == {
            "/.tangram",
            "/.tangram/socket",
            "/etc/ld.so.preload",
        }
        assert not made.kubelet.answers["a", "main", CORE].cdi_devices
        folder = made.arbiter_listens("a")
        assert not (folder / "grant").exists()
        await made.kubelet.start_container("a", "main")
        grant = grant_from_text((folder / "grant").read_text())
        assert (grant.namespace, grant.pod, grant.uid, grant.container) == ("default", "a", "uid-default-a", "main")
        assert grant.gpus == (GrantGpu(uuid, 8192, 30),)
        assert (folder / "grant").stat().st_mode & 0o777 == 0o444
        assert (folder / "libtangram.so").read_bytes() == b"a library\n"
        assert (made.state / "preload").read_text() == "/.tangram/libtangram.so\n"
        assert dict(answer.envs) == {"TANGRAM_GRANT": "/.tangram/grant"}
        preload = {m.host_path for m in answer.mounts if m.container_path == "/etc/ld.so.preload"}
        assert preload == {str(made.state / "preload")}


async def test_a_pod_of_the_release_before_finds_the_library_where_its_environment_names_it(running: Start) -> None:
    """Its webhook wrote LD_PRELOAD, and it is allocated only now."""
    async with running() as made:
        pods = [sharing(name, inventory(made), 0, 8).plain() for name in ("before", "now")]
        for document, library in zip(
            pods, ("/run/tangram/libtangram.so:/own.so", "/.tangram/libtangram.so"), strict=True
        ):
            document["spec"]["containers"][0]["env"] = [
                {"name": "SECRET", "value": "x"},
                {"name": "LD_PRELOAD", "value": library},
            ]
            made.api.put(document)
            await made.kubelet.admit(document)
        mounted = [
            {m.container_path: m.host_path for m in made.kubelet.answers[name, "main", MEM].mounts}
            for name in ("before", "now")
        ]
        assert mounted[0]["/run/tangram"] == mounted[0]["/.tangram"] == str(made.grant_folder("before"))
        assert "/run/tangram" not in mounted[1]


async def test_a_container_of_the_release_before_that_is_restarted_has_its_preload_file(running: Start) -> None:
    """It mounts what it was given then, and that names the library where it has it."""
    async with running() as made:
        assert (made.state / "ld.so.preload").read_text() == "/run/tangram/libtangram.so\n"


async def test_the_cdi_specification_names_gpus_by_uuid_and_files_by_the_hosts_paths(running: Start) -> None:
    async with running() as made:
        spec = json.loads((made.folder / "cdi/tangram.sh-gpu.json").read_text())
        assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "tangram.sh/gpu")
        assert [d["name"] for d in spec["devices"]] == [gpu.uuid for gpu in inventory(made).gpus]


async def test_a_pod_that_came_past_our_scheduler_is_refused_and_reported_why(running: Start) -> None:
    async with running() as made:
        other_scheduler = pod("foreign").asking(mib=4096).on("n1").plain() | {}
        other_scheduler["spec"]["schedulerName"] = "default-scheduler"
        made.api.put(other_scheduler)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await made.kubelet.admit(other_scheduler)
        assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "placed by default-scheduler, not by Tangram's scheduler" in (refusal.value.details() or "")
        async with asyncio.timeout(10):
            while not made.api.events:
                await made.api.news.wait()
        assert made.api.events[0]["reason"] == "AllocateRefused"
        assert made.api.events[0]["regarding"]["name"] == "foreign"


async def test_a_pod_with_an_unreadable_assignment_is_refused_and_no_other_pod_is(running: Start) -> None:
    async with running() as made:
        bad = pod("bad").asking(mib=4096).on("n1").assigned(text='{"v": 99}').plain()
        good = sharing("good", inventory(made), 0, 6)
        made.api.put(bad)
        made.api.put(good.plain())
        with pytest.raises(grpc.aio.AioRpcError, match="version 99"):
            await made.kubelet.admit(bad)
        await made.kubelet.admit(good.plain())


async def test_a_request_waits_until_the_watch_brings_the_pod(running: Start) -> None:
    async with running() as made:
        late = sharing("late", inventory(made), 1, 5)
        admission = asyncio.create_task(made.kubelet.admit(late.plain()))
        await asyncio.sleep(0.2)
        made.api.put(late.plain())
        await admission
        assert gpus_of(made.kubelet.records["default", "late"]["main", MEM]) == {inventory(made).gpus[1].uuid}


async def test_a_kubelet_that_restarts_is_offered_all_resources_again(running: Start) -> None:
    async with running() as made:
        await made.kubelet.stop()
        made.kubelet.registered.clear()
        await made.kubelet.start()
        await made.ready()
        assert sorted(made.kubelet.registered) == sorted([MEM, CORE, GPU])
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())


async def test_a_plugin_killed_between_allocate_and_start_loses_nothing(running: Start) -> None:
    async with running() as made:
        has = inventory(made)
        first = sharing("first", has, 0, 8, 30)
        made.api.put(first.plain())
        await made.kubelet.admit(first.plain())
        await made.stop_plugin(kill=True)
        await made.start_plugin()
        await made.ready()
        second = sharing("second", has, 0, 8, 30)
        made.api.put(second.plain())
        await made.kubelet.admit(second.plain())
        for name in ("first", "second"):
            folder = made.arbiter_listens(name)
            await made.kubelet.start_container(name, "main")
            assert grant_from_text((folder / "grant").read_text()).pod == name


async def test_an_xid_makes_a_gpu_unhealthy_and_recovery_makes_it_healthy_again(running: Start) -> None:
    async with running() as made:
        everything = len(made.kubelet.healthy(MEM))
        made.driver.xid(0, 13)  # an application's own mistake
        made.driver.xid(1, 79)
        await made.kubelet.until(lambda: len(made.kubelet.healthy(MEM)) == everything // 2)
        assert gpus_of(tuple(made.kubelet.healthy(MEM))) == {inventory(made).gpus[0].uuid}
        async with asyncio.timeout(10):
            while inventory(made).gpus[1].healthy:
                await made.api.news.wait()
        made.driver.recover(1)
        await made.kubelet.until(lambda: len(made.kubelet.healthy(MEM)) == everything)
        async with asyncio.timeout(10):
            while not inventory(made).gpus[1].healthy:
                await made.api.news.wait()
        assert inventory(made).gpus[0].healthy


async def test_devices_swapped_by_the_kubelet_are_harmless_with_nvidias_runtime(running: Start) -> None:
    async with running(access="nvidia") as made:
        await swapped(made)
        for name, gpu in (("a", 0), ("b", 1)):
            await made.kubelet.start_container(name, "main")
            other = {"a": "b", "b": "a"}[
                name
            ]  # the kubelet has them mixed up: what it gave one is mounted by the other
            grant = grant_from_text((made.grant_folder(other) / "grant").read_text())
            assert grant.pod == name
            assert [c.uuid for c in grant.gpus] == [inventory(made).gpus[gpu].uuid]


async def test_devices_swapped_by_the_kubelet_fail_the_start_and_have_the_pod_replaced_with_cdi(running: Start) -> None:
    async with running(access="cdi") as made:
        await swapped(made)
        with pytest.raises(grpc.aio.AioRpcError, match="mixed up two pods of the same size"):
            await made.kubelet.start_container("a", "main")
        async with asyncio.timeout(10):
            while not (made.api.deleted and made.api.events):
                await made.api.news.wait()
        ((name, options),) = made.api.deleted
        assert (name, options["preconditions"]) == ("a", {"uid": "uid-default-a"})
        assert made.api.events[0]["reason"] == "DevicesSwapped"


async def swapped(made: Node) -> None:
    for name, gpu in (("a", 0), ("b", 1)):
        one = sharing(name, inventory(made), gpu, 4)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        made.arbiter_listens(name)
    made.kubelet.swap("a", "b")


async def test_an_init_container_and_its_app_container_have_a_grant_each(running: Start) -> None:
    async with running() as made:
        gpu = inventory(made).gpus[0]
        one = (
            pod("p").asking(mib=4096, container="setup", init=True).asking(mib=4096, core=20, container="main").on("n1")
        )
        from vgpu.api.codec import assignment_to_json
        from vgpu.api.grant import Assignment

        containers = {"setup": (AssignedGpu(gpu.uuid, 0, 4096),), "main": (AssignedGpu(gpu.uuid, 0, 4096, 20),)}
        one = one.assigned(text=assignment_to_json(Assignment(containers, frozenset({"setup"}))))
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        folders = {name: made.arbiter_listens("p", name) for name in ("setup", "main")}
        assert len(set(folders.values())) == 2  # the same devices, and a directory each
        for starts in ("setup", "setup", "main", "main"):
            await made.kubelet.start_container("p", starts)
            grants = {name: grant_from_text((folders[name] / "grant").read_text()) for name in folders}
            assert {name: grant.container for name, grant in grants.items()} == {"setup": "setup", "main": "main"}
            assert {name: grant.gpus[0].core_percent for name, grant in grants.items()} == {"setup": 0, "main": 20}


async def test_whole_gpus_and_mig_instances_are_given_by_uuid(running: Start) -> None:
    async with running(gpus="gpu a100-40\ngpu a100-40\nmig 1 3g.20gb 2g.10gb\n") as made:
        has = inventory(made)
        instance = next(i for i in has.gpus[1].instances if i.profile == "2g.10gb")
        assert made.kubelet.healthy(GPU) == {has.gpus[0].uuid}
        await made.kubelet.until(lambda: made.kubelet.healthy(DEFAULT.mig("2g.10gb")) == {instance.uuid})
        whole = (
            pod("w").asking(gpus=1).on("n1").assigned(AssignedGpu(has.gpus[0].uuid, 0, has.gpus[0].mib, 100, "whole"))
        )
        assigned = AssignedGpu(instance.uuid, 1, instance.mib, 100, "mig", "2g.10gb")
        mig = pod("m").asking(mig="2g.10gb").on("n1").assigned(assigned)
        for one, resource, uuid in ((whole, GPU, has.gpus[0].uuid), (mig, DEFAULT.mig("2g.10gb"), instance.uuid)):
            made.api.put(one.plain())
            await made.kubelet.admit(one.plain())
            answer = made.kubelet.answers[one.name, "main", resource]
            assert [d.name for d in answer.cdi_devices] == [f"tangram.sh/gpu={uuid}"]
            assert not answer.mounts
            await made.kubelet.start_container(one.name, "main")
        spec = json.loads((made.folder / "cdi/tangram.sh-gpu.json").read_text())
        (device,) = [d for d in spec["devices"] if d["name"] == instance.uuid]
        caps = 3 + 135 * 1 + 9 * instance.gpu_instance
        paths = [n["path"] for n in device["containerEdits"]["deviceNodes"]]
        assert paths == ["/dev/nvidia1", f"/dev/nvidia-caps/nvidia-cap{caps}", f"/dev/nvidia-caps/nvidia-cap{caps + 1}"]


async def test_metrics_report_of_each_gpu_and_of_calls(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        status, numbers = await made.get("/metrics")
        assert status == 200
        uuid = inventory(made).gpus[0].uuid
        assert f'tangram_deviceplugin_gpu_healthy{{gpu_index="0",gpu_uuid="{uuid}"}} 1.0' in numbers
        assert f'tangram_deviceplugin_call_duration_seconds_count{{call="Allocate",resource="{MEM}"}} 1.0' in numbers


async def test_a_driver_that_comes_late_is_served_late(fake_driver: Callable[[str], FakeDriver]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="dp-"))
    try:
        async with node(fake_driver(TWO_GPUS), folder) as made:
            (folder / "driver/lib").rename(folder / "driver/lib.away")
            await made.start_plugin()
            # on a busy machine another line comes first: NVML is being opened
            await made.logged(
                "no GPUs are offered yet, or their state is no longer known", error_has="libnvidia-ml.so.1"
            )
            assert (await made.get("/readyz"))[0] == 503
            (folder / "driver/lib.away").rename(folder / "driver/lib")
            await made.ready()
    finally:
        shutil.rmtree(folder)
