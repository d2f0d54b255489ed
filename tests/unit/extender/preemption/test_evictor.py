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
from tests.unit.extender.world import FULL_MIB, HALF_MIB, World
from vgpu.scheduling.victims.choice import Search

GIB = 1024


def bound(name: str, node: str, mib: int, priority: int = 0, row: int = 0) -> PodBuilder:
    return pod(name).asking(mib=mib).of_priority(priority).on(node).assigned(share(gpu(row, node=node), mib))


def urgent(mib: int = FULL_MIB, name: str = "urgent") -> PodBuilder:
    return pod(name).asking(mib=mib).of_priority(1000)


def refused(reason: str = "budget") -> ApiError:
    return ApiError(429, "TooManyRequests", reason)


@asynccontextmanager
async def looking(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[None]]:
    """Its evictor runs, and waits for nothing."""
    evictor = world.preemption._evictor
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


async def looked(world: World, task: asyncio.Task[None]) -> None:
    """Return when it has looked at all that was turned away before this call: at an observer, that is, whose node has no other pod."""
    WatchIntake(world.state).node_changed(None, node("observer").with_gpus(2).build())
    for row in (0, 1):
        world.report(bound(f"w{row}", "observer", HALF_MIB, row=row))
    observer = pod("observer").asking(mib=FULL_MIB).of_priority(1)
    world.report(observer)
    assert world.filter(observer, "observer").node_names == []
    await until(task, lambda: "w0" in world.server.evictions())


async def test_a_pod_that_goes_while_another_is_helped_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1, n2=1)
    for name in ("n1", "n2"):
        world.report(bound(f"v{name}", name, FULL_MIB))
        world.report(urgent(name=f"u{name}"))
        world.filter(urgent(name=f"u{name}"), name)
    refusals = 0

    def answer(_: str, path: str, __: Any) -> bytes:
        nonlocal refusals
        if path.endswith("/vn1/eviction"):
            refusals += 1
            if refusals == 2:  # the second round of evictions has begun: both are on its list
                world.end("un2")
            raise refused()
        if path.endswith("/vn2/eviction"):
            raise refused()
        return b"{}"

    world.server.answer = answer
    async with looking(world, monkeypatch) as task:
        await until(task, lambda: refusals == 4)
        assert "uid-default-un2" not in world.preemption._evictor._plans


