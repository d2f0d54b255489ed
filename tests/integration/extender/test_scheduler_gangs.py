"""Gangs through the real kube-scheduler: it tries their pods in one cycle, and tells the extender neither of its end nor of pods that it refuses itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest

from tests.builders import pod
from tests.integration.extender.ganging import BACK_S, FULL_MIB, GPUS, World, in_gang, members, running
from tests.integration.extender.harness import allocated_pods
from tests.integration.extender.scheduling import Stack


@pytest.fixture(params=[True, False], ids=["tried-again-at-once", "tried-again-after-a-back-off"])
async def world(gang_stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """kube-scheduler tries a gang again at once where nothing else waits, unless it has to wait for the back-off."""
    async with running(gang_stack, popped_at_once=request.param) as made:
        yield made


async def refused_for_a_gpu(world: World) -> list[str]:
    """The node has room for the fourth in total, and no GPU has."""
    await world.bound(await world.create(pod("before").asking(mib=FULL_MIB // 2)))
    return await world.create(*members("gang", mib=FULL_MIB * 3 // 4))


async def refused_for_cpu(world: World) -> list[str]:
    """The node has 256 processors; kube-scheduler does not call filter."""
    last = pod("large").in_group("gang").asking(mib=FULL_MIB, cpu="300")
    return await world.create(*members("gang", count=GPUS - 1), last)


async def refused_by_a_taint(world: World) -> list[str]:
    return [
        *await world.create(pod("strict").in_group("gang").asking(mib=FULL_MIB), tolerating=False),
        *await world.create(*members("gang", count=GPUS - 1)),
    ]


Lacking = Callable[[World], Awaitable[list[str]]]
LACKING: Final = [refused_for_a_gpu, refused_for_cpu, refused_by_a_taint]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [False], indirect=True, ids=["tried-again-after-a-back-off"])
@pytest.mark.parametrize("lacking", LACKING)
async def test_the_room_of_a_gang_that_lacks_one_pod_is_soon_free_at_each_attempt(
    world: World, lacking: Lacking
) -> None:
    await world.group("gang", GPUS)
    uids = await lacking(world)
    await world.fails(GPUS - 1)
    await world.fails(GPUS - 1)
    assert world.count(uids) == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lacking", LACKING)
async def test_other_pods_have_the_room_of_a_gang_that_lacks_one_pod(world: World, lacking: Lacking) -> None:
    await world.group("gang", GPUS)
    uids = await lacking(world)
    await world.refused(uids)
    others = await world.create(*(pod(f"other-{at}").asking(mib=FULL_MIB) for at in range(GPUS - 1)))
    await world.bound(others, timeout_s=BACK_S)
    assert world.count(uids) == 0


@pytest.mark.timeout(240)
async def test_others_have_the_room_of_a_gang_whose_launcher_without_a_gpu_does_not_fit(world: World) -> None:
    """The extender is not called for the launcher: the room is reserved until others request it."""
    await world.group("runs", 2)
    launcher = pod("launcher").in_group("runs")
    runs = await world.create(launcher, *members("runs", count=1))
    await world.bound(runs)
    await world.group("gang", GPUS)
    uids = await world.create(pod("large").in_group("gang").asking(cpu="300"), *members("gang", count=GPUS - 1))
    await world.refused(uids)
    await world.bound(await world.create(*(pod(f"other-{at}").asking(mib=FULL_MIB) for at in range(GPUS - 1))))
    assert world.count(uids) == 0


async def test_the_pods_of_a_gang_are_bound_together(world: World) -> None:
    await world.group("gang", GPUS)
    await world.bound(await world.create(*members("gang")))
    assert world.follower.reported
    assert not in_gang(await world.extender.snapshot())


async def test_of_a_gang_that_needs_fewer_than_it_has_so_many_run_as_fit(world: World) -> None:
    await world.group("gang", GPUS - 1)
    uids = await world.create(*members("gang", count=GPUS + 1))
    await world.follower.until(lambda: world.count(uids) == GPUS, "as many are bound as there are GPUs")
    (left,) = [uid for uid in uids if "nodeName" not in world.ledger.alive[uid]["spec"]]
    await world.delete([next(uid for uid in uids if uid != left)])
    await world.bound([left], "the last has the room of one that ended")


async def test_pods_of_a_basic_group_are_bound_one_by_one(world: World) -> None:
    await world.group("basic", None)
    uids = await world.create(*members("basic", count=GPUS + 1))
    await world.follower.until(lambda: world.count(uids) == GPUS, "as many are bound as there are GPUs")
    assert "in gang" not in allocated_pods(await world.extender.snapshot()).values()


@pytest.mark.timeout(240)
async def test_of_two_gangs_that_want_the_same_gpus_one_runs_and_then_the_other(world: World) -> None:
    before = await world.create(pod("before").asking(mib=FULL_MIB))
    await world.bound(before)
    gangs = []
    for name in ("one", "two"):
        await world.group(name, GPUS)
        gangs.append(await world.create(*members(name)))
    await world.refused([*gangs[0], *gangs[1]])
    assert [world.count(gang) for gang in gangs] == [0, 0]
    await world.delete(before)
    await world.follower.until(lambda: GPUS in map(world.count, gangs), "one of them runs")
    gangs.sort(key=world.count)
    assert [world.count(gang) for gang in gangs] == [0, GPUS]
    await world.delete(gangs[1])
    await world.bound(gangs[0], "the other runs")


async def test_a_gang_that_fits_is_not_kept_from_it_by_one_that_does_not(world: World) -> None:
    await world.group("large", GPUS + 1)
    await world.group("small", GPUS)
    large = await world.create(*members("large", mib=FULL_MIB * 3 // 4, count=GPUS + 1))
    await world.refused(large)
    await world.bound(await world.create(*members("small")))
    assert world.count(large) == 0
