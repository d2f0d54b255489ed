"""Memory in use that NVML lists for no process: how much the arbiter treats as explained, and where it reports the rest."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest

from arbiter.memory.device_openers import DeviceOpeners, Opener, OpenerSearch
from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.metrics import ArbiterCollector
from arbiter.server import ArbiterServer
from arbiter.status import status_of
from nvml.queries import Nvml
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, HandMeter, Nobody, Process, a_grant, wait_for
from vgpu.api.cgroup import CgroupOwner
from vgpu.protocol import wire

LOST = 999_999
"""A pid that no process has."""
SELF = os.getpid()
"""Of all processes that connect here."""
Listed = dict[int, int | None]


@pytest.fixture
def server(node: ArbiterNode, meter: HandMeter) -> ArbiterServer:
    """A container of 4000 MiB."""
    server = node.start()
    node.allocate("k", a_grant(4000))
    wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
    return server


def reads(
    server: ArbiterServer, meter: HandMeter, used: int | None, listed: Listed, *, times: int = 3, uuid: str = GPU,
    apart_s: float = 1.0,
) -> None:  # fmt: skip
    """So many readings. MiB."""
    for _ in range(times):
        meter.ahead_s += apart_s
        pids = {pid: None if mib is None else mib * MIB for pid, mib in listed.items()}
        seen = {pid: SeenProcess(1, None, 0) for pid in listed}
        counted = {uuid: None if used is None else used * MIB}
        meter._report(MemoryReading(meter._clock(), {uuid: pids}, seen, used=counted))
        wait_for(lambda: not meter._readings)
        with server.lock:
            pass


def found(server: ArbiterServer) -> list[tuple[str, int, int]]:
    """GPU, MiB, MiB in use; the brief document has the same."""
    whole = status_of(server).unlisted
    assert status_of(server, brief=True).unlisted == whole
    return [(one.gpu, one.held_bytes // MIB, one.used_bytes // MIB) for one in whole]


def metric(server: ArbiterServer) -> dict[str, float]:
    families = [one for one in ArbiterCollector(server).collect() if one.name == "tangram_gpu_memory_unlisted_bytes"]
    return {sample.labels["gpu_uuid"]: sample.value / MIB for one in families for sample in one.samples}


def works(node: ArbiterNode, lease_mib: int, managed_mib: int = 0, unused_mib: int = 0) -> Process:
    """A process that uses all that it leased, but for so much."""
    process = node.process("k")
    assert not process.lease(lease_mib * MIB).refused
    process.send(wire.Usage(0, (lease_mib - unused_mib) * MIB, lease_mib * MIB, managed_mib))
    process.lease(0)
    return process


def test_memory_that_no_process_is_listed_for_is_in_status_and_metrics_until_it_is_gone(
    server: ArbiterServer, meter: HandMeter
) -> None:
    reads(server, meter, 2560, {}, times=2)
    assert found(server) == [], "a context may be used memory before its process is listed"
    assert metric(server) == {GPU: 0}
    reads(server, meter, 2560, {}, times=1)
    assert found(server) == [(GPU, 2560, 2560)]
    assert metric(server) == {GPU: 2560}
    reads(server, meter, 0, {}, times=1)
    assert found(server) == []
    assert metric(server) == {GPU: 0}


def test_readings_in_a_hurry_do_not_make_it_sooner(server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, 2560, {}, times=20, apart_s=0.05)
    assert found(server) == []


@pytest.mark.parametrize(
    ("used", "listed", "left"),
    [
        (3000, {LOST: 1000}, 2000),
        (3000, {LOST: 1000, LOST + 1: 1900}, None),
        (1000, {LOST: 800, LOST + 1: 800}, None),
        (200, {LOST: 1}, None),
        (202, {LOST: 1}, 201),
    ],
    ids=[
        "beside a listed one",
        "within the tolerance of two",
        "shared memory is listed twice",
        "the tolerance of one",
        "more",
    ],
)
def test_what_nvml_lists_explains_it(
    server: ArbiterServer, meter: HandMeter, used: int, listed: Listed, left: int | None
) -> None:
    reads(server, meter, used, listed)
    assert found(server) == ([] if left is None else [(GPU, left, used)])


def test_what_is_charged_explains_managed_memory_which_nvml_does_not_list(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    works(node, 3000)
    reads(server, meter, 3150, {SELF: 300})
    assert found(server) == []
    reads(server, meter, 3800, {SELF: 300})
    assert found(server) == [(GPU, 800, 3800)]


def test_a_lease_that_is_not_used_hides_nothing_of_others_beside_managed_memory_that_is_stated(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    process = works(node, 3000, managed_mib=2000, unused_mib=700)
    reads(server, meter, 2300 + 900, {SELF: 300}, times=6)
    assert found(server) == [(GPU, 900, 3200)]
    process.send(wire.Usage(0, 2301 * MIB, 3000 * MIB, 2000))
    process.lease(0)
    reads(server, meter, 2300 + 900, {SELF: 300}, times=1)
    assert found(server) == [], "it allocates, and may have taken the rest of its lease since"


def test_contexts_that_grew_unseen_are_not_taken_for_others_memory(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    works(node, 1000, managed_mib=1000)
    reads(server, meter, 1000 + 1500, {SELF: 1500}, times=1)
    reads(server, meter, 1000 + 1500, {SELF: 1500}, times=5)
    assert found(server) == []
    assert status_of(server).containers[0].processes[0].gpus[0].managed_bytes == 1000 * MIB


def test_memory_whose_maker_is_gone_and_that_others_have_open_is_charged_to_no_process(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    maker, other = works(node, 2000), node.process("k")
    key = (wire.Space.IPC, 2000 * MIB, bytes(wire.KEY_BYTES))
    maker.send(wire.Hold(0, wire.HoldState.MADE, *key))
    maker.lease(0)
    other.send(wire.Hold(0, wire.HoldState.OPENED, *key))
    other.receive()
    maker.close()
    wait_for(lambda: status_of(server).containers[0].gpus[0].shared_bytes)
    reads(server, meter, 2100, {SELF: 50})
    assert found(server) == []


def test_a_process_of_which_nvml_does_not_report_makes_it_unknown(server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, 2560, {})
    reads(server, meter, 2560, {LOST: None}, times=1)
    assert found(server) == []
    assert metric(server) == {}
    reads(server, meter, None, {}, times=1)
    assert metric(server) == {}
    reads(server, meter, 0, {}, times=1)
    assert metric(server) == {GPU: 0}


def test_a_gpu_that_does_not_answer_keeps_its_last_result(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    node.allocate("c", replace(a_grant(uuids=(OTHER_GPU,)), uid="another"))
    wait_for(lambda: "c" in server.containers and server.containers["c"].grant)
    reads(server, meter, 2560, {})
    reads(server, meter, 0, {}, uuid=OTHER_GPU)
    assert found(server) == [(GPU, 2560, 2560)]
    assert metric(server) == {GPU: 2560, OTHER_GPU: 0}


def test_a_gpu_without_shares_is_dropped(node: ArbiterNode, server: ArbiterServer, meter: HandMeter) -> None:
    reads(server, meter, 2560, {})
    shutil.rmtree(node.folder / "k")
    wait_for(lambda: "k" not in server.containers)
    reads(server, meter, 0, {}, times=1, uuid=OTHER_GPU)
    assert found(server) == []
    assert metric(server) == {}


class Seeing(DeviceOpeners):
    """Returns the openers that a test sets, and stores the requests."""

    def __init__(self) -> None:
        super().__init__(Nvml(Nobody()))
        self.wanted = OpenerSearch()

    def want(self, wanted: OpenerSearch) -> None:
        self.wanted = wanted


def test_the_container_that_may_have_it_is_searched_for_and_in_the_status(
    node: ArbiterNode, server: ArbiterServer, meter: HandMeter
) -> None:
    node.process("k")
    seeing = server.unlisted_memory.openers = Seeing()
    reads(server, meter, 2560, {LOST: 1}, times=2)
    assert seeing.wanted.keys == {}, "there is nothing to look for yet"
    seeing.found = {GPU: Opener("k", (7, 8)), OTHER_GPU: Opener("gone", (9,))}
    reads(server, meter, 2560, {LOST: 1}, times=1)
    assert (dict(seeing.wanted.keys), seeing.wanted.known) == ({GPU: frozenset({"k"})}, {LOST, SELF})
    assert seeing.wanted.owners.of(CgroupOwner("uid-a"), None) == ("k",)
    (one,) = status_of(server).unlisted
    assert (one.uid, one.pod, one.container, one.pids) == ("uid-a", "default/a", "main", (7, 8))
    seeing.found = {GPU: Opener("gone", (7,))}
    (one,) = status_of(server).unlisted
    assert (one.uid, one.pod, one.container, one.pids) == ("", "", "", ())
    reads(server, meter, 0, {}, times=1)
    assert seeing.wanted.keys == {}
