"""tests.e2e.matrix.invariants: each finds a violation that is planted, and nothing in a node where all is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest

from tests.e2e.matrix.invariants import INVARIANTS, broken, grant_directories_are_never_reused
from tests.e2e.matrix.seen import GpuProcess, Preemption, Seen, SeenPod, Share, Tried
from vgpu.api.contract import devices
from vgpu.api.grant import AssignedGpu, Assignment, Grant, GrantGpu
from vgpu.api.inventory import Gpu, Inventory, Orphan
from vgpu.api.names import DEFAULT
from vgpu.protocol.status import ContainerStatus, GpuStatus, ProcessStatus, StatusDocument, UnenforcedStatus

GPU: Final = "GPU-224c6868-4065-4e03-b95e-5c9f0cbbd0ed"
OTHER: Final = "GPU-e6b40555-0c21-481a-9384-dcbc96993dee"
POD, KEY, FOLDER, PID = "uid-a", "ns/a", "folder-a", 100
ORPHAN: Final = Orphan("uid-o", "ns", "o", (AssignedGpu(GPU, 0, 41 * 1024, 10),))
UNENFORCED: Final = UnenforcedStatus("no-channels", ("gpu-time",))


def grant(uid: str = POD, mib: int = 40 * 1024, core: int = 30) -> Grant:
    return Grant("ns", "a", uid, "main", (GrantGpu(GPU, mib, core),))


def process(**more: Any) -> GpuProcess:
    made = GpuProcess(PID, POD, {GPU: 40 * 1024}, grant(), FOLDER, has_library=True)
    return replace(made, **more)


def container(**more: Any) -> ContainerStatus:
    gpu = GpuStatus(GPU, 40 << 30, 30, leased_bytes=40 << 30, used_bytes=1, context_bytes=0)
    made = ContainerStatus(
        FOLDER, KEY, POD, "main", "standard", 2, "report", False, (gpu,), (ProcessStatus(PID, 1, "x", ()),)
    )
    return msgspec.structs.replace(made, **more)  # fmt: skip


def well() -> Seen:
    """A node with one pod, on which nothing is wrong."""
    inventory = Inventory((Gpu(GPU, 0, "a", 80 * 1024), Gpu(OTHER, 1, "a", 80 * 1024)))
    return Seen(
        inventory=inventory,
        allocatable={resource: len(ids) for resource, ids in devices(inventory, DEFAULT).items()},
        pods=(SeenPod(POD, KEY, Assignment({"main": (AssignedGpu(GPU, 0, 40 * 1024, 30),)})),),
        processes=(process(),),
        grants={FOLDER: grant()},
        status=StatusDocument((container(),)),
        kubelet={(POD, "gpu-mem", GPU): 40, (POD, "gpu-core", GPU): 30},
        tried=(Tried(KEY, frozenset({GPU.partition("-")[2]}), "took 1.0 GiB", "CUDA_ERROR_OUT_OF_MEMORY"),),
        shares=(Share(KEY, 28.0, 30),),
        longest_rest_s={KEY: 0.7},
    )


def late(seen: Seen) -> Seen:
    unenforced = container(gpu_time_state="unenforced", unenforced=(UNENFORCED,))
    return replace(seen, status=StatusDocument((unenforced,)))


PLANTED: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "an orphan without capacity": ("I1", {"inventory": replace(well().inventory, orphans=(ORPHAN,))}, "82944 MiB and 40 %"),
    "an uncounted process": ("I1", {"processes": (process(), process(pid=7, uid="uid-gone", grant=grant("uid-gone", 41 * 1024)))}, "82944 MiB"),
    "core given twice": ("I1", {"pods": (*well().pods, SeenPod("uid-b", "ns/b", Assignment({"main": (AssignedGpu(GPU, 0, 1024, 71),)})))}, "101 %"),
    "another GPU": ("I2", {"tried": (Tried(KEY, frozenset({OTHER.partition("-")[2]}), "took", "OUT_OF_MEMORY"),)}, "sees"),
    "a device too many": ("I3", {"kubelet": {(POD, "gpu-mem", GPU): 41, (POD, "gpu-core", GPU): 30}}, "the kubelet counts"),
    "devices of another GPU": ("I3", {"kubelet": {(POD, "gpu-mem", OTHER): 40, (POD, "gpu-core", GPU): 30}}, "the kubelet counts"),
    "no GPU offered": ("I4", {"allocatable": {}}, "the node offers 0 of tangram.sh/gpu-mem"),
    "a GPU that stays ill": ("I4", {"inventory": replace(well().inventory, gpus=(replace(well().inventory.gpus[0], healthy=False), well().inventory.gpus[1]))}, "is not healthy"),
    "a pod that waits": ("I4", {"waiting": ("ns/w",)}, "ns/w does not run"),
    "evicted in vain": ("I5", {"preemptions": (Preemption("ns/v", "uid-p"),)}, "was evicted for pod UID uid-p"),
    "more than the grant": ("I6", {"processes": (process(held_mib={GPU: 40 * 1024 + 3}),)}, "uses 40963 MiB"),
    "a limit that refuses nothing": ("I6", {"tried": (Tried(KEY, frozenset({GPU.partition("-")[2]}), "took", "took 41 GiB"),)}, "was not refused"),
    "a limit that refuses all": ("I6", {"tried": (Tried(KEY, frozenset({GPU.partition("-")[2]}), "OUT_OF_MEMORY", "OUT_OF_MEMORY"),)}, "within its limit failed"),
    "too much GPU time": ("I6", {"shares": (Share(KEY, 35.1, 30),)}, "had 35.1 %"),
    "no GPU time": ("I6", {"shares": (Share(KEY, 1.0, 30),)}, "had 1.0 %"),
    "left suspended": ("I7", {"longest_rest_s": {KEY: 1.6}}, "did not run for 1.60 s"),
    "leased beyond the limit": ("I7", {"status": StatusDocument((container(gpus=(GpuStatus(GPU, 40 << 30, 30, 41 << 30, 1, 0),)),))}, "bytes leased"),
    "no library": ("I8", {"processes": (process(has_library=False),)}, "without the library"),
    "no grant": ("I8", {"processes": (process(grant=None, grant_folder=""),)}, "no grant in its file system"),
    "the grant of another pod": ("I8", {"processes": (process(grant=grant("uid-x")),)}, "under the grant of pod UID uid-x"),
    "a larger grant": ("I8", {"processes": (process(grant=grant(mib=50 * 1024)),)}, "is granted"),
    "unknown to the arbiter": ("I8", {"status": StatusDocument((container(processes=()),))}, "not known to the arbiter"),
    "a container unknown to the arbiter": ("I8", {"status": StatusDocument(())}, "the arbiter does not know"),
    "a state without a reason": ("I8", {"status": StatusDocument((container(memory_state="unenforced"),)), "unenforced_events": frozenset({KEY})}, "names 0 reasons"),
    "no metric": ("I8", {"status": late(well()).status, "unenforced_events": frozenset({KEY})}, "no metric names"),
    "no Event": ("I8", {"status": late(well()).status, "unenforced_metric": frozenset({(KEY, "no-channels")})}, "has no Event"),
}  # fmt: skip


def test_nothing_is_broken_where_all_is_well() -> None:
    assert broken(well()) == []


def test_unenforced_and_reported_everywhere_is_no_violation() -> None:
    named = {"unenforced_metric": frozenset({(KEY, "no-channels")}), "unenforced_events": frozenset({KEY})}
    assert broken(replace(late(well()), **named)) == []


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found_by_its_own_invariant(what: str) -> None:
    name, change, words = PLANTED[what]
    found = broken(replace(well(), **change))
    assert any(one.startswith(f"{name}: ") and words in one for one in found), found


def test_every_invariant_has_a_planted_violation() -> None:
    assert {name for name, _, _ in PLANTED.values()} == set(INVARIANTS)


def test_a_grant_directory_of_another_pod_is_found() -> None:
    history: dict[str, str] = {}
    assert list(grant_directories_are_never_reused(well(), history)) == []
    assert list(grant_directories_are_never_reused(well(), history)) == []
    again = replace(well(), grants={FOLDER: grant("uid-b")})
    assert list(grant_directories_are_never_reused(again, history)) == [
        f"grant directory {FOLDER} was of pod UID {POD} and is of uid-b"
    ]
