"""The plugin names the GPUs of the host pool, keeps the copier's memory from pods, and says why a node has no pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import Gauge

from deviceplugin.gpus.host_pool import REPORT_AGAIN_S, HostPoolWatch, SharedGpusFile
from deviceplugin.gpus.offer import Offer
from deviceplugin.pods.node_pods import NodePods
from kube.errors import ApiError
from kube.objects import Node, NodeStatus, Pod
from tests.builders import pod
from tests.unit.deviceplugin.builders import inventory, uuid
from vgpu.api.grant import AssignedGpu
from vgpu.api.host_pool import NO_STATUS, REPORT_AFTER_S, SILENT, PoolGpu, PoolStatus, SharedGpus, from_text, to_text
from vgpu.api.inventory import Gpu, GpuCondition, Inventory, Orphan
from vgpu.api.names import DEFAULT


def offering(context_mib: int = 0) -> Offer:
    offer = Offer(DEFAULT, 1024, context_mib=context_mib)
    offer.set_inventory(inventory(2))
    return offer


class Written:
    """A node whose plugin writes the file."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.released = tmp_path / "shared-gpus.json", tmp_path / "nvml.released"
        self.offer, self.pods = offering(), NodePods(DEFAULT, 1024)
        self.file = SharedGpusFile(self.path, self.released, self.offer, self.pods, "boot")

    def once(self) -> SharedGpus:
        self.file.once()
        return from_text(SharedGpus, self.path.read_bytes())


def test_every_gpu_that_is_not_in_mig_mode_is_named(tmp_path: Path) -> None:
    made = Written(tmp_path)
    assert made.once() == SharedGpus(boot_id="boot", gpus=(uuid(0), uuid(1)))
    made.offer.set_inventory(
        Inventory((Gpu(uuid(0), 0, "H100", 1024, mig=True), Gpu(uuid(1), 1, "H100", 1024, healthy=False)))
    )
    assert made.once().gpus == (uuid(1),)


def test_a_gpu_that_a_pod_or_an_orphan_has_whole_has_no_copier_until_that_is_gone(tmp_path: Path) -> None:
    made = Written(tmp_path)
    whole = AssignedGpu(uuid(1), 1, 16 * 1024, 100, kind="whole")
    one = msgspec.convert(pod("a").asking(gpus=1).on("n1").assigned(whole).plain(), Pod)
    made.pods.on_change(None, one)
    assert made.once().whole == (uuid(1),)
    made.pods.on_change(one, None)
    made.offer.set_orphans((Orphan("u", "default", "a", (whole,)),))
    assert made.once().whole == (uuid(1),)
    made.offer.set_orphans(())
    assert made.once().whole == ()


