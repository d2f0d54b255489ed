"""Gangs through the real kube-scheduler: it tries their pods in one cycle, and reports to the extender neither its end nor pods that it refuses itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest

from tests.builders import pod
from tests.integration.extender.ganging import BACK_S, FULL_MIB, GPUS, GangSetup, in_gang, members, running
from tests.integration.extender.harness import allocated_pods
from tests.integration.extender.scheduling import Stack


@pytest.fixture(params=[True, False], ids=["tried-again-at-once", "tried-again-after-a-back-off"])
async def setup(gang_stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[GangSetup]:
    """kube-scheduler tries a gang again at once where nothing else waits, unless it has to wait for the back-off."""
    async with running(gang_stack, popped_at_once=request.param) as made:
        yield made


async def refused_for_a_gpu(setup: GangSetup) -> list[str]:
    """The fourth fits the node's total, and no single GPU."""
    await setup.bound(await setup.create(pod("before").asking(mib=FULL_MIB // 2)))
    return await setup.create(*members("gang", mib=FULL_MIB * 3 // 4))


async def refused_for_cpu(setup: GangSetup) -> list[str]:
    """The node has 256 processors; kube-scheduler does not call filter."""
    last = pod("large").in_group("gang").asking(mib=FULL_MIB, cpu="300")
    return await setup.create(*members("gang", count=GPUS - 1), last)


async def refused_by_a_taint(setup: GangSetup) -> list[str]:
    return [
        *await setup.create(pod("strict").in_group("gang").asking(mib=FULL_MIB), tolerating=False),
        *await setup.create(*members("gang", count=GPUS - 1)),
    ]


Lacking = Callable[[GangSetup], Awaitable[list[str]]]
LACKING: Final = [refused_for_a_gpu, refused_for_cpu, refused_by_a_taint]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("setup", [False], indirect=True, ids=["tried-again-after-a-back-off"])
@pytest.mark.parametrize("lacking", LACKING)
async def test_the_capacity_of_a_gang_that_lacks_one_pod_is_soon_free_at_each_attempt(
    setup: GangSetup, lacking: Lacking
) -> None:
    await setup.group("gang", GPUS)
    uids = await lacking(setup)
    await setup.fails(GPUS - 1)
    await setup.fails(GPUS - 1)
    assert setup.count(uids) == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lacking", LACKING)
async def test_other_pods_get_the_capacity_of_a_gang_that_lacks_one_pod(setup: GangSetup, lacking: Lacking) -> None:
    await setup.group("gang", GPUS)
    uids = await lacking(setup)
    await setup.refused(uids)
    others = await setup.create(*(pod(f"other-{at}").asking(mib=FULL_MIB) for at in range(GPUS - 1)))
    await setup.bound(others, timeout_s=BACK_S)
    assert setup.count(uids) == 0


@pytest.mark.timeout(240)
async def test_other_pods_get_the_capacity_of_a_gang_whose_launcher_without_a_gpu_does_not_fit(
    setup: GangSetup,
) -> None:
    """The extender is not called for the launcher: the capacity stays reserved until others request it."""
    await setup.group("runs", 2)
    launcher = pod("launcher").in_group("runs")
    runs = await setup.create(launcher, *members("runs", count=1))
    await setup.bound(runs)
    await setup.group("gang", GPUS)
    uids = await setup.create(pod("large").in_group("gang").asking(cpu="300"), *members("gang", count=GPUS - 1))
    await setup.refused(uids)
    await setup.bound(await setup.create(*(pod(f"other-{at}").asking(mib=FULL_MIB) for at in range(GPUS - 1))))
    assert setup.count(uids) == 0


async def test_the_pods_of_a_gang_are_bound_together(setup: GangSetup) -> None:
    await setup.group("gang", GPUS)
    await setup.bound(await setup.create(*members("gang")))
    assert setup.follower.reported
    assert not in_gang(await setup.extender.snapshot())


async def test_of_a_gang_that_needs_fewer_than_it_has_so_many_run_as_fit(setup: GangSetup) -> None:
    await setup.group("gang", GPUS - 1)
    uids = await setup.create(*members("gang", count=GPUS + 1))
    await setup.follower.until(lambda: setup.count(uids) == GPUS, "as many are bound as there are GPUs")
    (left,) = [uid for uid in uids if "nodeName" not in setup.ledger.alive[uid]["spec"]]
    await setup.delete([next(uid for uid in uids if uid != left)])
    await setup.bound([left], "the last has the capacity of one that ended")


async def test_pods_of_a_basic_group_are_bound_one_by_one(setup: GangSetup) -> None:
    await setup.group("basic", None)
    uids = await setup.create(*members("basic", count=GPUS + 1))
    await setup.follower.until(lambda: setup.count(uids) == GPUS, "as many are bound as there are GPUs")
    assert "in gang" not in allocated_pods(await setup.extender.snapshot()).values()


@pytest.mark.timeout(240)
async def test_of_two_gangs_that_want_the_same_gpus_one_runs_and_then_the_other(setup: GangSetup) -> None:
    before = await setup.create(pod("before").asking(mib=FULL_MIB))
    await setup.bound(before)
    gangs = []
    for name in ("one", "two"):
        await setup.group(name, GPUS)
        gangs.append(await setup.create(*members(name)))
    await setup.refused([*gangs[0], *gangs[1]])
    assert [setup.count(gang) for gang in gangs] == [0, 0]
    await setup.delete(before)
    await setup.follower.until(lambda: GPUS in map(setup.count, gangs), "one of them runs")
    gangs.sort(key=setup.count)
    assert [setup.count(gang) for gang in gangs] == [0, GPUS]
    await setup.delete(gangs[1])
    await setup.bound(gangs[0], "the other runs")


async def test_a_gang_that_fits_is_not_kept_from_it_by_one_that_does_not(setup: GangSetup) -> None:
    await setup.group("large", GPUS + 1)
    await setup.group("small", GPUS)
    large = await setup.create(*members("large", mib=FULL_MIB * 3 // 4, count=GPUS + 1))
    await setup.refused(large)
    await setup.bound(await setup.create(*members("small")))
    assert setup.count(large) == 0


@pytest.mark.timeout(240)
async def test_pods_of_a_gang_with_equal_requests_get_different_gpus_where_allocate_chooses_the_devices(
    gang_stack: Stack,
) -> None:
    async with running(gang_stack, popped_at_once=False, access="cdi") as setup:
        await setup.group("gang", GPUS)
        await setup.bound(await setup.create(*members("gang")))
