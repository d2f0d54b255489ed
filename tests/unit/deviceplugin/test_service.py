"""Allocate of gpu-mem: the directory that it answers, and whose it is."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.gpus.offer import Offer
from deviceplugin.grants import disk_thread as disk_thread
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.service import DevicePluginService
from tests.unit.deviceplugin.builders import KnownPods, inventory, node_pod, share, uuid
from tests.unit.deviceplugin.simulated_plugin import CallRefused, GrpcContext, SilentObserver
from vgpu.api.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as pb

MEM = DEFAULT.gpu_mem


@pytest.fixture
def grants(tmp_path: Path) -> GrantDirectories:
    (tmp_path / "image.so").write_bytes(b"library")
    made = GrantDirectories(tmp_path / "state", tmp_path / "image.so", boot="boot")
    made.install()
    return made


def service(grants: GrantDirectories, pods: KnownPods, tmp_path: Path) -> DevicePluginService:
    offer = Offer(DEFAULT, 1024)
    offer.set_inventory(inventory(1))
    silent: Any = SilentObserver()
    ledger = DeviceLedger(pods, offer.inventory, DEFAULT, pod_wait_s=0.0)
    return DevicePluginService(
        MEM, offer=offer, ledger=ledger, grants=grants, prestart=silent, state_root=tmp_path / "state", observer=silent
    )


async def test_a_request_that_shows_the_guess_to_be_wrong_moves_the_directories_too(
    grants: GrantDirectories, tmp_path: Path
) -> None:
    pods = KnownPods()
    pods.show(node_pod("a", 0, share("setup", 4, init=True), share("main", 8), on=[0]))
    pods.show(node_pod("b", 1, share("prepare", 4, init=True), share("work", 4), on=[0]))
    serving = service(grants, pods, tmp_path)
    ids = [f"{uuid(0)}-{slot}" for slot in range(4)]
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])

    def records() -> list[tuple[str, str, int]]:
        found = [folder.record for folder in reversed(grants.of_ids(ids))]
        return [(one.pod, one.container, one.place) for one in found if one is not None]

    await serving.Allocate(request, GrpcContext())
    assert records() == [("a", "setup", 0)]  # it was there first
    await serving.Allocate(request, GrpcContext())  # a's next would be 8 devices
    assert records() == [("b", "prepare", 0), ("b", "work", 1)]
    again = GrantDirectories(tmp_path / "state", tmp_path / "image.so", boot="boot")
    assert sorted(await asyncio.to_thread(lambda: again.owners().values())) == ["uid-b", "uid-b"]


async def test_a_disk_that_does_not_answer_refuses_the_pod_and_the_kubelet_goes_on(
    grants: GrantDirectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_thread, "DISK_S", 0.05)
    pods, answers = KnownPods(), threading.Event()
    pods.show(node_pod("a", 0, share("main", 4), on=[0]))
    monkeypatch.setattr(grants, "prepare", lambda _: answers.wait(20))
    request = pb.AllocateRequest(
        container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{uuid(0)}-{slot}" for slot in range(4)])]
    )
    try:
        with pytest.raises(CallRefused, match=r"has not answered a write for 0\.05 s: pod default/a gets no directory"):
            await service(grants, pods, tmp_path).Allocate(request, GrpcContext())
    finally:
        answers.set()


async def test_a_device_names_its_numa_node_while_that_is_predicted(grants: GrantDirectories, tmp_path: Path) -> None:
    serving = service(grants, KnownPods(), tmp_path)
    offer = serving._offer
    offer.set_inventory(replace(inventory(2), gpus=(replace(inventory(2).gpus[0], numa=1), inventory(2).gpus[1])))
    stream = serving.ListAndWatch(pb.Empty(), GrpcContext())

    async def named() -> dict[str, set[int]]:
        answer, found = await anext(stream), dict[str, set[int]]()
        for device in answer.devices:
            found.setdefault(device.ID[:40], set()).update(node.ID for node in device.topology.nodes)
        return found

    assert await named() == {uuid(0): set(), uuid(1): set()}
    offer.name_numa(True)
    assert await named() == {uuid(0): {1}, uuid(1): set()}
    offer.name_numa(True)
    offer.name_numa(False)
    assert await named() == {uuid(0): set(), uuid(1): set()}
