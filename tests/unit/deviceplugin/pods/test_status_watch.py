"""Containers over their limit: the sentence for a person, and what is new since the arbiter's status was read last."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.pods.limit_violations import BYPASSED, REASON, STRANDED, kill_violation, limit_violations
from tests.unit.deviceplugin.builders import uuid
from tests.unit.deviceplugin.pods.status_watch_kit import MIB, WatchedArbiter, container, gpu, looking, note, process
from vgpu.api.names import OVER_LIMIT_ACTIONS
from vgpu.protocol.status import (
    BypassStatus,
    ContainerStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    StatusDocument,
    SwapStatus,
    encode_status,
)

__all__ = ["looking"]


def test_the_sentence_names_the_worst_gpu_and_its_largest_process() -> None:
    found = msgspec.structs.replace(
        container(over_limit_action="evict"), gpus=(gpu(0, 8192), gpu(1)),
        processes=(process(1, "sh", c0=8000, c1=100), process(2, "miner", c1=4000), process(3, "idle", c0=1)),
    )  # fmt: skip
    assert note(found) == (
        f"container main uses 4100 MiB of {uuid(1)} and was granted 4096 MiB, 4000 MiB of it by process 2 (miner);"
        " policy evict: the pod is deleted"
    )


def test_the_sentence_does_with_what_is_known() -> None:
    no_processes = msgspec.structs.replace(container(), processes=())
    assert note(no_processes).startswith(f"container main uses 0 MiB of {uuid(0)} and was granted 4096 MiB; policy")
    no_gpus = msgspec.structs.replace(container(over_limit_action="kill"), gpus=())
    assert note(no_gpus).startswith(
        "container main uses more GPU memory than it was granted; policy kill: the process that does it is killed"
    )
    unmeasured = ProcessStatus(9, 0, "", (ProcessGpu(uuid(0), 3 * MIB, 2 * MIB),))
    assert "5 MiB of it by process 9 (of unknown name)" in note(
        msgspec.structs.replace(container(), processes=(unmeasured,))
    )


@given(
    st.lists(st.booleans(), max_size=5), st.text(max_size=3000), st.sampled_from([*OVER_LIMIT_ACTIONS, "of tomorrow"])
)
def test_only_a_container_over_its_limit_is_a_violation_and_its_sentence_fits_an_event(
    over: list[bool], command: str, over_limit_action: str
) -> None:
    held = (process(1, command, c0=5000),)
    containers = tuple(
        msgspec.structs.replace(container(f"p{i}", over_limit_action, over=is_over), processes=held)
        for i, is_over in enumerate(over)
    )
    found = limit_violations(StatusDocument(containers))
    assert [o.uid for o in found] == [f"uid-default-p{i}" for i, is_over in enumerate(over) if is_over]
    assert all(len(o.note) < 1024 for o in found)


async def test_what_stays_over_is_reported_once_and_what_comes_back_again(looking: WatchedArbiter) -> None:
    for _ in range(3):
        await looking.look_at(container("a"), container("b", over=False))
    assert [o.uid for o in looking.reported.limit_violations] == ["uid-default-a"]
    await looking.look_at(container("a"), container("b"))
    await looking.look_at(container("a", over=False), container("b"))
    await looking.look_at(container("a"), container("b"))
    assert [o.uid[-1] for o in looking.reported.limit_violations] == ["a", "b", "a"]
    assert looking.reported.now == [1, 1, 1, 2, 1, 2]


def kill(number: int = 7, of: str = "a") -> KillStatus:
    return KillStatus(
        f"{number}-100", f"uid-default-{of}", f"default/{of}", "main", uuid(0), number, "miner", 5000 * MIB, 4096 * MIB
    )


async def test_a_kill_between_two_checks_is_reported_once(looking: WatchedArbiter) -> None:
    await looking.look_at(container("a", "kill", over=False))
    for _ in range(3):
        await looking.look_at(container("a", "kill", over=False), kills=(kill(),))
    await looking.look_at(kills=(kill(), kill(8)))
    assert [offence.note for offence in looking.reported.limit_violations] == [
        f"container main held 5000 MiB of {uuid(0)} and was granted 4096 MiB; policy kill: process {pid} (miner) was killed"
        for pid in (7, 8)
    ]


async def test_a_kill_that_was_reported_before_it_was_done_is_not_reported_again(looking: WatchedArbiter) -> None:
    await looking.look_at(container("a", "kill"))
    await looking.look_at(container("a", "kill", over=False), kills=(kill(),))
    await looking.look_at(container("a", "kill", over=False), kills=(kill(),))
    assert len(looking.reported.limit_violations) == 1


async def test_a_kill_of_a_pod_that_the_watch_brings_late_is_reported_late(looking: WatchedArbiter) -> None:
    late = looking.known.pop("uid-default-a")
    await looking.look_at(kills=(kill(),))
    assert looking.reported.limit_violations == []
    looking.known[late.uid] = late
    await looking.look_at(kills=(kill(),))
    assert len(looking.reported.limit_violations) == 1


async def test_a_policy_that_became_stricter_is_reported_again(looking: WatchedArbiter) -> None:
    await looking.look_at(container("a", "report"))
    await looking.look_at(container("a", "evict"))
    assert [o.policy for o in looking.reported.limit_violations] == ["report", "evict"]


async def test_a_pod_that_the_watch_brings_late_is_reported_late(looking: WatchedArbiter) -> None:
    late = looking.known.pop("uid-default-a")
    await looking.look_at(container("a"))
    assert looking.reported.limit_violations == []
    looking.known[late.uid] = late
    await looking.look_at(container("a"))
    await looking.look_at(container("a"))
    assert len(looking.reported.limit_violations) == 1


async def test_an_arbiter_that_fails_changes_nothing_of_what_was_reported(looking: WatchedArbiter) -> None:
    whole = encode_status(StatusDocument((container("a"),)))
    await looking.look(whole)
    newer = whole.replace(b'"version":1', b'"version":2')
    for broken in (None, b"", whole[:-1], newer, b"\xff", b"[" * 100_000):
        await looking.look(broken)
    await looking.look(whole)
    assert len(looking.reported.limit_violations) == 1
    assert looking.reported.now == [1, 1]
    assert looking.reported.troubles == ["unreachable", *["unreadable"] * 5]


async def test_an_arbiter_that_closes_early_or_sends_too_much_is_no_crash(
    looking: WatchedArbiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.pods.status_watch.LARGEST_DOCUMENT", 1000)
    await looking.look(b" " * 200_000)
    assert looking.reported.troubles == ["unreadable"]

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"version":1,')
        writer.transport.abort()

    looking.socket.unlink()
    async with await asyncio.start_unix_server(reset, looking.socket):
        await looking.watch.once()
    assert len(looking.reported.troubles) == 2


async def test_reading_from_a_silent_arbiter_ends_in_time(
    looking: WatchedArbiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.pods.status_watch.DEADLINE_S", 0.05)
    hung, done = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hung.set()
        await done.wait()
        writer.close()

    async with await asyncio.start_unix_server(hang, looking.socket):
        await looking.watch.once()
        done.set()
    assert hung.is_set()
    assert looking.reported.troubles == ["unreachable"]


def bypassing(policy: str, over_limit_action: str = "report") -> ContainerStatus:
    bypass = BypassStatus(uuid(0), (7,), 5000 * MIB, 4096 * MIB, policy)
    return msgspec.structs.replace(container(over_limit_action=over_limit_action, over=False), bypasses=(bypass,))


@pytest.mark.parametrize(
    ("policy", "follows"), [("report", "it is reported"), ("evict", "the pod is deleted")], ids=["report", "evict"]
)
async def test_a_bypass_is_reported_once_with_its_own_reason(
    looking: WatchedArbiter, policy: str, follows: str
) -> None:
    for _ in range(3):
        await looking.look_at(bypassing(policy))
    (offence,) = looking.reported.limit_violations
    assert (offence.reason, offence.policy) == (BYPASSED, policy)
    assert offence.note == (
        f"container main uses 5000 MiB of {uuid(0)} and was granted 4096 MiB; process 7 (miner) goes around the library;"
        f" arbiter.bypass: {follows}"
    )
    assert looking.reported.now == [0, 0, 0], "the metric counts containers that are over their limit"


async def test_a_bypass_that_is_killed_makes_one_event_also_beside_a_kill_for_the_limit(
    looking: WatchedArbiter,
) -> None:
    of = "uid-default-a", "default/a", "main", uuid(0)
    kill = KillStatus("7-1", *of, 7, "miner", 5000 * MIB, 4096 * MIB, bypass=True)
    other = KillStatus("8-1", *of, 8, "sh", 5000 * MIB, 4096 * MIB)
    for _ in range(2):
        await looking.look_at(bypassing("kill"), kills=(kill, other))
    assert [one.reason for one in looking.reported.limit_violations] == [BYPASSED, REASON]
    assert looking.reported.limit_violations[0].note == (
        f"container main held 5000 MiB of {uuid(0)} and was granted 4096 MiB; arbiter.bypass kill: process 7 (miner)"
        " went around the library and was killed"
    )


async def test_a_kill_of_the_whole_container_is_reported(looking: WatchedArbiter) -> None:
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
    (reported,) = looking.reported.limit_violations
    assert reported.note.endswith(
        "process 7 (miner) went around the library and was killed, and with it all processes of the container, which starts "
        "such processes again and again"
    )


NO_SWAP = SwapStatus(False, 0.0, "", "", 0, "", "", "kill", "", "evict")
LATE = "above its guarantee, it did not give way to another's guarantee within 10 s"


def swapping(**changed: object) -> ContainerStatus:
    burst = msgspec.structs.replace(
        gpu(0, 40 * 1024), guarantee_bytes=8192 * MIB, leased_bytes=20_000 * MIB, away_bytes=12_000 * MIB
    )
    return msgspec.structs.replace(
        container(over=False), gpus=(burst,), swap=msgspec.structs.replace(NO_SWAP, **changed)
    )


SIZES = f"it has 20000 MiB of {uuid(0)}, 12000 MiB of it in host memory, and its guarantee is 8192 MiB"


def test_a_container_that_does_not_give_way_is_over_its_limit_and_the_sentence_says_what_follows() -> None:
    for action, follows in (("kill", "its processes are killed"), ("report", "nothing more is done")):
        ((found,)) = limit_violations(StatusDocument((swapping(over_limit=LATE, over_limit_action=action),)))
        assert (found.reason, found.policy) == (REASON, action)
        assert found.note == f"container main {LATE}; {SIZES}; burst.overLimit {action}: {follows}"


def test_stranded_memory_is_a_violation_of_its_own() -> None:
    why = "the guarantees of others leave no room for its memory"
    for action, follows in (("evict", "the pod is evicted, as its disruption budgets allow"), ("keep", "it waits")):
        ((found,)) = limit_violations(StatusDocument((swapping(stranded=why, stranded_action=action),)))
        assert (found.reason, found.policy, found.killed) == (STRANDED, action, False)
        assert found.note == (
            f"memory of container main cannot come back from host memory: {why}; {SIZES}; burst.stranded {action}: {follows}"
        )


def test_a_container_that_is_paused_unable_or_waits_is_no_violation() -> None:
    found = swapping(paused=True, paused_s=3.0, why="waits for its turn", unable="process 3 does not answer", waiting=2)
    assert limit_violations(StatusDocument((found,))) == []


def test_the_event_of_a_kill_says_why_and_how_much_it_had() -> None:
    kill = KillStatus(
        "7-1", "uid-default-a", "default/a", "main", uuid(0), 7, "train.py", 20_000 * MIB, 8192 * MIB, whole=True, reason=LATE
    )  # fmt: skip
    found = kill_violation(kill)
    assert found.killed
    assert found.note == (
        f"container main {LATE}; it had 20000 MiB of {uuid(0)}, and its guarantee is 8192 MiB; burst.overLimit kill: its processes were killed"
    )


async def test_stranded_memory_is_reported_once_and_again_after_it_came_back(looking: WatchedArbiter) -> None:
    stranded = swapping(stranded="no room")
    for found in (stranded, stranded, swapping(), stranded):
        await looking.look_at(found)
    assert [one.reason for one in looking.reported.limit_violations] == [STRANDED, STRANDED]
    assert looking.reported.stranded == [1, 1, 0, 1]
    assert looking.reported.now == [0, 0, 0, 0], "it is not over its limit"


async def test_a_pod_is_stranded_as_long_as_the_last_status_that_was_read_says_so(looking: WatchedArbiter) -> None:
    uid = "uid-default-a"
    answers = []
    for found in (swapping(), swapping(stranded="no room"), swapping(stranded="no room", stranded_action="keep")):
        await looking.look_at(found)
        answers.append(looking.watch.is_stranded(uid))
    await looking.look_at(swapping(stranded="no room"))
    await looking.look(None)
    assert looking.watch.is_stranded(uid), "an arbiter that is away reports nothing new"
    assert answers == [False, True, False]
    assert not looking.watch.is_stranded("uid-default-b")