def test_a_release_of_nvml_is_passed_on_and_a_file_that_is_removed_comes_back(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.released.touch()
    assert made.once().served == ()
    made.released.unlink()
    made.path.unlink()
    assert made.once().served == (uuid(0), uuid(1))


def test_before_nvml_answered_or_the_pods_are_known_the_file_stays(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.pods.attach(made.offer.changed_since, lambda: False)  # type: ignore[arg-type]
    made.file.once()
    assert not made.path.exists()


def test_the_copiers_memory_is_taken_off_what_pods_may_have_once() -> None:
    offer = offering(520)
    assert [gpu.mib for gpu in offer.inventory().gpus] == [16 * 1024 - 520] * 2
    assert len(offer.devices(DEFAULT.gpu_mem)) == 2 * 15
    offer.set_conditions({uuid(0): (GpuCondition("XidError", "unhealthy", 0),)})
    offer.set_inventory(offer.reported)  # as when a GPU does not answer the next probe
    assert [gpu.mib for gpu in offer.inventory().gpus] == [16 * 1024 - 520] * 2


def test_a_gpu_in_mig_mode_has_no_copier_and_a_tiny_gpu_nothing_left() -> None:
    offer = Offer(DEFAULT, 1024, context_mib=520)
    offer.set_inventory(Inventory((Gpu(uuid(0), 0, "H100", 4096, mig=True), Gpu(uuid(1), 1, "H100", 500))))
    assert [gpu.mib for gpu in offer.inventory().gpus] == [4096, 0]


def test_a_gpu_that_is_given_whole_only_has_no_copier() -> None:
    offer = Offer(DEFAULT, 1024, context_mib=520)
    offer.set_inventory(
        Inventory((Gpu(uuid(0), 0, "GH200", 4096, coherent="numa"), Gpu(uuid(1), 1, "GH200", 4096, coherent="driver")))
    )
    assert [gpu.mib for gpu in offer.inventory().gpus] == [4096, 4096 - 520]


class Watched:
    """A watch whose time the test sets."""

    def __init__(self, tmp_path: Path, report_after_s: float = REPORT_AFTER_S, **allocatable: str) -> None:
        self.path, self.now_s = tmp_path / "status.json", 1000.0
        self.reported: list[str] = []
        self.changes: list[str] = []
        self.ready = Gauge("ready", "Ready.", registry=None)
        self.node: Any = Node(status=NodeStatus(allocatable=allocatable))
        self.watch = HostPoolWatch(
            self.path,
            "boot",
            {"memory": "65Gi"},
            self.fetch,
            self.reported.append,
            self.ready,
            report_after_s,
            clock=lambda: self.now_s,
        )

        self.watch.changed = lambda: self.changes.append(self.watch.missing)

    async def fetch(self) -> Node:
        if isinstance(self.node, Exception):
            raise self.node
        node: Node = self.node
        return node

    def write(self, **status: Any) -> None:
        self.path.write_bytes(to_text(PoolStatus(**({"boot_id": "boot", "written_s": self.now_s} | status))))

    async def after(self, seconds: float) -> str:
        self.now_s += seconds
        return await self.watch.once()

    @property
    def is_ready(self) -> float:
        return self.ready._value.get()


async def test_a_pool_that_is_there_is_ready_and_nothing_is_reported(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.write(gpus=(PoolGpu("GPU-a", ready=True),))
    assert await made.after(0) == ""
    assert (made.is_ready, made.reported, made.watch.missing) == (1.0, [], "")
    await made.after(1)
    assert made.changes == [""], "once, when it became ready"
    await made.after(100)
    assert made.changes == ["", SILENT]


@pytest.mark.parametrize(
    ("allocatable", "what"),
    [
        (
            {"memory": "60Gi"},
            "its pod requests memory 65Gi, and the node has 60Gi allocatable: burst.hostPool is too large",
        ),
        ({}, "its pod requests memory 65Gi, and the node has none allocatable"),
        ({"memory": "128Gi"}, NO_STATUS),
        ({"memory": "lots"}, NO_STATUS),
    ],
)
async def test_a_pod_that_does_not_start_is_reported_after_a_while_with_the_reason(
    tmp_path: Path, allocatable: dict[str, str], what: str
) -> None:
    made = Watched(tmp_path, **allocatable)
    assert await made.after(0) == NO_STATUS == made.watch.missing
    await made.after(REPORT_AFTER_S - 1)
    assert (made.is_ready, made.reported) == (0.0, [])
    await made.after(1)
    (note,) = made.reported
    assert what in note
    await made.after(REPORT_AGAIN_S - 1)
    assert len(made.reported) == 1
    await made.after(1)
    assert len(made.reported) == 2


async def test_the_time_until_the_report_can_be_set(tmp_path: Path) -> None:
    made = Watched(tmp_path, 45, memory="60Gi")
    await made.after(0)
    await made.after(44)
    assert made.reported == []
    await made.after(1)
    assert "too large for this node" in made.reported[0]


async def test_an_api_server_that_does_not_answer_hides_no_report(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.node = ApiError(503, "Unavailable", "no", verb="GET", path="/")
    await made.after(0)
    await made.after(REPORT_AFTER_S)
    assert NO_STATUS in made.reported[0]


async def test_the_programs_own_reason_is_reported_and_again_after_it_was_well(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    for _ in range(2):
        made.now_s += 1
        made.write(reason="burst.hostPool is too large")
        await made.after(0)
        made.now_s += REPORT_AFTER_S
        made.write(gpus=(PoolGpu("GPU-a", reason="CUDA error 2"),))
        assert await made.after(0) == "GPU-a: CUDA error 2"
        made.write(gpus=(PoolGpu("GPU-a", ready=True),))
        assert await made.after(0) == ""
    assert len(made.reported) == 2
    assert made.reported[0].endswith("since it has no host pool: GPU-a: CUDA error 2")


async def test_a_status_that_is_old_or_no_status_is_of_no_pool(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.write()
    assert await made.after(60) == SILENT
    made.path.write_text("{")
    assert await made.after(0) == NO_STATUS
