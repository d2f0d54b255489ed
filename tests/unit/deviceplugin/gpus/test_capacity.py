"""Memory of GPUs as metrics: capacity, allocated, free, and what pods have whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from deviceplugin.allocation import NodePod
from deviceplugin.gpus.capacity import MIB, USES, CapacityCollector, memory_by_gpu
from tests.builders import cordoned
from tests.unit.deviceplugin.builders import node_pod, share, uuid
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import Gpu, Inventory, MigInstance, Orphan
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.request import GpuRequest


def instance(gpu: int, number: int, mib: int) -> MigInstance:
    return MigInstance(f"MIG-00000000-0000-0000-{gpu:04d}-{number:012d}", "1g.10gb", mib, number, 0)


def gpu(number: int, mib: int, *, healthy: bool = True, instances: tuple[int, ...] | None = None) -> Gpu:
    parts = tuple(instance(number, at, size) for at, size in enumerate(instances or ()))
    return Gpu(uuid(number), number, "H100", mib, healthy=healthy, mig=instances is not None, instances=parts)


GPUS = st.lists(
    st.tuples(st.integers(1, 12), st.booleans(), st.one_of(st.none(), st.lists(st.integers(1, 4), max_size=3))),
    max_size=3,
).map(
    lambda rows: [
        gpu(n, mib, healthy=healthy, instances=None if parts is None else tuple(parts))
        for n, (mib, healthy, parts) in enumerate(rows)
    ]
)


@given(GPUS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 12), st.booleans()), max_size=8))
def test_it_is_as_counted_mib_by_mib(gpus: list[Gpu], wanted: list[tuple[int, int, int, bool]]) -> None:
    """The obvious slow version: each MiB is a place that is used or free."""
    places = {
        one.uuid: {part.uuid: [False] * part.mib for part in one.instances}
        if one.mig
        else {one.uuid: [False] * one.mib}
        for one in gpus
    }
    assigned = [AssignedGpu("GPU-of-another-node", 0, 5)]
    wholes, shares = set[str](), set[str]()
    for at, part, mib, whole in wanted:
        if at >= len(gpus):
            continue
        one = gpus[at]
        if one.mig:
            if part >= len(one.instances) or any(places[one.uuid][one.instances[part].uuid]):
                continue
            chosen = one.instances[part]
            places[one.uuid][chosen.uuid] = [True] * chosen.mib
            assigned.append(AssignedGpu(chosen.uuid, at, chosen.mib, 0, "mig", chosen.profile))
            continue
        cells = places[one.uuid][one.uuid]
        if whole and not any(cells):
            cells[:] = [True] * one.mib
            wholes.add(one.uuid)
            assigned.append(AssignedGpu(one.uuid, at, one.mib, 100, "whole"))
        elif not whole and cells.count(False) >= mib:
            for cell in [n for n, taken in enumerate(cells) if not taken][:mib]:
                cells[cell] = True
            shares.add(one.uuid)
            assigned.append(AssignedGpu(one.uuid, at, mib))
    for one, found in memory_by_gpu(Inventory(tuple(gpus)), assigned):
        cells = [cell for part in places[one.uuid].values() for cell in part]
        assert found.capacity_mib == len(cells)
        assert found.allocated_mib == sum(cells)
        assert found.free_mib == (len(cells) - sum(cells) if one.healthy else 0)
        use = "whole" if one.uuid in wholes else "shared" if one.uuid in shares else "mig" if one.mig else "free"
        assert found.use == (use if one.healthy else "unhealthy")


def test_a_gpu_that_shrank_under_its_pods_has_nothing_free() -> None:
    ((_, found),) = memory_by_gpu(Inventory((gpu(0, 4),)), [AssignedGpu(uuid(0), 0, 6)])
    assert (found.capacity_mib, found.allocated_mib, found.free_mib) == (4, 6, 0)


CUT = gpu(0, 8, instances=(4, 4))
ON_DEMAND = replace(gpu(0, 8), mig=True, on_demand=True)
SLOT = slot_device(uuid(0), MigSlot(0, "1g.10gb"))


@pytest.mark.parametrize(
    ("of", "part", "use"),
    [
        (gpu(0, 8), AssignedGpu(uuid(0), 0, 4), "shared"),
        (CUT, AssignedGpu(CUT.instances[0].uuid, 0, 4, 0, "mig", "1g.10gb"), "mig"),
        (ON_DEMAND, AssignedGpu(SLOT, 0, 4, 0, "mig", "1g.10gb"), "mig"),
    ],
)
def test_a_withdrawn_gpu_has_nothing_free_and_is_in_use_until_its_last_pod_is_gone(
    of: Gpu, part: AssignedGpu, use: str
) -> None:
    out = cordoned(of, "cordoned")
    for parts, expected in (((part,), (4, 0, use)), ((), (0, 0, "withdrawn"))):
        ((_, found),) = memory_by_gpu(Inventory((out,)), parts)
        assert (found.allocated_mib, found.free_mib, found.use) == expected
    ((_, found),) = memory_by_gpu(Inventory((of,)), [part])
    assert (found.allocated_mib, found.free_mib, found.use) == (4, 4, use)


def scraped(inventory: Inventory, *pods: NodePod) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(CapacityCollector("n1", lambda: inventory, lambda: pods))
    return registry


def test_pods_and_orphans_are_allocated_in_bytes_per_gpu_and_per_node() -> None:
    orphan = Orphan("gone", "default", "b", (AssignedGpu(uuid(1), 1, 1024),))
    inventory = Inventory((gpu(0, 8192), gpu(1, 8192)), orphans=(orphan,))
    found = scraped(inventory, node_pod("a", 0, share("main", 4), on=[0]))
    of_gpu = {"node": "n1", "gpu_index": "0", "gpu_uuid": uuid(0), "model": "H100"}
    for name, on_gpu, on_node in (("capacity", 8192, 16384), ("allocated", 4096, 5120), ("free", 4096, 11264)):
        assert found.get_sample_value(f"tangram_gpu_memory_{name}_bytes", of_gpu) == on_gpu * MIB
        assert found.get_sample_value(f"tangram_node_gpu_memory_{name}_bytes", {"node": "n1"}) == on_node * MIB
    uses = {use: found.get_sample_value("tangram_node_gpus", {"node": "n1", "use": use}) for use in USES}
    assert uses == {"free": 0, "shared": 2, "whole": 0, "mig": 0, "withdrawn": 0, "unhealthy": 0}


def test_whole_gpus_and_instances_are_counted_per_pod_and_shares_are_not() -> None:
    part = instance(2, 0, 1024)
    inventory = Inventory((gpu(0, 8192), gpu(1, 8192), gpu(2, 8192, instances=(1024,))))
    whole = node_pod("a", 0, GpuRequest("main", "whole", 2), on=[0, 1])
    mig = replace(
        node_pod("b", 1, on={}),
        assignment=Assignment({"main": (AssignedGpu(part.uuid, 2, 1024, 0, "mig", part.profile),)}),
    )
    found = scraped(inventory, whole, mig, node_pod("c", 2, share("main", 4), on=[0]))
    rows = [s.labels | {"n": s.value} for m in found.collect() if m.name == "tangram_pod_gpus" for s in m.samples]
    assert rows == [
        {"namespace": "default", "pod": "a", "kind": "whole", "profile": "", "n": 2},
        {"namespace": "default", "pod": "b", "kind": "mig", "profile": "1g.10gb", "n": 1},
    ]
