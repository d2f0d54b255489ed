"""What filter reserves for pods of a gang, and when it is free for others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from extender.gangs import CHECK_S, GangKeeper
from extender.reasons import GANG_YIELDS
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.paths import POD_GROUPS, POD_GROUPS_API
from kube.pod_groups import PodGroup
from tests.builders import gpu, node, pod, share
from tests.fake_api import FakeApi
from tests.unit.extender.extender_parts import FULL_MIB, ExtenderParts
from tests.unit.extender.ganging import GPUS, Ganging, group
from tests.unit.extender.preemption.test_coordinator import turned_down
from vgpu.api.grant import Assignment
from vgpu.api.names import DEFAULT
from vgpu.scheduling.gangs import QUIET_S
from vgpu.scheduling.reservations import STAGES


def test_the_capacity_of_a_gang_that_lacks_a_pod_is_free_for_the_next_pod_of_others() -> None:
    ganging = Ganging()
    ganging.cycle()
    assert ganging.stages() == ["in gang"] * 2
    others = [pod(f"other{at}").asking(mib=FULL_MIB) for at in range(GPUS)]
    assert [ganging.filter(one).node_names for one in others] == [["n1"]] * GPUS
    assert (ganging.keeper.failed(), ganging.woken) == (1, []), "no pod was refused for it"


def test_nothing_that_an_earlier_try_had_outlives_the_next() -> None:
    ganging = Ganging()
    ganging.cycle()
    ganging.cycle(1)
    assert ganging.stages() == ["in gang"] * 2, "the second may be of this try, if the node was tainted before"
    ganging.filter(pod("other").asking(mib=FULL_MIB), "n2")
    assert ganging.stages() == []


def test_pods_that_filter_was_not_called_for_at_the_last_try_keep_reservations_until_they_are_bound() -> None:
    ganging = Ganging()
    for built in (*ganging.pods[1:], *ganging.pods):
        assert ganging.filter(built).node_names
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB)).node_names
    for built in ganging.pods[:2]:
        ganging.report(built.at_version(2).nominated_to("n1"))
    ganging.parts.state.on("bind", ganging.pods[2].build().uid)
    ganging.parts.now_s += QUIET_S
    ganging.keeper.expire()
    assert ganging.stages() == ["in gang", "in gang", "binding"]


def test_the_capacity_of_pods_that_failed_before_they_were_bound_is_free_for_others_though_filter_is_not_called_for_them() -> (
    None
):
    ganging = Ganging()
    ganging.cycle(GPUS)
    for version, nominated in ((2, "n1"), (3, "")):
        for built in ganging.pods:
            ganging.report(built.at_version(version).nominated_to(nominated))
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB)).node_names
    ganging.parts.now_s += QUIET_S
    ganging.keeper.expire()
    assert (ganging.stages(), ganging.woken) == ([], ["n1"])


def test_pods_that_wait_are_retried_when_a_gang_yields_to_them() -> None:
    ganging = Ganging(group(min_count=GPUS + 1))
    ganging.report(turned_down(pod("launcher").in_group("gang")))
    ganging.cycle(GPUS)
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB)).node_names
    for built in ganging.pods:
        assert list(ganging.filter(built).unresolvable) == [GANG_YIELDS]
    assert (ganging.stages(), set(ganging.woken)) == ([], {"n1"})
    assert ganging.filter(pod("other").asking(mib=FULL_MIB)).node_names


def test_a_nomination_to_another_node_does_not_show_that_a_pod_is_to_be_bound() -> None:
    ganging = Ganging()
    ganging.report(ganging.pods[0].at_version(2).nominated_to("n2"))
    ganging.cycle()
    ganging.filter(pod("other").asking(mib=FULL_MIB), "n2")
    assert ganging.stages() == []


def test_a_pod_that_fails_before_it_is_bound_costs_the_others_nothing_also_where_the_group_fitted_before() -> None:
    ganging = Ganging(group(scheduled=True))
    ganging.cycle(GPUS)
    for built in ganging.pods:
        ganging.report(built.at_version(2).nominated_to("n1"))
    ganging.report(ganging.pods[1].at_version(3))
    assert not ganging.filter(ganging.pods[1], "n2").node_names
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB), "n2").node_names
    ganging.parts.now_s += QUIET_S
    ganging.keeper.expire()
    left = {one.uid for one in ganging.parts.state.reservations}
    assert left == {ganging.pods[at].build().uid for at in (0, 2)}


def test_a_gang_of_which_all_have_reservations_keeps_them_for_as_long_as_permit_waits() -> None:
    ganging = Ganging()
    ganging.cycle(GPUS)
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB)).node_names
    ganging.parts.now_s = STAGES["reserved"].life_s + 1
    ganging.keeper.expire()
    ganging.parts.state.expire()
    assert ganging.stages() == ["in gang"] * GPUS
    ganging.parts.now_s = STAGES["in gang"].life_s
    ganging.parts.state.expire()
    assert ganging.stages() == []


@pytest.mark.parametrize(("reservation_s", "gang_s"), [(60.0, 300.0), (600.0, 600.0)])
def test_reservations_of_a_gang_never_live_for_less_than_others(reservation_s: float, gang_s: float) -> None:
    now_s = 0.0
    state = State(lambda: now_s, names=DEFAULT, reservation_life_s=reservation_s)
    state.reservations.put("scheduling", "u", "default/a", "n1", now_s)
    state.on("gang", "u")
    now_s = gang_s - 1
    state.expire()
    assert "u" in state.reservations
    now_s = gang_s
    state.expire()
    assert "u" not in state.reservations


def test_the_reservations_of_a_gang_that_is_not_tried_any_more_end() -> None:
    ganging = Ganging()
    ganging.cycle()
    ganging.parts.now_s = QUIET_S - 0.1
    ganging.keeper.expire()
    assert len(ganging.stages()) == 2
    ganging.parts.now_s = QUIET_S
    ganging.keeper.expire()
    assert (ganging.stages(), ganging.woken) == ([], [])


def test_a_pod_that_was_refused_for_a_gang_is_tried_again_when_the_gang_fails() -> None:
    """The launcher requests no GPU, so it may have been bound; kube-scheduler reports later that it was refused."""
    ganging = Ganging(group(min_count=GPUS + 1))
    ganging.report(pod("launcher").in_group("gang"))
    ganging.cycle(GPUS)
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB)).node_names
    ganging.report(turned_down(pod("launcher").in_group("gang").at_version(2)))
    ganging.parts.now_s = QUIET_S
    ganging.keeper.expire()
    assert (ganging.stages(), ganging.woken) == ([], ["n1"])


def test_a_refused_pod_ends_its_own_reservation_alone() -> None:
    ganging = Ganging(group(min_count=2))
    ganging.cycle()
    assert not ganging.filter(ganging.pods[2], "n2").node_names
    assert ganging.stages() == ["in gang"] * 2


def test_a_gang_that_is_tried_again_though_all_seemed_to_fit_fails() -> None:
    """Its launcher has scheduling gates, for example: the extender sees nothing of that."""
    ganging = Ganging(group(min_count=GPUS + 1))
    ganging.report(pod("launcher").in_group("gang"))
    for at_s in (0.0, 10.0):
        ganging.parts.now_s = at_s
        ganging.cycle(GPUS)
        ganging.parts.now_s += QUIET_S
        ganging.keeper.expire()
        assert ganging.stages() == ["in gang"] * GPUS, "no pod waits for it"
    ganging.filter(pod("other").asking(mib=FULL_MIB))
    ganging.parts.now_s += QUIET_S
    ganging.keeper.expire()
    assert ganging.stages() == []
    assert ganging.woken == ["n1"], "others may have been refused since"


def test_one_that_may_be_bound_is_not_tried_again_because_its_gang_failed() -> None:
    ganging = Ganging()
    ganging.cycle(GPUS)
    ganging.parts.state.on("bind", ganging.pods[0].build().uid)
    ganging.keeper.expire()
    assert ganging.filter(ganging.pods[0]).node_names == ["n1"]
    assert ganging.stages() == ["binding", "in gang", "in gang"]


def test_one_that_is_tried_again_after_enough_are_bound_is_a_pod_like_others() -> None:
    ganging = Ganging(group(min_count=1))
    ganging.cycle()
    ganging.report(ganging.pods[2].at_version(2).on("n1").assigned(share(gpu(2), FULL_MIB)))
    assert not ganging.filter(ganging.pods[0], "n2").node_names
    assert ganging.stages() == ["in gang"]


def test_with_a_pod_that_is_not_bound_all_reservations_end_and_pods_that_wait_are_tried_again() -> None:
    ganging = Ganging()
    ganging.cycle(GPUS)
    ganging.parts.state.on("bind", ganging.pods[0].build().uid)
    ganging.end("m1")
    assert (ganging.stages(), ganging.woken) == (["binding"], ["n1"]), "what may be bound stays"


def test_so_it_is_with_a_pod_that_is_deleted_and_kept_by_a_finalizer() -> None:
    ganging = Ganging()
    ganging.cycle(GPUS)
    ganging.report(ganging.pods[1].at_version(2).terminating())
    assert ganging.stages() == []


def test_a_pod_beyond_min_count_that_is_deleted_ends_its_own_reservation_alone() -> None:
    ganging = Ganging(group(min_count=GPUS - 1))
    ganging.cycle(GPUS)
    ganging.report(ganging.pods[1].at_version(2).terminating())
    left = {one.uid for one in ganging.parts.state.reservations}
    assert left == {ganging.pods[at].build().uid for at in (0, 2)}
    assert ganging.woken == ["n1"], "its capacity is free"


def test_a_pod_with_a_preemption_reservation_counts() -> None:
    ganging = Ganging()
    ganging.cycle()
    last = ganging.pods[-1].build()
    ganging.parts.preemption.reservations.put(last.uid, last.key, "n1", Assignment({}))
    ganging.parts.now_s = QUIET_S
    ganging.keeper.expire()
    assert ganging.stages() == ["in gang", "in gang", "kept"]


def test_a_pod_without_a_gpu_counts_again_once_it_has_a_node_and_waits_for_its_volumes() -> None:
    ganging = Ganging(group(min_count=GPUS + 1))
    ganging.report(turned_down(pod("launcher").in_group("gang").nominated_to("n2")))
    ganging.cycle(GPUS)
    ganging.parts.now_s = QUIET_S
    ganging.keeper.expire()
    assert ganging.stages() == ["in gang"] * GPUS


def test_while_a_call_about_a_pod_takes_its_time_the_gang_is_not_judged() -> None:
    ganging = Ganging()
    ganging.cycle()
    with ganging.keeper.calling(ganging.pods[-1].build(), 30.0):
        ganging.parts.now_s = 29.0
        ganging.keeper.expire()
    ganging.parts.now_s += QUIET_S - 0.1
    ganging.keeper.expire()
    assert len(ganging.stages()) == 2
    ganging.parts.now_s += 0.1
    ganging.keeper.expire()
    assert ganging.stages() == []


@pytest.mark.parametrize("known", [group(min_count=None), group("another")])
def test_without_a_gang_a_pod_is_reserved_for_by_itself(known: PodGroup) -> None:
    ganging = Ganging(known)
    ganging.cycle()
    ganging.filter(pod("other").asking(mib=FULL_MIB))
    assert ganging.stages() == ["reserved"] * GPUS
    ganging.parts.now_s = QUIET_S
    ganging.keeper.expire()
    assert ganging.stages() == ["reserved"] * GPUS


def test_a_pod_that_fails_after_its_gang_fitted_costs_the_others_nothing() -> None:
    ganging = Ganging()
    ganging.cycle(GPUS)
    ganging.keeper.group_changed(group(), group(scheduled=True))
    assert not ganging.filter(ganging.pods[1], "n2").node_names
    assert not ganging.filter(pod("other").asking(mib=FULL_MIB), "n2").node_names
    ganging.parts.now_s += QUIET_S
    ganging.keeper.expire()
    left = {one.uid for one in ganging.parts.state.reservations}
    assert left == {ganging.pods[at].build().uid for at in (0, 2)}


@pytest.mark.parametrize("before", [None, group(scheduled=True)])
def test_that_a_gang_fitted_once_proves_nothing_for_the_next_try(before: PodGroup | None) -> None:
    ganging = Ganging(group(scheduled=True))
    ganging.cycle()
    ganging.keeper.group_changed(before, group(scheduled=True))
    ganging.filter(pod("other").asking(mib=FULL_MIB))
    assert "in gang" not in ganging.stages()


def test_a_pod_without_a_gpu_is_never_one_that_waits_for_capacity() -> None:
    ganging = Ganging()
    ganging.report(turned_down(pod("launcher").in_group("gang")))
    assert ganging.parts.preemption.waiting() == []


async def test_pod_groups_are_requested_until_the_api_server_serves_them() -> None:
    slept_s = []
    async with FakeApi() as api, api.client() as client:

        async def sleep(seconds: float) -> None:
            slept_s.append(seconds)
            if len(slept_s) == 2:
                plain = {"metadata": {"name": "gang", "namespace": "default", "resourceVersion": "5"}}
                api.objects |= {
                    POD_GROUPS_API: {},
                    POD_GROUPS: {"default/gang": plain | {"spec": msgspec.to_builtins(group().spec)}},
                }

        keeper = GangKeeper(client, ExtenderParts(n1=1).state, clock=lambda: 0.0, sleep=sleep)
        assert keeper.statistics() == {}
        task = asyncio.create_task(keeper.run())
        try:
            async with asyncio.timeout(10):
                await api.watched()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert slept_s == [CHECK_S, CHECK_S]
    assert "default/gang" in keeper.gangs
    assert keeper.statistics()["podgroups"].synced


def test_pods_of_a_gang_with_equal_requests_are_placed_on_different_gpus_though_the_kubelet_could_mistake_them() -> (
    None
):
    """With access mode cdi. They are bound one after the other (`extender.bind.BindOrder`)."""
    ganging = Ganging()
    WatchIntake(ganging.parts.state).node_changed(None, node("n1").with_gpus(GPUS).with_access("cdi").build())
    ganging.cycle(GPUS)
    assigned = [ganging.parts.state.allocations.get(one.build().uid) for one in ganging.pods]
    assert len({one.assignment.uuids("main") for one in assigned if one is not None}) == GPUS