@pytest.mark.parametrize("leaves", ["a", "c"])
async def test_a_pod_that_leaves_by_itself_is_one_less_to_evict(leaves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extender that ran before may have evicted it, for this pod, and died then."""
    world = World(n1=2)
    for row, names in enumerate(("ab", "cd")):
        for name in names:
            world.report(bound(name, "n1", FULL_MIB // 4, row=row))
    world.report(bound(leaves, "n1", FULL_MIB // 4, row=0 if leaves == "a" else 1).at_version(2).terminating())
    world.report(urgent())
    world.filter(urgent(), "n1")
    async with looking(world, monkeypatch) as task:
        await until(task, lambda: bool(world.server.evictions()))
        await looked(world, task)
    assert [one for one in world.server.evictions() if one in "abcd"] == [{"a": "b", "c": "d"}[leaves]]


async def test_the_room_of_a_pod_that_leaves_for_another_is_not_counted_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the GPU the first is to have half. So the second could not have all of it, were the other half free, too."""
    world = World(n1=1)
    world.report(bound("a", "n1", HALF_MIB))
    world.report(bound("b", "n1", HALF_MIB))
    for built in (urgent(HALF_MIB, "first"), urgent(FULL_MIB, "second")):
        world.report(built)
        assert world.filter(built, "n1").node_names == []

    def answer(_: str, path: str, __: Any) -> bytes:
        if path.endswith("/eviction") and (name := path.split("/")[-2]) in "ab":
            world.report(bound(name, "n1", HALF_MIB).at_version(2).terminating())
        return b"{}"

    world.server.answer = answer
    async with looking(world, monkeypatch) as task:
        await looked(world, task)
    assert len([name for name in world.server.evictions() if name in "ab"]) == 1


async def test_nobody_more_is_evicted_beside_a_pod_that_does_not_leave_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer keeps it: to evict the pod beside it was in vain, and would be so every time."""
    world = World(n1=1)
    world.report(bound("stays", "n1", HALF_MIB).terminating())
    world.report(bound("first", "n1", HALF_MIB))
    world.report(urgent())
    world.filter(urgent(), "n1")
    async with looking(world, monkeypatch) as task:
        await until(task, lambda: world.server.evictions() == ["first"])
        world.end("first")
        world.now_s = 301.0
        world.preemption.expire()
        world.report(bound("second", "n1", HALF_MIB))
        assert world.filter(urgent(), "n1").node_names == []
        await looked(world, task)
    assert "second" not in world.server.evictions()


@pytest.mark.parametrize("when", ["before the look", "before the first eviction"])
async def test_nobody_is_evicted_where_room_came_free_meanwhile(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    world = World(n1=1, n2=1)
    world.report(bound("a", "n1", FULL_MIB, priority=2000))
    world.report(bound("b", "n2", FULL_MIB))
    world.report(urgent())
    assert world.filter(urgent(), "n1", "n2").node_names == []
    if when == "before the look":
        world.end("a")
    else:

        def answer(_: str, path: str, body: Any) -> bytes:
            if path.endswith("/urgent/status") and body["status"]["nominatedNodeName"]:
                world.end("a")
            return b"{}"

        world.server.answer = answer
    async with looking(world, monkeypatch) as task:
        await looked(world, task)
    assert world.server.evictions() == ["w0"]
    assert world.filter(urgent(), "n1", "n2").node_names == ["n1"]
    nominated = [call for call in world.server.calls if call.endswith("/urgent/status")]
    assert len(nominated) == (0 if when == "before the look" else 2), "and taken back"


async def test_of_two_that_would_each_do_one_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1)
    world.report(bound("a", "n1", 20 * GIB, priority=5000))
    for name in ("v1", "v2"):
        world.report(bound(name, "n1", 30 * GIB))
    world.report(urgent(50 * GIB))
    assert world.filter(urgent(50 * GIB), "n1").node_names == []
    first = True

    def answer(_: str, path: str, __: Any) -> bytes:
        nonlocal first
        if path.endswith("/v1/eviction") and first:
            first = False
            world.end("a")  # now one of the two is enough
            raise refused()
        return b"{}"

    world.server.answer = answer
    async with looking(world, monkeypatch) as task:
        await looked(world, task)
        await until(task, lambda: not world.preemption._evictor._plans)
    assert [name for name in world.server.evictions() if name.startswith("v")] == ["v1", "v2"], "v1 was refused"
    assert world.preemption.evicted() == 2, "one, and the observer's"


async def test_a_pod_that_somebody_else_nominated_elsewhere_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several replicas the one beside the active scheduler decides."""
    world = World(n1=1, n2=1)
    world.report(bound("v", "n1", FULL_MIB))
    world.report(urgent())
    world.filter(urgent(), "n1")

    def answer(_: str, path: str, __: Any) -> bytes:
        if path.endswith("/v/eviction"):
            world.report(urgent().nominated_to("n2"))
            raise refused()
        return b"{}"

    world.server.answer = answer
    async with looking(world, monkeypatch) as task:
        await looked(world, task)
        await until(task, lambda: not world.preemption._evictor._plans)
        assert world.server.evictions().count("v") == 1
        assert world.preemption.reservations.get("uid-default-urgent") is None
        assert sum(call.endswith("/urgent/status") for call in world.server.calls) == 1, "their nomination stands"


async def test_who_was_not_requested_lately_evicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1)
    world.report(bound("v", "n1", FULL_MIB))
    world.report(urgent())
    world.filter(urgent(), "n1")
    world.now_s = ACTIVE_S
    turned_away = world.preemption._evictor._unplaced
    async with looking(world, monkeypatch) as task:
        await until(task, lambda: world.preemption._evictor._unplaced is not turned_away)
        await looked(world, task)
    assert world.server.evictions() == ["w0"]


@pytest.mark.parametrize("where", ["n1", "n2"])
async def test_a_nomination_is_withdrawn_only_where_it_is_still_ours(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    world = World(n1=1, n2=1)
    world.report(bound("v", "n1", FULL_MIB))
    world.report(urgent())
    world.filter(urgent(), "n1")
    async with looking(world, monkeypatch) as task:
        await until(task, lambda: bool(world.server.evictions()))
        world.report(urgent().nominated_to(where))
        world.now_s = 301.0
        world.preemption.expire()
        await looked(world, task)
    withdrawn = sum(call.endswith("/urgent/status") for call in world.server.calls) == 2
    assert withdrawn is (where == "n1")


async def test_a_pod_that_is_gone_when_no_way_was_found_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1)
    world.report(bound("v", "n1", FULL_MIB, priority=5000))
    for name in ("urgent", "other"):
        world.report(urgent(name=name))
        world.filter(urgent(name=name), "n1")
    steps = Search.steps

    def ended_meanwhile(search: Search) -> Iterator[None]:
        if "default/urgent" in world.pods.by_key:
            world.end("urgent")
        yield from steps(search)

    monkeypatch.setattr(Search, "steps", ended_meanwhile)
    in_vain = world.preemption._evictor._in_vain
    async with looking(world, monkeypatch) as task:
        await looked(world, task)
    assert set(in_vain) == {"uid-default-other"}
    world.now_s = VAIN_S
    world.preemption.expire()
    assert in_vain == {}


async def test_a_pod_that_nobody_can_make_room_for_is_looked_at_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(n1=1)
    world.report(bound("v", "n1", FULL_MIB, priority=5000))
    world.report(urgent())
    world.filter(urgent(), "n1")
    evictor = world.preemption._evictor
    async with looking(world, monkeypatch) as task:
        await looked(world, task)
        for now_s, wanted in ((VAIN_S - 0.1, False), (VAIN_S, True)):
            world.now_s = now_s
            world.filter(urgent(), "n1")
            assert ("uid-default-urgent" in evictor._unplaced) is wanted
