"""Which pods the extender itself evicts, and which no longer once the cluster has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from extender.nominate.nominator import ACTIVE_S
from extender.preemption.evictor import VAIN_S
from extender.watch_intake import WatchIntake
from kube.errors import ApiError
from tests.builders import PodBuilder, gpu, node, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts
from vgpu.scheduling.victims.victim_search import VictimSearch

GIB = 1024


def bound(name: str, node: str, mib: int, priority: int = 0, row: int = 0) -> PodBuilder:
    return pod(name).asking(mib=mib).of_priority(priority).on(node).assigned(share(gpu(row, node=node), mib))


def urgent(mib: int = FULL_MIB, name: str = "urgent") -> PodBuilder:
    return pod(name).asking(mib=mib).of_priority(1000)


def refused(reason: str = "budget") -> ApiError:
    return ApiError(429, "TooManyRequests", reason)


@asynccontextmanager
async def looking(parts: ExtenderParts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[None]]:
    """Its evictor runs, and waits for nothing."""
    evictor = parts.preemption._evictor
    monkeypatch.setattr(evictor, "_grace_s", 0.0)
    monkeypatch.setattr(evictor, "_retry_s", 0.0)
    task = asyncio.create_task(evictor.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(task: asyncio.Task[None], true: Callable[[], bool]) -> None:
    """Return when this is true, checked after each step of the evictor."""
    async with asyncio.timeout(10):
        while not true():
            assert not task.done(), task.exception()
            await asyncio.sleep(0)


async def looked(parts: ExtenderParts, task: asyncio.Task[None]) -> None:
    """Return when it has processed all that was refused before this call: at an observer, that is, whose node has no other pod."""
    WatchIntake(parts.state).node_changed(None, node("observer").with_gpus(2).build())
    for row in (0, 1):
        parts.report(bound(f"w{row}", "observer", HALF_MIB, row=row))
    observer = pod("observer").asking(mib=FULL_MIB).of_priority(1)
    parts.report(observer)
    assert parts.filter(observer, "observer").node_names == []
    await until(task, lambda: "w0" in parts.server.evictions())


async def test_a_pod_that_is_deleted_while_another_is_helped_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1, n2=1)
    for name in ("n1", "n2"):
        parts.report(bound(f"v{name}", name, FULL_MIB))
        parts.report(urgent(name=f"u{name}"))
        parts.filter(urgent(name=f"u{name}"), name)
    refusals = 0

    def answer(_: str, path: str, __: Any) -> bytes:
        nonlocal refusals
        if path.endswith("/vn1/eviction"):
            refusals += 1
            if refusals == 2:  # the second round of evictions has begun: both are on its list
                parts.end("un2")
            raise refused()
        if path.endswith("/vn2/eviction"):
            raise refused()
        return b"{}"

    parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await until(task, lambda: refusals == 4)
        assert "uid-default-un2" not in parts.preemption._evictor._plans


@pytest.mark.parametrize("leaves", ["a", "c"])
async def test_a_pod_that_leaves_by_itself_is_one_less_to_evict(leaves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extender that ran before may have evicted it, for this pod, and died then."""
    parts = ExtenderParts(n1=2)
    for row, names in enumerate(("ab", "cd")):
        for name in names:
            parts.report(bound(name, "n1", FULL_MIB // 4, row=row))
    parts.report(bound(leaves, "n1", FULL_MIB // 4, row=0 if leaves == "a" else 1).at_version(2).terminating())
    parts.report(urgent())
    parts.filter(urgent(), "n1")
    async with looking(parts, monkeypatch) as task:
        await until(task, lambda: bool(parts.server.evictions()))
        await looked(parts, task)
    assert [one for one in parts.server.evictions() if one in "abcd"] == [{"a": "b", "c": "d"}[leaves]]


async def test_the_capacity_of_a_pod_that_ends_for_another_is_not_counted_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the GPU the first is to have half. So the second could not have all of it, were the other half free, too."""
    parts = ExtenderParts(n1=1)
    parts.report(bound("a", "n1", HALF_MIB))
    parts.report(bound("b", "n1", HALF_MIB))
    for built in (urgent(HALF_MIB, "first"), urgent(FULL_MIB, "second")):
        parts.report(built)
        assert parts.filter(built, "n1").node_names == []

    def answer(_: str, path: str, __: Any) -> bytes:
        if path.endswith("/eviction") and (name := path.split("/")[-2]) in "ab":
            parts.report(bound(name, "n1", HALF_MIB).at_version(2).terminating())
        return b"{}"

    parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert len([name for name in parts.server.evictions() if name in "ab"]) == 1


async def test_no_more_pods_are_evicted_beside_one_that_does_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer keeps it: to evict the pod beside it was in vain, and would be so every time."""
    parts = ExtenderParts(n1=1)
    parts.report(bound("stays", "n1", HALF_MIB).terminating())
    parts.report(bound("first", "n1", HALF_MIB))
    parts.report(urgent())
    parts.filter(urgent(), "n1")
    async with looking(parts, monkeypatch) as task:
        await until(task, lambda: parts.server.evictions() == ["first"])
        parts.end("first")
        parts.now_s = 301.0
        parts.preemption.expire()
        parts.report(bound("second", "n1", HALF_MIB))
        assert parts.filter(urgent(), "n1").node_names == []
        await looked(parts, task)
    assert "second" not in parts.server.evictions()


@pytest.mark.parametrize("when", ["before the look", "before the first eviction"])
async def test_no_pod_is_evicted_where_capacity_came_free_meanwhile(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    parts = ExtenderParts(n1=1, n2=1)
    parts.report(bound("a", "n1", FULL_MIB, priority=2000))
    parts.report(bound("b", "n2", FULL_MIB))
    parts.report(urgent())
    assert parts.filter(urgent(), "n1", "n2").node_names == []
    if when == "before the look":
        parts.end("a")
    else:

        def answer(_: str, path: str, body: Any) -> bytes:
            if path.endswith("/urgent/status") and body["status"]["nominatedNodeName"]:
                parts.end("a")
            return b"{}"

        parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert parts.server.evictions() == ["w0"]
    assert parts.filter(urgent(), "n1", "n2").node_names == ["n1"]
    nominated = [call for call in parts.server.calls if call.endswith("/urgent/status")]
    assert len(nominated) == (0 if when == "before the look" else 2), "and taken back"


async def test_of_two_that_would_each_do_one_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1)
    parts.report(bound("a", "n1", 20 * GIB, priority=5000))
    for name in ("v1", "v2"):
        parts.report(bound(name, "n1", 30 * GIB))
    parts.report(urgent(50 * GIB))
    assert parts.filter(urgent(50 * GIB), "n1").node_names == []
    first = True

    def answer(_: str, path: str, __: Any) -> bytes:
        nonlocal first
        if path.endswith("/v1/eviction") and first:
            first = False
            parts.end("a")  # now one of the two is enough
            raise refused()
        return b"{}"

    parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
        await until(task, lambda: not parts.preemption._evictor._plans)
    assert [name for name in parts.server.evictions() if name.startswith("v")] == ["v1", "v2"], "v1 was refused"
    assert parts.preemption.evicted() == 2, "one, and the observer's"


async def test_a_pod_that_another_replica_nominated_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several replicas the one beside the active scheduler decides."""
    parts = ExtenderParts(n1=1, n2=1)
    parts.report(bound("v", "n1", FULL_MIB))
    parts.report(urgent())
    parts.filter(urgent(), "n1")

    def answer(_: str, path: str, __: Any) -> bytes:
        if path.endswith("/v/eviction"):
            parts.report(urgent().nominated_to("n2"))
            raise refused()
        return b"{}"

    parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
        await until(task, lambda: not parts.preemption._evictor._plans)
        assert parts.server.evictions().count("v") == 1
        assert parts.preemption.reservations.get("uid-default-urgent") is None
        assert sum(call.endswith("/urgent/status") for call in parts.server.calls) == 1, "their nomination stands"


async def test_an_extender_that_was_not_called_lately_evicts_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1)
    parts.report(bound("v", "n1", FULL_MIB))
    parts.report(urgent())
    parts.filter(urgent(), "n1")
    parts.now_s = ACTIVE_S
    first_record = parts.preemption._evictor._unplaced
    async with looking(parts, monkeypatch) as task:
        await until(task, lambda: parts.preemption._evictor._unplaced is not first_record)
        await looked(parts, task)
    assert parts.server.evictions() == ["w0"]


@pytest.mark.parametrize("where", ["n1", "n2"])
async def test_a_nomination_is_withdrawn_only_where_it_is_still_ours(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    parts = ExtenderParts(n1=1, n2=1)
    parts.report(bound("v", "n1", FULL_MIB))
    parts.report(urgent())
    parts.filter(urgent(), "n1")
    async with looking(parts, monkeypatch) as task:
        await until(task, lambda: bool(parts.server.evictions()))
        parts.report(urgent().nominated_to(where))
        parts.now_s = 301.0
        parts.preemption.expire()
        await looked(parts, task)
    withdrawn = sum(call.endswith("/urgent/status") for call in parts.server.calls) == 2
    assert withdrawn is (where == "n1")


async def test_a_pod_that_is_gone_when_no_eviction_was_found_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1)
    parts.report(bound("v", "n1", FULL_MIB, priority=5000))
    for name in ("urgent", "other"):
        parts.report(urgent(name=name))
        parts.filter(urgent(name=name), "n1")
    steps = VictimSearch.steps

    def ended_meanwhile(search: VictimSearch) -> Iterator[None]:
        if "default/urgent" in parts.pods.by_key:
            parts.end("urgent")
        yield from steps(search)

    monkeypatch.setattr(VictimSearch, "steps", ended_meanwhile)
    in_vain = parts.preemption._evictor._in_vain
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert set(in_vain) == {"uid-default-other"}
    parts.now_s = VAIN_S
    parts.preemption.expire()
    assert in_vain == {}


async def test_a_pod_that_no_eviction_helps_is_searched_for_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = ExtenderParts(n1=1)
    parts.report(bound("v", "n1", FULL_MIB, priority=5000))
    parts.report(urgent())
    parts.filter(urgent(), "n1")
    evictor = parts.preemption._evictor
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
        for now_s, wanted in ((VAIN_S - 0.1, False), (VAIN_S, True)):
            parts.now_s = now_s
            parts.filter(urgent(), "n1")
            assert ("uid-default-urgent" in evictor._unplaced) is wanted
