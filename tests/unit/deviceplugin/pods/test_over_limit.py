"""What the arbiter's status means: who is over, the sentence for a person, and what is new since the last look."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.pods.over_limit import (
    AGAIN_S,
    BYPASSED,
    REASON,
    Offence,
    StatusWatch,
    Trouble,
    offences,
    ungranted_notes,
)
from kube.objects import Pod
from tests.builders import pod
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.names import GUARDS
from vgpu.protocol.status import (
    BRIEF,
    BypassStatus,
    ContainerStatus,
    GpuStatus,
    GpuTimeStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    Status,
    UnenforcedStatus,
    UngrantedStatus,
    UnlistedStatus,
    encode_status,
)

MIB = 2**20


def gpu(number: int, limit_mib: int = 4096) -> GpuStatus:
    return GpuStatus(uuid(number), limit_mib * MIB, 0, 0, 0, 0)


def process(pid: int, command: str, **held: int) -> ProcessStatus:
    """`c0=100` = NVML says 100 MiB on GPU 0."""
    gpus = (ProcessGpu(uuid(int(name[1:])), 0, 0, mib * MIB) for name, mib in held.items())
    return ProcessStatus(pid, 1, command, tuple(gpus))


def container(name: str = "a", guard: str = "report", *, over: bool = True) -> ContainerStatus:
    return ContainerStatus(
        f"key-{name}", f"default/{name}", f"uid-default-{name}", "main", "standard", 2, guard, over,
        (gpu(0),), (process(7, "miner", c0=5000),),
    )  # fmt: skip


@dataclass
class Reported:
    offences: list[Offence] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unenforced_notes: list[str] = field(default_factory=list)
    ungranted_notes: list[str] = field(default_factory=list)
    unlisted_notes: list[str] = field(default_factory=list)

    def unlisted(self, note: str, pod: Pod | None = None, container: str = "") -> None:
        self.unlisted_notes.append(note if pod is None else f"{pod.uid} {container}: {note}")

    def ungranted(self, note: str) -> None:
        self.ungranted_notes.append(note)

    def over_limit(self, pod: Pod, offence: Offence) -> None:
        assert pod.uid == offence.uid
        self.offences.append(offence)

    def over_limit_now(self, containers: int) -> None:
        self.now.append(containers)

    def noticed(self, pod: Pod, container: str, reason: str) -> None:
        self.notices.append(f"{pod.uid} {container} {reason}")

    def unenforced(self, pod: Pod, container: str, note: str) -> None:
        assert f"of container {container} " in note
        self.unenforced_notes.append(f"{pod.uid} {note}")

    def arbiter_silent(self, trouble: Trouble) -> None:
        self.troubles.append(trouble)


@dataclass
class Looking:
    """A guard whose arbiter says what the test wants."""

    socket: Path
    known: dict[str, Pod] = field(default_factory=lambda: {p.uid: p for p in (pod("a").build(), pod("b").build())})
    reported: Reported = field(default_factory=Reported)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.guard = StatusWatch(self.socket, self.known.get, self.reported, lambda: self.at_s)

    async def look(self, document: bytes | None) -> None:
        if document is None:
            self.socket.unlink(missing_ok=True)
            await self.guard.once()
            return

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert writer.get_extra_info("peername").startswith(BRIEF.encode())
            writer.write(document)
            writer.close()

        self.socket.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(answer, self.socket):
            await self.guard.once()

    async def look_at(
        self,
        *containers: ContainerStatus,
        kills: tuple[KillStatus, ...] = (),
        ungranted: tuple[UngrantedStatus, ...] = (),
        unlisted: tuple[UnlistedStatus, ...] = (),
    ) -> None:
        await self.look(encode_status(Status(containers, kills=kills, ungranted=ungranted, unlisted=unlisted)))


@pytest.fixture
def looking() -> Iterator[Looking]:
    with tempfile.TemporaryDirectory(prefix="g-") as folder:
        yield Looking(Path(folder) / "status.sock")


def note(found: ContainerStatus) -> str:
    ((offence,)) = offences(Status((found,)))
    return offence.note


def test_the_sentence_names_the_worst_gpu_and_its_largest_process() -> None:
    found = msgspec.structs.replace(
        container(guard="evict"), gpus=(gpu(0, 8192), gpu(1)),
        processes=(process(1, "sh", c0=8000, c1=100), process(2, "miner", c1=4000), process(3, "idle", c0=1)),
    )  # fmt: skip
    assert note(found) == (
        f"container main uses 4100 MiB of {uuid(1)} and was granted 4096 MiB, 4000 MiB of it by process 2 (miner);"
        " policy evict: the pod is deleted"
    )


def test_the_sentence_does_with_what_is_known() -> None:
    no_processes = msgspec.structs.replace(container(), processes=())
    assert note(no_processes).startswith(f"container main uses 0 MiB of {uuid(0)} and was granted 4096 MiB; policy")
    no_gpus = msgspec.structs.replace(container(guard="kill"), gpus=())
    assert note(no_gpus).startswith(
        "container main uses more GPU memory than it was granted; policy kill: the process that does it is killed"
    )
    unmeasured = ProcessStatus(9, 0, "", (ProcessGpu(uuid(0), 3 * MIB, 2 * MIB),))
    assert "5 MiB of it by process 9 (of unknown name)" in note(
        msgspec.structs.replace(container(), processes=(unmeasured,))
    )


@given(st.lists(st.booleans(), max_size=5), st.text(max_size=3000), st.sampled_from([*GUARDS, "of tomorrow"]))
def test_only_who_is_over_is_an_offence_and_its_sentence_fits_an_event(
    over: list[bool], command: str, guard: str
) -> None:
    held = (process(1, command, c0=5000),)
    containers = tuple(
        msgspec.structs.replace(container(f"p{i}", guard, over=is_over), processes=held)
        for i, is_over in enumerate(over)
    )
    found = offences(Status(containers))
    assert [o.uid for o in found] == [f"uid-default-p{i}" for i, is_over in enumerate(over) if is_over]
    assert all(len(o.note) < 1024 for o in found)


async def test_what_stays_over_is_reported_once_and_what_comes_back_again(looking: Looking) -> None:
    for _ in range(3):
        await looking.look_at(container("a"), container("b", over=False))
    assert [o.uid for o in looking.reported.offences] == ["uid-default-a"]
    await looking.look_at(container("a"), container("b"))
    await looking.look_at(container("a", over=False), container("b"))
    await looking.look_at(container("a"), container("b"))
    assert [o.uid[-1] for o in looking.reported.offences] == ["a", "b", "a"]
    assert looking.reported.now == [1, 1, 1, 2, 1, 2]


def kill(number: int = 7, of: str = "a") -> KillStatus:
    return KillStatus(
        f"{number}-100", f"uid-default-{of}", f"default/{of}", "main", uuid(0), number, "miner", 5000 * MIB, 4096 * MIB
    )


async def test_a_kill_between_two_looks_is_reported_once(looking: Looking) -> None:
    await looking.look_at(container("a", "kill", over=False))
    for _ in range(3):
        await looking.look_at(container("a", "kill", over=False), kills=(kill(),))
    await looking.look_at(kills=(kill(), kill(8)))
    assert [offence.note for offence in looking.reported.offences] == [
        f"container main held 5000 MiB of {uuid(0)} and was granted 4096 MiB; policy kill: process {pid} (miner) was killed"
        for pid in (7, 8)
    ]


async def test_a_kill_that_was_reported_before_it_was_done_is_not_reported_again(looking: Looking) -> None:
    await looking.look_at(container("a", "kill"))
    await looking.look_at(container("a", "kill", over=False), kills=(kill(),))
    await looking.look_at(container("a", "kill", over=False), kills=(kill(),))
    assert len(looking.reported.offences) == 1


async def test_a_kill_of_a_pod_that_the_watch_brings_late_is_reported_late(looking: Looking) -> None:
    late = looking.known.pop("uid-default-a")
    await looking.look_at(kills=(kill(),))
    assert looking.reported.offences == []
    looking.known[late.uid] = late
    await looking.look_at(kills=(kill(),))
    assert len(looking.reported.offences) == 1


async def test_a_policy_that_became_stricter_is_reported_again(looking: Looking) -> None:
    await looking.look_at(container("a", "report"))
    await looking.look_at(container("a", "evict"))
    assert [o.policy for o in looking.reported.offences] == ["report", "evict"]


async def test_a_pod_that_the_watch_brings_late_is_reported_late(looking: Looking) -> None:
    late = looking.known.pop("uid-default-a")
    await looking.look_at(container("a"))
    assert looking.reported.offences == []
    looking.known[late.uid] = late
    await looking.look_at(container("a"))
    await looking.look_at(container("a"))
    assert len(looking.reported.offences) == 1


async def test_an_arbiter_that_fails_changes_nothing_of_what_was_reported(looking: Looking) -> None:
    whole = encode_status(Status((container("a"),)))
    await looking.look(whole)
    newer = whole.replace(b'"version":1', b'"version":2')
    for broken in (None, b"", whole[:-1], newer, b"\xff", b"[" * 100_000):
        await looking.look(broken)
    await looking.look(whole)
    assert len(looking.reported.offences) == 1
    assert looking.reported.now == [1, 1]
    assert looking.reported.troubles == ["unreachable", *["unreadable"] * 5]


async def test_an_arbiter_that_hangs_up_in_the_middle_or_says_too_much_is_no_crash(
    looking: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.pods.over_limit.LARGEST_DOCUMENT", 1000)
    await looking.look(b" " * 200_000)
    assert looking.reported.troubles == ["unreadable"]

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"version":1,')
        writer.transport.abort()

    looking.socket.unlink()
    async with await asyncio.start_unix_server(reset, looking.socket):
        await looking.guard.once()
    assert len(looking.reported.troubles) == 2


async def test_an_arbiter_that_says_nothing_is_left_in_time(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deviceplugin.pods.over_limit.DEADLINE_S", 0.05)
    hung, done = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hung.set()
        await done.wait()
        writer.close()

    async with await asyncio.start_unix_server(hang, looking.socket):
        await looking.guard.once()
        done.set()
    assert hung.is_set()
    assert looking.reported.troubles == ["unreachable"]


@pytest.mark.parametrize(("flag", "reason"), [("unreported", "UnreportedWork"), ("stopped", "StoppedByAnother")])
def test_what_is_found_out_about_gpu_time_is_reported_once_each_time(looking: Looking, flag: str, reason: str) -> None:
    fair = GpuTimeStatus(True, False, 1, 30, 1.0, 0.0, 0.0, 0, "")
    honest = msgspec.structs.replace(container(over=False), turn=fair)
    silent = msgspec.structs.replace(honest, turn=msgspec.structs.replace(fair, **{flag: True}))
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


def unenforced(name: str, *reasons: str) -> ContainerStatus:
    return msgspec.structs.replace(
        container(name, over=False), unenforced=tuple(UnenforcedStatus(reason, ("gpu-time",)) for reason in reasons)
    )


def test_a_limit_that_is_not_enforced_is_reported_once_for_each_reason_and_container(looking: Looking) -> None:
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


def test_a_reason_that_comes_and_goes_is_reported_again_after_ten_minutes_only(looking: Looking) -> None:
    async def look() -> None:
        for looking.at_s in (0.0, 1.0, AGAIN_S - 1, AGAIN_S):
            await looking.look_at(unenforced("a", "mps"))
            await looking.look_at(unenforced("a"))

    asyncio.run(look())
    assert len(looking.reported.unenforced_notes) == 2


def test_a_limit_is_reported_when_the_watch_knows_the_pod(looking: Looking) -> None:
    late = looking.known.pop("uid-default-a")

    async def look() -> None:
        await looking.look_at(unenforced("a", "nvml"))
        assert looking.reported.unenforced_notes == []
        looking.known[late.uid] = late
        await looking.look_at(unenforced("a", "nvml"))

    asyncio.run(look())
    assert len(looking.reported.unenforced_notes) == 1


def test_a_reason_of_a_later_arbiter_is_reported_too(looking: Looking) -> None:
    asyncio.run(looking.look_at(unenforced("a", "something-new")))
    (note,) = looking.reported.unenforced_notes
    assert "(something-new)" in note


def bypassing(policy: str, guard: str = "report") -> ContainerStatus:
    bypass = BypassStatus(uuid(0), (7,), 5000 * MIB, 4096 * MIB, policy)
    return msgspec.structs.replace(container(guard=guard, over=False), bypasses=(bypass,))


@pytest.mark.parametrize(
    ("policy", "follows"), [("report", "it is reported"), ("evict", "the pod is deleted")], ids=["report", "evict"]
)
async def test_a_bypass_is_reported_once_with_its_own_reason(looking: Looking, policy: str, follows: str) -> None:
    for _ in range(3):
        await looking.look_at(bypassing(policy))
    (offence,) = looking.reported.offences
    assert (offence.reason, offence.policy) == (BYPASSED, policy)
    assert offence.note == (
        f"container main uses 5000 MiB of {uuid(0)} and was granted 4096 MiB; process 7 (miner) goes around the library;"
        f" arbiter.bypass: {follows}"
    )
    assert looking.reported.now == [0, 0, 0], "the metric counts who is over by the guard"


async def test_a_bypass_that_is_killed_makes_one_event_also_beside_a_kill_of_the_guard(looking: Looking) -> None:
    of = "uid-default-a", "default/a", "main", uuid(0)
    kill = KillStatus("7-1", *of, 7, "miner", 5000 * MIB, 4096 * MIB, bypass=True)
    other = KillStatus("8-1", *of, 8, "sh", 5000 * MIB, 4096 * MIB)
    for _ in range(2):
        await looking.look_at(bypassing("kill"), kills=(kill, other))
    assert [one.reason for one in looking.reported.offences] == [BYPASSED, REASON]
    assert looking.reported.offences[0].note == (
        f"container main held 5000 MiB of {uuid(0)} and was granted 4096 MiB; arbiter.bypass kill: process 7 (miner)"
        " went around the library and was killed"
    )


async def test_that_the_whole_container_was_killed_is_said(looking: Looking) -> None:
    kill = KillStatus(
        "7-1",
        "uid-default-a",
        "default/a",
        "main",
        uuid(0),
        7,
        "miner",
        5000 * MIB,
        4096 * MIB,
        bypass=True,
        whole=True,
    )
    await looking.look_at(bypassing("kill"), kills=(kill,))
    (reported,) = looking.reported.offences
    assert reported.note.endswith(
        "process 7 (miner) went around the library and was killed, and with it all processes of the container, which starts "
        "such processes again and again"
    )


async def test_memory_that_belongs_to_no_grant_is_reported_once_for_each_gpu_and_again_after_ten_minutes(
    looking: Looking,
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


def test_the_note_of_a_pod_that_nobody_knows_has_its_uid() -> None:
    (note,) = ungranted_notes([UngrantedStatus(uuid(0), 7, "x", 1, "a-uid")], lambda _: None).values()
    assert "process 7 (x) of pod a-uid uses 0 MiB" in note


async def test_memory_that_is_listed_for_no_process_is_reported_once_for_each_gpu_and_again_after_ten_minutes(
    looking: Looking,
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


async def test_the_report_to_the_pod_names_each_gpu(looking: Looking) -> None:
    named = UnlistedStatus(uuid(0), 2560 * MIB, 3000 * MIB, "uid-default-a", "default/a", "main", (7,))
    await looking.look_at(unlisted=(named, msgspec.structs.replace(named, gpu=uuid(1))))
    of_pod = [note for note in looking.reported.unlisted_notes if note.startswith("uid-default-a main: ")]
    assert [gpu in note for gpu, note in zip((uuid(0), uuid(1)), of_pod, strict=True)] == [True, True]


async def test_the_pod_of_the_container_that_may_hold_it_is_reported_once_in_ten_minutes(looking: Looking) -> None:
    found = UnlistedStatus(uuid(0), 2560 * MIB, 3000 * MIB)
    named = msgspec.structs.replace(
        found, uid="uid-default-a", pod="default/a", container="main", pids=tuple(range(7, 27))
    )
    other_scheduler = msgspec.structs.replace(named, uid="nobody-knows-it")
    for one in (found, other_scheduler, named, found, named):
        looking.at_s += 1
        await looking.look_at(unlisted=(one,))
    of_node, of_pod = looking.reported.unlisted_notes
    assert "may hold" not in of_node
    assert of_pod.startswith(f"uid-default-a main: 2560 MiB of {uuid(0)}, which containers share")
    assert of_pod.endswith(
        "; container main of pod default/a may hold them: it alone has processes there (7, 8, 9, 10, 11, 12, 13, 14) that"
        " have a GPU open and that NVML lists nowhere, which is no proof"
    )
    looking.at_s = 2 * AGAIN_S
    await looking.look_at(unlisted=(named,))
    assert len(looking.reported.unlisted_notes) == 4, "node and pod"
    assert looking.reported.offences == [], "nobody is killed or evicted for it"
