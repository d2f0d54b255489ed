"""What a restart, an upgrade and the kubelet's records show of pods that run already."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.grants.allocation_record import RECORD, Record
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.metrics import Metrics
from deviceplugin.pod_resources import ContainerDevices
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.usage_records import UsageRecord, UsageRecords
from deviceplugin.upkeep import Upkeep, enter_started, needed, remember_granted
from tests.builders import PodBuilder, pod
from tests.unit.deviceplugin.builders import inventory, uuid
from vgpu.api.contract import grant_key
from vgpu.api.grant import AssignedGpu, Grant, GrantGpu
from vgpu.api.names import DEFAULT

MEM, CORE, GPU = DEFAULT.gpu_mem, DEFAULT.gpu_core, DEFAULT.gpu
IDS = tuple(f"{uuid(0)}-{slot}" for slot in range(4))


@pytest.fixture
def grants(tmp_path: Path) -> GrantDirectories:
    (tmp_path / "image.so").write_bytes(b"library")
    made = GrantDirectories(tmp_path, tmp_path / "image.so", boot="boot")
    made.install()
    return made


@pytest.fixture
def usage_records(tmp_path: Path) -> UsageRecords:
    return UsageRecords(tmp_path, "boot")


def started(name: str, core: int = 0) -> PodBuilder:
    requests = pod(name).asking(mib=4096, core=core).on("n1").assigned(AssignedGpu(uuid(0), 0, 4096, core))
    return requests.with_phase("Running", started=True)


def node_pods(*pods: PodBuilder) -> NodePods:
    made = NodePods(DEFAULT, 1024)
    for one in pods:
        made.on_change(None, one.build())
    return made


def holding(name: str, resource: str, *ids: str) -> ContainerDevices:
    return ContainerDevices("default", name, "main", resource, frozenset(ids))


def test_a_pod_that_has_started_has_a_record_with_all_devices_that_the_kubelet_names(
    usage_records: UsageRecords,
) -> None:
    pods = node_pods(started("a", 30), pod("b").asking(mib=4096).on("n1").assigned(AssignedGpu(uuid(0), 0, 4096)))
    holdings = [holding("a", MEM, "x-1", "x-0"), holding("a", CORE, "x-7"), holding("gone", MEM, "x-9")]
    enter_started(holdings, pods, usage_records)
    assert list(usage_records) == [
        UsageRecord(
            "uid-default-a", "default", "a", (AssignedGpu(uuid(0), 0, 4096, 30),),
            {CORE: ("x-7",), MEM: ("x-0", "x-1")}, "boot",
        )
    ]  # fmt: skip


def test_of_a_pod_that_goes_and_its_successor_of_one_name_the_devices_are_not_reported_apart(
    usage_records: UsageRecords,
) -> None:
    twice = [holding("a", MEM, "old-0"), holding("a", MEM, "new-0"), holding("a", CORE, "x-7")]
    enter_started(twice, node_pods(started("a")), usage_records)
    (record_file,) = usage_records
    assert record_file.ids == {CORE: ("x-7",), MEM: ()}


def test_after_an_upgrade_what_a_pod_uses_is_known_from_its_grants(
    grants: GrantDirectories, usage_records: UsageRecords
) -> None:
    for container, mib in (("one", 1024), ("two", 2048)):
        record = Record((f"{uuid(0)}-{mib}",), "uid-a", "default", "a", container, (uuid(0),), 0.0)
        grants.write(grants.prepare(record), Grant("default", "a", "uid-a", container, (GrantGpu(uuid(0), mib, 10),)))
    remember_granted(grants, usage_records, DEFAULT)
    (record_file,) = usage_records
    assert (record_file.uid, record_file.held) == ("uid-a", (AssignedGpu(uuid(0), 0, 3072, 20),))
    assert set(record_file.ids[MEM]) == {f"{uuid(0)}-1024", f"{uuid(0)}-2048"}
    remember_granted(grants, usage_records, DEFAULT)
    assert list(usage_records) == [record_file]


def test_the_directory_of_an_earlier_plugin_is_kept_for_its_pod(grants: GrantDirectories) -> None:
    old = {
        "ids": IDS, "uid": "uid-default-a", "namespace": "default", "pod": "a", "container": "main",
        "cards": [uuid(0)], "at": 1.0, "v": 1,
    }  # fmt: skip
    folder = grants.folder(grant_key(IDS))
    folder.mkdir()
    (folder / RECORD).write_bytes(msgspec.json.encode(old))
    pods = node_pods(started("a"))
    ledger = DeviceLedger(pods, inventory, DEFAULT)
    assert needed([], pods, ledger, grants, DEFAULT) == {folder.name}
    assert needed([], node_pods(), ledger, grants, DEFAULT) == set()
    assert needed([], node_pods(), ledger, grants, DEFAULT, {"uid-default-a"}) == {folder.name}


def test_of_directories_whose_pod_is_a_guess_those_are_kept_that_a_container_may_yet_start_with(
    grants: GrantDirectories,
) -> None:
    guess = Record(IDS, "uid-gone", "default", "gone", "main", (uuid(0),), 0.0, 0)
    failed, granted, waits = (grants.prepare(guess) for _ in range(3))
    grants.write(granted, Grant("default", "gone", "uid-gone", "main", (GrantGpu(uuid(0), 4096),)))
    pods = node_pods(replace(started("a"), uid="uid-new"))
    ledger = DeviceLedger(pods, inventory, DEFAULT)
    held = [holding("a", MEM, *IDS)]
    assert needed(held, pods, ledger, grants, DEFAULT) == {waits}
    assert needed(held, pods, ledger, grants, DEFAULT, {"uid-gone"}) == {failed, granted, waits}
    assert needed([], node_pods(), ledger, grants, DEFAULT) == set()


class NodeUnderUpkeep:
    """The kubelet's records and the node's processes, of which there are none."""

    blind = False

    async def holdings(self, domain: str) -> tuple[ContainerDevices, ...]:  # noqa: ARG002
        return ()

    async def living(self, uids: set[str]) -> frozenset[str]:  # noqa: ARG002
        return frozenset()

    def forget_the_gone(self, alive: set[str]) -> None: ...


def test_a_disk_that_does_not_answer_a_removal_delays_nothing_else(
    grants: GrantDirectories, usage_records: UsageRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = grants.prepare(Record(IDS, "uid-gone", "default", "gone", "main", (uuid(0),), 0.0))
    grants.write(key, Grant("default", "gone", "uid-gone", "main", (GrantGpu(uuid(0), 4096),)))
    begun, answers, remove = threading.Event(), threading.Event(), GrantDirectories.remove

    def slowly(self: GrantDirectories, key: str) -> None:
        begun.set()
        assert answers.wait(10)
        remove(self, key)

    monkeypatch.setattr(GrantDirectories, "remove", slowly)
    pods = node_pods()
    node: Any = NodeUnderUpkeep()
    upkeep = Upkeep(
        DEFAULT, records=node, pods=pods, ledger=DeviceLedger(pods, inventory, DEFAULT), grants=grants, usage_records=usage_records,
        orphans=node, removers=(node,), metrics=Metrics(), now=lambda: 1e12,
    )  # fmt: skip

    async def while_it_removes() -> None:
        collecting = asyncio.create_task(upkeep.once())
        assert await asyncio.to_thread(begun.wait, 10)
        assert list(grants.keys()) == [key]
        answers.set()
        await collecting

    asyncio.run(while_it_removes())
    assert list(grants.keys()) == []
