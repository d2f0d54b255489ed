"""A real plugin process between a kubelet, an API server and the fake driver."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from deviceplugin.admission import listens
from tests.builders import PodBuilder, pod
from tests.built import REPOSITORY
from tests.fake import FakeDriver, fake_driver
from tests.integration.deviceplugin.harness import Node, node
from vgpu.api.codec import grant_from_text, inventory_from_json
from vgpu.api.contract import uuid_of
from vgpu.api.grant import GrantGpu, Slice
from vgpu.api.inventory import Inventory
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


def inventory(on: Node) -> Inventory:
    assert on.api.inventory
    return inventory_from_json(on.api.inventory)


def sharing(name: str, on: Inventory, gpu: int, units: int, core: int = 0, container: str = "main") -> PodBuilder:
    requests = pod(name).asking(mib=units * 1024, core=core, container=container).on("n1")
    return requests.assigned(Slice(on.gpus[gpu].uuid, gpu, units * 1024, core), container=container)


def gpus_of(ids: tuple[str, ...]) -> set[str]:
    return {uuid_of(one) for one in ids}


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


async def test_a_pod_with_an_unreadable_assignment_is_refused_and_nobody_else_suffers(running: Start) -> None:
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

        pieces = {"setup": (Slice(gpu.uuid, 0, 4096),), "main": (Slice(gpu.uuid, 0, 4096, 20),)}
        one = one.assigned(text=assignment_to_json(Assignment(pieces, frozenset({"setup"}))))
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        folders = {name: made.arbiter_listens("p", name) for name in ("setup", "main")}
        assert len(set(folders.values())) == 2  # the same devices, and a directory each
        for starts in ("setup", "setup", "main", "main"):
            await made.kubelet.start_container("p", starts)
            grants = {name: grant_from_text((folders[name] / "grant").read_text()) for name in folders}
            assert {name: grant.container for name, grant in grants.items()} == {"setup": "setup", "main": "main"}
            assert {name: grant.gpus[0].core_percent for name, grant in grants.items()} == {"setup": 0, "main": 20}


async def test_what_a_container_mounts_is_restored_when_somebody_removed_it(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        folder = made.grant_folder("a")
        shutil.rmtree(folder)
        (made.state / "preload").unlink()
        (made.state / "ld.so.preload").unlink()
        start = asyncio.create_task(made.kubelet.start_container("a", "main"))
        await made.logged("what a container mounts was missing and is restored")
        made.arbiter_listens("a")
        await start
        assert (folder / "libtangram.so").exists()
        assert (made.state / "preload").exists()
        assert (made.state / "ld.so.preload").exists()


async def test_a_grant_that_somebody_removed_from_a_running_container_is_back_within_seconds(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        made.arbiter_listens("a")
        await made.kubelet.start_container("a", "main")
        path = made.grant_folder("a") / "grant"
        text = path.read_text()
        path.unlink()
        await made.logged("what a container was granted was missing and is put back")
        assert path.read_text() == text


async def test_a_cdi_specification_that_somebody_removed_is_back_before_the_container_starts(running: Start) -> None:
    async with running() as made:
        one, spec = sharing("a", inventory(made), 0, 8), made.folder / "cdi/tangram.sh-gpu.json"
        content = spec.read_bytes()
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        made.arbiter_listens("a")
        spec.unlink()
        await made.kubelet.start_container("a", "main")
        assert spec.read_bytes() == content


async def test_without_an_arbiter_the_container_does_not_start(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        with pytest.raises(grpc.aio.AioRpcError, match="the arbiter does not listen"):
            await made.kubelet.start_container("a", "main")


async def test_whole_gpus_and_mig_instances_are_given_by_uuid(running: Start) -> None:
    async with running(gpus="gpu a100-40\ngpu a100-40\nmig 1 3g.20gb 2g.10gb\n") as made:
        has = inventory(made)
        instance = next(i for i in has.gpus[1].instances if i.profile == "2g.10gb")
        assert made.kubelet.healthy(GPU) == {has.gpus[0].uuid}
        await made.kubelet.until(lambda: made.kubelet.healthy(DEFAULT.mig("2g.10gb")) == {instance.uuid})
        whole = pod("w").asking(gpus=1).on("n1").assigned(Slice(has.gpus[0].uuid, 0, has.gpus[0].mib, 100, "whole"))
        piece = Slice(instance.uuid, 1, instance.mib, 100, "mig", "2g.10gb")
        mig = pod("m").asking(mig="2g.10gb").on("n1").assigned(piece)
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
            line = await made.logged("no GPUs are offered yet, or their state is not known any longer")
            assert "libnvidia-ml.so.1" in line["error"]
            assert (await made.get("/readyz"))[0] == 503
            (folder / "driver/lib.away").rename(folder / "driver/lib")
            await made.ready()
    finally:
        shutil.rmtree(folder)


async def test_the_real_arbiter_listens_in_a_new_folder_before_the_container_starts(running: Start) -> None:
    async with running() as made:
        grants, sockets = made.state / "grants", made.state / "sockets"
        earlier = (
            grants / "0123456789abcdef0123456789abcdef"
        )  # as a plugin made it that knew no other folder for sockets
        earlier.mkdir(parents=True, exist_ok=True)
        before = {path: path.lstat().st_mtime_ns for path in (grants, *grants.rglob("*"))}
        arbiter = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "arbiter", "--grants-dir", str(grants), "--sockets-dir", str(sockets),
            "--metrics-host", "127.0.0.1", "--metrics-port", "0", cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert arbiter.stderr
            async with asyncio.timeout(20):
                while b"serving" not in (line := await arbiter.stderr.readline()):
                    assert line, "the arbiter ended"
            assert {path: path.lstat().st_mtime_ns for path in (grants, *grants.rglob("*"))} == before, (
                "it writes beside"
            )
            assert listens(sockets / earlier.name / "arbiter.sock")
            one = sharing("a", inventory(made), 0, 8)
            made.api.put(one.plain())
            await made.kubelet.admit(one.plain())
            await made.kubelet.start_container("a", "main")
            folder = made.grant_folder("a")
            assert listens(sockets / folder.name / "arbiter.sock")
            mounted = {m.container_path: m.host_path for m in made.kubelet.answers["a", "main", DEFAULT.gpu_mem].mounts}
            assert mounted["/.tangram/socket"] == str(sockets / folder.name)
            assert str((folder / "arbiter.sock").readlink()) == "socket/arbiter.sock"
            assert grant_from_text((folder / "grant").read_text()).pod == "a"
        finally:
            arbiter.terminate()
            _, said = await arbiter.communicate()
        assert b'"level": "error"' not in said
        assert arbiter.returncode == 0


async def test_sockets_that_somebody_removed_are_back_within_a_second(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 4, 30)
        made.api.put(one.plain())  # bound, and not admitted yet
        sockets = sorted(made.kubelet.plugins.glob("tangram-*.sock"))
        assert len(sockets) == 3
        made.kubelet.registered.clear()
        for socket in sockets:
            socket.unlink()
        began = time.monotonic()
        while not all(socket.exists() for socket in sockets):  # noqa: ASYNC110 (another process makes them)
            await asyncio.sleep(0.01)
        back_s = time.monotonic() - began
        names = {MEM, CORE, GPU}
        await made.kubelet.until(
            lambda: names <= set(made.kubelet.registered) and all(map(made.kubelet.healthy, names))
        )
        assert back_s < 1.0
        await made.kubelet.admit(one.plain())
