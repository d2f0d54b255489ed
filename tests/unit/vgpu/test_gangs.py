"""When a gang fails: what counts, and whose reservations end."""

from __future__ import annotations

import pytest

from vgpu.gangs import QUIET_S, Failed, Gangs


def held(*uids: str) -> set[str]:
    return set(uids)


def a_gang_of(pods: int, *, min_count: int | None = None) -> tuple[Gangs, list[str]]:
    """As the watches show it: none of its pods is bound."""
    gangs, uids = Gangs(), [f"g{at}" for at in range(pods)]
    gangs.set_min_count("g", pods if min_count is None else min_count)
    for uid in uids:
        gangs.see(uid, "g", "waits")
    return gangs, uids


def cycle(gangs: Gangs, uids: list[str], reserved: set[str], now_s: float = 0.0) -> list[Failed]:
    """Filter is called for each of the gang; it answers a node where room is reserved."""
    failed: list[Failed] = []
    for uid in uids:
        failed += gangs.next_pod(uid, "g", reserved.__contains__)
        gangs.called(uid, "g", now_s)
        gangs.answered(uid, "g", fits=uid in reserved, reserved=uid in reserved)
    return failed


def test_the_next_pod_of_others_ends_what_a_failed_gang_has() -> None:
    gangs, uids = a_gang_of(3)
    assert cycle(gangs, uids, held("g0", "g1")) == []
    assert gangs.next_pod("other", "", held("g0", "g1").__contains__) == [Failed("g", ("g0", "g1", "g2"), False)]
    assert gangs.next_pod("more", "", held().__contains__) == []


def test_the_next_try_of_a_failed_gang_begins_with_nothing() -> None:
    gangs, uids = a_gang_of(3)
    cycle(gangs, uids, held("g0", "g1"))
    assert cycle(gangs, uids, held("g0", "g1")) == [Failed("g", ("g0", "g1", "g2"), False)]


def test_a_gang_that_is_scheduled_keeps_its_room_until_it_is_bound() -> None:
    gangs, uids = a_gang_of(3, min_count=2)
    reserved = held("g0", "g2").__contains__
    cycle(gangs, uids, held("g0", "g2"))
    assert gangs.next_pod("other", "", reserved) == []
    assert list(gangs.quiet(QUIET_S, reserved)) == []


def test_pods_that_request_nothing_of_ours_count_unless_kube_scheduler_refused_them() -> None:
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "asks nothing")
    reserved = held(*uids).__contains__
    cycle(gangs, uids, held(*uids))
    assert gangs.next_pod("other", "", reserved) == []
    gangs.see("launcher", "g", "unschedulable")
    gangs.called("g0", "g", 1.0)
    assert gangs.next_pod("g0", "g", reserved) == [], "at its second try it is refused until the watch shows it bound"
    assert [one.group for one in gangs.quiet(1.0 + QUIET_S, reserved)] == ["g"]


def test_a_gang_that_is_tried_again_was_not_scheduled_whatever_was_counted() -> None:
    """Its launcher requests nothing of ours, and waits for another scheduler."""
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "asks nothing")
    reserved = held(*uids).__contains__
    cycle(gangs, uids, held(*uids))
    assert list(gangs.quiet(QUIET_S, reserved)) == []
    assert gangs.next_pod("g0", "g", reserved, again=True) == [Failed("g", ("g0", "g1", "launcher"), True)]
    cycle(gangs, uids, held(*uids), 10.0)
    assert gangs.next_pod("other", "", reserved) == [], "it may have a node this time"
    assert [one.group for one in gangs.quiet(10.0 + QUIET_S, reserved)] == ["g"], "it would be bound by now"


@pytest.mark.parametrize("what", ["nothing", "a pod of it is bound", "its group is another", "its pods are others"])
def test_a_gang_is_doubted_until_it_is_another(what: str) -> None:
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "asks nothing")
    reserved = held(*uids).__contains__
    cycle(gangs, uids, held(*uids))
    assert len(gangs.next_pod("g0", "g", reserved, again=True)) == 1
    if what == "a pod of it is bound":
        gangs.see("g0", "g", "bound")
    elif what == "its group is another":
        gangs.set_min_count("g", None)
        gangs.set_min_count("g", 3)
    elif what == "its pods are others":
        for uid in [*uids, "launcher"]:
            gangs.gone(uid, reserved)
        for uid in uids:
            gangs.see(uid, "g", "waits")
        gangs.see("launcher", "g", "asks nothing")
    cycle(gangs, uids, held(*uids), 10.0)
    assert len(list(gangs.quiet(10.0 + QUIET_S, reserved))) == (what == "nothing")


def test_two_calls_in_a_row_for_one_pod_are_of_one_cycle() -> None:
    gangs, uids = a_gang_of(3)
    assert cycle(gangs, [uids[0], uids[1], uids[1], uids[2]], held("g0", "g2")) == []
    assert gangs.next_pod("g1", "g", held("g0", "g2").__contains__) == [Failed("g", tuple(uids), False)]


def test_while_the_watch_is_behind_no_cycle_is_judged() -> None:
    gangs = Gangs()
    gangs.set_min_count("g", 2)
    cycle(gangs, ["g0"], held("g0"))
    assert gangs.next_pod("other", "", held("g0").__contains__) == []
    assert [one.uids for one in gangs.quiet(QUIET_S, held("g0").__contains__)] == [("g0",)]


def test_a_call_that_takes_a_while_is_no_silence() -> None:
    gangs, uids = a_gang_of(2)
    cycle(gangs, uids, held("g0"))
    gangs.called("g1", "g", 30.0)
    assert list(gangs.quiet(31.9, held("g0").__contains__)) == []
    assert len(list(gangs.quiet(32.0, held("g0").__contains__))) == 1


def test_a_gang_ends_with_a_pod_that_is_not_bound_and_not_with_one_that_is() -> None:
    gangs, _ = a_gang_of(3)
    reserved = held("g2").__contains__
    gangs.see("g0", "g", "bound")
    assert gangs.gone("g0", reserved) is None
    assert gangs.gone("g1", reserved) == Failed("g", ("g1", "g2"), others_wait=True)
    assert gangs.gone("g1", reserved) is None


def test_a_pod_beyond_min_count_that_is_deleted_costs_those_that_are_to_be_bound_nothing() -> None:
    gangs, uids = a_gang_of(3, min_count=2)
    cycle(gangs, uids, held("g0", "g1"))
    assert gangs.gone("g2", held("g0", "g1").__contains__) is None
    assert gangs.gone("g1", held("g0").__contains__) == Failed("g", ("g0", "g1"), others_wait=True)
