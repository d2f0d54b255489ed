"""Processes that NVML lists: the grants to which they belong, and processes without a grant."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from arbiter.enforcement import enforcements
from arbiter.memory.attribution import STAYS_S, Attributor
from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.metrics import ArbiterCollector
from arbiter.server import ArbiterServer
from arbiter.status import status_of
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.api.cgroup import NOWHERE, CgroupOwner
from vgpu.api.contract import CONTAINER_ID
from vgpu.api.enforcement import Reason

POD = "1b2c3d4e-0000-4000-8000-000000000001"
OTHER_POD = "1b2c3d4e-0000-4000-8000-000000000002"
X, Y, Z = "c0" * 32, "d1" * 32, "e2" * 32
LOST = 999_999
"""A pid that no process has."""


@pytest.fixture
def server(node: ArbiterNode, meter: HandMeter) -> ArbiterServer:
    """A pod with two containers of 1000 MiB each; the ID of the second is known."""
    server = node.start()
    for key, name in (("b1", "main"), ("b2", "side")):
        node.allocate(key, replace(a_grant(), uid=POD, container=name))
    (node.folder / "b2" / CONTAINER_ID).write_text(f"{Y}\n")
    wait_for(lambda: all(server.containers.get(key) and server.containers[key].grant for key in ("b1", "b2")))
    wait_for(lambda: server.containers["b2"].container_id == Y)
    return server


def reads(
    server: ArbiterServer, meter: HandMeter, *held: tuple[int, int | None, CgroupOwner], times: int = 3, uuid: str = GPU
) -> None:
    """So many readings, a second apart."""
    for _ in range(times):
        meter.ahead_s += 1
        pids = {pid: None if mib is None else mib * MIB for pid, mib, _ in held}
        seen = {pid: SeenProcess(1, None, 0, place=place) for pid, _, place in held}
        meter._report(MemoryReading(meter._clock(), {uuid: pids}, seen))
        wait_for(lambda: not meter._readings)
        with server.lock:
            pass


def over(server: ArbiterServer) -> dict[str, bool]:
    with server.lock:
        return {key: bool(one.over_limit.excesses) for key, one in server.containers.items()}


def of(server: ArbiterServer, key: str) -> dict[Reason, tuple[int, ...]]:
    with server.lock:
        return {one.reason: one.pids for one in enforcements(server)[key].findings}


def test_a_container_id_reports_which_container_is_over_its_limit(server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, (LOST, 1500, CgroupOwner(POD, Y)))
    assert over(server) == {"b1": False, "b2": True}
    assert of(server, "b2")[Reason.OVER_LIMIT] == (LOST,)
    assert of(server, "b1") == {}


@pytest.mark.parametrize(("mib", "exceeded"), [(1900, False), (2100, True)])
def test_until_it_is_known_the_grants_of_the_pod_count_as_one(
    server: ArbiterServer, meter: HandMeter, mib: int, *, exceeded: bool
) -> None:
    reads(server, meter, (LOST, mib, CgroupOwner(POD, X)))
    assert any(over(server).values()) == exceeded
    assert Reason.UNCONNECTED in of(server, "b1")


def test_what_its_siblings_hold_counts_first(node: ArbiterNode, server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, (LOST, 900, CgroupOwner(POD, Y)), (LOST + 1, 1000, CgroupOwner(POD, Z)))
    assert over(server) == {"b1": False, "b2": False}
    assert node.process("b1").lease(101 * MIB).refused, "it is charged to the grant with free memory"
    reads(server, meter, (LOST, 900, CgroupOwner(POD, Y)), (LOST + 1, 1200, CgroupOwner(POD, Z)))
    assert any(over(server).values())


def test_the_id_that_comes_later_is_taken_up(node: ArbiterNode, server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, (LOST, 1500, CgroupOwner(POD, X)))
    assert over(server) == {"b1": False, "b2": False}
    (node.folder / "b1" / CONTAINER_ID).write_text(f"{X}\n")
    wait_for(lambda: server.containers["b1"].container_id == X)
    reads(server, meter, (LOST, 1500, CgroupOwner(POD, X)))
    assert over(server) == {"b1": True, "b2": False}


@pytest.mark.parametrize(
    ("place", "pod"),
    [(NOWHERE, ""), (CgroupOwner("another", X), "another")],
    ids=["a process of the node", "a pod without a grant"],
)
def test_memory_that_belongs_to_no_grant_is_in_status_and_metrics_until_it_is_gone(
    server: ArbiterServer, meter: HandMeter, place: CgroupOwner, pod: str
) -> None:
    reads(server, meter, (LOST, 700, place), times=1)
    assert status_of(server).ungranted == (), "it may be just ending"
    reads(server, meter, (LOST, 700, place), times=1)
    (found,) = status_of(server).ungranted
    assert (found.gpu, found.pid, found.held_bytes, found.pod) == (GPU, LOST, 700 * MIB, pod)
    assert metric(server) == {"tangram_gpu_memory_ungranted_bytes": 700 * MIB, "tangram_gpu_ungranted_processes": 1}
    reads(server, meter, times=1)
    assert status_of(server).ungranted == ()
    assert metric(server) == {"tangram_gpu_memory_ungranted_bytes": 0, "tangram_gpu_ungranted_processes": 0}


def metric(server: ArbiterServer) -> dict[str, float]:
    families = [
        one
        for one in ArbiterCollector(server).collect()
        if one.name.startswith(("tangram_gpu_memory_ungranted", "tangram_gpu_ungranted"))
    ]
    return {one.name: sample.value for one in families for sample in one.samples}


def test_a_process_with_memory_of_a_gpu_which_its_container_was_not_granted_belongs_to_none_there(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    """By a way around the devices it was given."""
    node.allocate("c", replace(a_grant(uuids=(OTHER_GPU,)), uid="another"))
    wait_for(lambda: "c" in server.containers and server.containers["c"].grant)
    reads(server, meter, (LOST, 700, CgroupOwner(POD, Y)), uuid=OTHER_GPU)
    assert [(one.gpu, one.pid, one.pod) for one in status_of(server).ungranted] == [(OTHER_GPU, LOST, POD)]


def test_connected_processes_and_those_without_memory_are_not_listed(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    node.process("b1")
    reads(server, meter, (os.getpid(), 300, NOWHERE), (LOST, 0, NOWHERE))
    assert status_of(server).ungranted == ()


def test_memory_that_the_driver_does_not_count_is_listed_without_a_number(
    server: ArbiterServer, meter: HandMeter
) -> None:
    reads(server, meter, (LOST, None, NOWHERE))
    assert [(one.pid, one.held_bytes) for one in status_of(server).ungranted] == [(LOST, None)]


def test_a_gpu_that_does_not_answer_keeps_its_last_result(server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, (LOST, 700, NOWHERE))
    reads(server, meter, uuid=OTHER_GPU)
    assert [one.pid for one in status_of(server).ungranted] == [LOST]


def test_no_process_is_listed_if_the_nodes_processes_are_not_visible(server: ArbiterServer, meter: HandMeter) -> None:
    server.attributor.visible = False
    reads(server, meter, (LOST, 700, NOWHERE))
    assert status_of(server).ungranted == ()
    assert STAYS_S < 1, "readings are a second apart"


def test_a_reading_is_as_the_one_before_only_where_each_process_belongs_to_the_grant_it_belonged_to(
    node: ArbiterNode, server: ArbiterServer
) -> None:
    attributor = Attributor()

    def unchanged(place: CgroupOwner) -> bool:
        reading = MemoryReading(
            0.0, {GPU: {LOST: MIB}}, {LOST: SeenProcess(1, None, 0, place=place)}, unchanged=frozenset({GPU})
        )
        with server.lock:
            return GPU in attributor.attribute(reading, server.containers).unchanged

    assert [unchanged(CgroupOwner(POD, Y)) for _ in range(3)] == [False, True, True]
    assert [unchanged(CgroupOwner(POD, X)) for _ in range(3)] == [False] * 3, "it is either container's"
    (node.folder / "b1" / CONTAINER_ID).write_text(f"{X}\n")
    wait_for(lambda: server.containers["b1"].container_id == X)
    assert [unchanged(CgroupOwner(POD, X)) for _ in range(3)] == [False, True, True]


def test_the_copiers_need_no_grant(server: ArbiterServer) -> None:
    attributor = Attributor()

    def listed(at_s: float, own: frozenset[int]) -> list[int]:
        seen = {LOST: SeenProcess(1, None, 0, place=CgroupOwner(OTHER_POD, X))}
        with server.lock:
            attributor.attribute(MemoryReading(at_s, {GPU: {LOST: MIB}}, seen), server.containers, own)
        return [one.pid for one in attributor.ungranted]

    assert [listed(at, frozenset({LOST})) for at in (0.0, 1.0)] == [[], []]
    assert [listed(at, frozenset()) for at in (2.0, 3.0)] == [[], [LOST]]
