"""The arbiter's status of limits, GPU time and memory without a grant: reported once, and again after ten minutes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from deviceplugin.pods.limit_violations import ungranted_notes
from deviceplugin.pods.status_watch import AGAIN_S
from tests.builders import pod
from tests.unit.deviceplugin.builders import uuid
from tests.unit.deviceplugin.pods.status_watch_kit import MIB, WatchedArbiter, container, looking
from vgpu.protocol.status import (
    ContainerStatus,
    GpuTimeStatus,
    SwapStatus,
    UnenforcedStatus,
    UngrantedStatus,
    UnlistedStatus,
)

__all__ = ["looking"]


@pytest.mark.parametrize(("flag", "reason"), [("unreported", "UnreportedWork"), ("stopped", "StoppedByAnother")])
def test_a_verdict_about_gpu_time_is_reported_once_each_time(looking: WatchedArbiter, flag: str, reason: str) -> None:
    fair = GpuTimeStatus(True, False, 1, 30, 1.0, 0.0, 0.0, 0, "")
    honest = msgspec.structs.replace(container(over=False), gpu_time=fair)
    silent = msgspec.structs.replace(honest, gpu_time=msgspec.structs.replace(fair, **{flag: True}))
    other_scheduler = msgspec.structs.replace(silent, uid="uid-default-c")

    async def looks() -> None:
        for found in ([honest], [silent, other_scheduler], [silent, other_scheduler], [honest], [silent]):
            await looking.look_at(*found)
        looking.known["uid-default-c"] = pod("c").build()
        await looking.look_at(silent, other_scheduler)

    asyncio.run(looks())
    assert looking.reported.notices == [
        f"uid-default-a main {reason}",
        f"uid-default-a main {reason}",
        f"uid-default-c main {reason}",
    ]


def test_a_wait_for_the_host_pool_is_reported_once_in_ten_minutes_although_the_program_tries_again(
    looking: WatchedArbiter,
) -> None:
    waits = SwapStatus(False, 0.0, "", "", 1, "", "", "kill", "", "evict", pool_full="the host pool is full")
    waiting, idle = (
        msgspec.structs.replace(container(over=False), swap=one)
        for one in (waits, msgspec.structs.replace(waits, pool_full=""))
    )

    async def looks() -> None:
        for found in (idle, waiting, waiting, idle, waiting):
            await looking.look_at(found)
        looking.at_s += AGAIN_S
        await looking.look_at(waiting)

    asyncio.run(looks())
    note = "uid-default-a requests of container main for memory above its guarantee wait: the host pool is full"
    assert looking.reported.pool_full_notes == [note] * 2


def unenforced(name: str, *reasons: str) -> ContainerStatus:
    return msgspec.structs.replace(
        container(name, over=False), unenforced=tuple(UnenforcedStatus(reason, ("gpu-time",)) for reason in reasons)
    )


def test_a_limit_that_is_not_enforced_is_reported_once_for_each_reason_and_container(looking: WatchedArbiter) -> None:
    async def look() -> None:
        await looking.look_at(unenforced("a", "no-thread"), unenforced("b", "no-thread"))
        await looking.look_at(unenforced("a", "no-thread", "gated"), unenforced("b", "no-thread"))

    asyncio.run(look())
    assert [note.partition(":")[0] for note in looking.reported.unenforced_notes] == [
        "uid-default-a the limit of gpu-time of container main is not enforced (no-thread)",
        "uid-default-b the limit of gpu-time of container main is not enforced (no-thread)",
        "uid-default-a the limit of gpu-time of container main is not enforced (gated)",
    ]
    assert "Raise the pod's pids limit" in looking.reported.unenforced_notes[0]


def test_a_reason_that_comes_and_goes_is_reported_again_after_ten_minutes_only(looking: WatchedArbiter) -> None:
    async def look() -> None:
        for looking.at_s in (0.0, 1.0, AGAIN_S - 1, AGAIN_S):
            await looking.look_at(unenforced("a", "mps"))
            await looking.look_at(unenforced("a"))

    asyncio.run(look())
    assert len(looking.reported.unenforced_notes) == 2


def test_a_limit_is_reported_when_the_watch_has_the_pod(looking: WatchedArbiter) -> None:
    late = looking.known.pop("uid-default-a")

    async def look() -> None:
        await looking.look_at(unenforced("a", "nvml"))
        assert looking.reported.unenforced_notes == []
        looking.known[late.uid] = late
        await looking.look_at(unenforced("a", "nvml"))

    asyncio.run(look())
    assert len(looking.reported.unenforced_notes) == 1


def test_a_reason_of_a_later_arbiter_is_reported_too(looking: WatchedArbiter) -> None:
    asyncio.run(looking.look_at(unenforced("a", "something-new")))
    (note,) = looking.reported.unenforced_notes
    assert "(something-new)" in note


async def test_memory_that_belongs_to_no_grant_is_reported_once_for_each_gpu_and_again_after_ten_minutes(
    looking: WatchedArbiter,
) -> None:
    found = (
        UngrantedStatus(uuid(0), 7, "miner", 700 * MIB, "uid-default-a"), UngrantedStatus(uuid(0), 8, "sh", 9 * MIB),
        UngrantedStatus(uuid(1), 9, "", None),
    )  # fmt: skip
    for at_s in (0.0, 1.0, AGAIN_S - 1):
        looking.at_s = at_s
        await looking.look_at(ungranted=found)
    assert looking.reported.ungranted_notes == [
        f"process 7 (miner) of pod default/a uses 700 MiB of {uuid(0)}, which containers share, and belongs to no grant"
        " there: no limit counts it; 1 more do so",
        f"process 9 (of unknown name) uses memory of {uuid(1)}, which containers share, and belongs to no grant there:"
        " no limit counts it",
    ]
    looking.at_s = AGAIN_S
    await looking.look_at(ungranted=found)
    assert len(looking.reported.ungranted_notes) == 4
    await looking.look_at()
    await looking.look_at(ungranted=found[:1])
    assert len(looking.reported.ungranted_notes) == 5, "it had ended"


def test_the_note_of_an_unknown_pod_has_its_uid() -> None:
    (note,) = ungranted_notes([UngrantedStatus(uuid(0), 7, "x", 1, "a-uid")], lambda _: None).values()
    assert "process 7 (x) of pod a-uid uses 0 MiB" in note


async def test_memory_that_is_listed_for_no_process_is_reported_once_for_each_gpu_and_again_after_ten_minutes(
    looking: WatchedArbiter,
) -> None:
    found = (
        UnlistedStatus(uuid(0), 2560 * MIB, 3000 * MIB),
        UnlistedStatus(uuid(1), 300 * MIB, 300 * MIB),
    )
    for at_s in (0.0, 1.0, AGAIN_S - 1):
        looking.at_s = at_s
        await looking.look_at(unlisted=found)
    assert looking.reported.unlisted_notes == [
        f"2560 MiB of {uuid(0)}, which containers share, are in use and NVML lists them for no process: no limit counts"
        " them, and a program may have taken them without CUDA; 3000 MiB are in use in all",
        f"300 MiB of {uuid(1)}, which containers share, are in use and NVML lists them for no process: no limit counts"
        " them, and a program may have taken them without CUDA; 300 MiB are in use in all",
    ]
    assert looking.reported.ungranted_notes == []
    looking.at_s = AGAIN_S
    await looking.look_at(unlisted=found)
    assert len(looking.reported.unlisted_notes) == 4
    await looking.look_at()
    await looking.look_at(unlisted=found[:1])
    assert len(looking.reported.unlisted_notes) == 5, "it had ended"


async def test_the_report_to_the_pod_names_each_gpu(looking: WatchedArbiter) -> None:
    named = UnlistedStatus(uuid(0), 2560 * MIB, 3000 * MIB, "uid-default-a", "default/a", "main", (7,))
    await looking.look_at(unlisted=(named, msgspec.structs.replace(named, gpu=uuid(1))))
    of_pod = [note for note in looking.reported.unlisted_notes if note.startswith("uid-default-a main: ")]
    assert [gpu in note for gpu, note in zip((uuid(0), uuid(1)), of_pod, strict=True)] == [True, True]


async def test_the_pod_of_the_container_that_may_use_it_is_reported_once_in_ten_minutes(
    looking: WatchedArbiter,
) -> None:
    found = UnlistedStatus(uuid(0), 2560 * MIB, 3000 * MIB)
    named = msgspec.structs.replace(
        found, uid="uid-default-a", pod="default/a", container="main", pids=tuple(range(7, 27))
    )
    other_scheduler = msgspec.structs.replace(named, uid="nobody-knows-it")
    for one in (found, other_scheduler, named, found, named):
        looking.at_s += 1
        await looking.look_at(unlisted=(one,))
    of_node, of_pod = looking.reported.unlisted_notes
    assert "may use" not in of_node
    assert of_pod.startswith(f"uid-default-a main: 2560 MiB of {uuid(0)}, which containers share")
    assert of_pod.endswith(
        "; container main of pod default/a may use them: it alone has processes there (7, 8, 9, 10, 11, 12, 13, 14) that"
        " have a GPU open and that NVML lists nowhere, which is no proof"
    )
    looking.at_s = 2 * AGAIN_S
    await looking.look_at(unlisted=(named,))
    assert len(looking.reported.unlisted_notes) == 4, "node and pod"
    assert looking.reported.limit_violations == [], "no pod is killed or evicted for it"
