"""When a gang fails: what counts, and whose reservations end."""

from __future__ import annotations

from collections.abc import Set

import pytest

from vgpu.scheduling.gang_facts import GangFailure, ReservationFacts
from vgpu.scheduling.gangs import QUIET_S, YIELD_S, Gangs


def held(*uids: str) -> set[str]:
    return set(uids)


def facts(reserved: set[str], *, kept: Set[str] = frozenset(), expected: Set[str] = frozenset()) -> ReservationFacts:
    return ReservationFacts(reserved.__contains__, kept.__contains__, expected.__contains__)


def a_gang_of(pods: int, *, min_count: int | None = None) -> tuple[Gangs, list[str]]:
    """As the watches show it: none of its pods is bound."""
    gangs, uids = Gangs(), [f"g{at}" for at in range(pods)]
    gangs.set_min_count("g", pods if min_count is None else min_count)
    for uid in uids:
        gangs.see(uid, "g", "waits")
    return gangs, uids


def a_gang_without_its_launcher() -> tuple[Gangs, ReservationFacts]:
    """Its two pods with GPUs fit, and kube-scheduler finds no node for its third."""
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "unschedulable")
    cycle(gangs, uids, held(*uids))
    return gangs, facts(held(*uids))


def cycle(gangs: Gangs, uids: list[str], reserved: set[str], now_s: float = 0.0) -> list[GangFailure]:
    """Filter is called for each of the gang; it reserves on a node and answers that."""
    failed: list[GangFailure] = []
    for uid in uids:
        failed += gangs.next_pod(uid, "g", facts(reserved))
        gangs.called(uid, "g", now_s)
        gangs.answered(uid, "g", fits=uid in reserved, reserved=uid in reserved)
    return failed


def others(gangs: Gangs, at: ReservationFacts, now_s: float = 0.0) -> list[GangFailure]:
    """Filter is called for a pod of no group."""
    assert not gangs.refuses("other", "", now_s)
    return gangs.next_pod("other", "", at)


def test_the_next_pod_of_others_ends_what_a_failed_gang_has() -> None:
    gangs, uids = a_gang_of(3)
    assert cycle(gangs, uids, held("g0", "g1")) == []
    assert gangs.next_pod("other", "", facts(held("g0", "g1"))) == [GangFailure("g", ("g0", "g1", "g2"), False)]
    assert gangs.next_pod("more", "", facts(held())) == []


def test_the_next_try_of_a_failed_gang_ends_what_is_surely_of_the_last() -> None:
    """It may have begun with g1, if kube-scheduler itself refused that before."""
    gangs, uids = a_gang_of(3)
    cycle(gangs, uids, held("g0", "g1"))
    assert cycle(gangs, uids, held("g0", "g1")) == [GangFailure("g", ("g0",), False)]
    assert others(gangs, facts(held("g0", "g1"))) == [GangFailure("g", ("g0", "g1", "g2"), False)]


@pytest.mark.parametrize("expected", [held("g0", "g1"), held()])
def test_pods_that_kube_scheduler_itself_refused_at_the_last_try_keep_their_reservations_at_this_one(
    expected: set[str],
) -> None:
    gangs, uids = a_gang_of(4)
    cycle(gangs, uids[2:], held("g2", "g3"))
    all_of_them = facts(held(*uids))
    for uid in uids:
        assert gangs.next_pod(uid, "g", all_of_them, again=uid in ("g2", "g3")) == []
        gangs.called(uid, "g", 0.5)
        gangs.answered(uid, "g", fits=True, reserved=True)
    assert list(gangs.quiet(0.5 + QUIET_S, all_of_them)) == [], "no pod waits for it"
    assert others(gangs, all_of_them, 3.0) == []
    lost = [] if expected else [GangFailure("g", tuple(uids), False)]
    assert list(gangs.quiet(3.0 + QUIET_S, facts(held(*uids), expected=expected))) == lost


def test_a_pod_that_fails_before_it_is_bound_costs_those_nothing_that_kube_scheduler_is_to_bind() -> None:
    """The group fitted before: its condition shows nothing new."""
    gangs, uids = a_gang_of(3)
    cycle(gangs, uids, held(*uids))
    at = facts(held(*uids), expected=held("g0", "g2"))
    assert gangs.next_pod("g1", "g", at, again=True) == []
    gangs.called("g1", "g", 5.0)
    gangs.answered("g1", "g", fits=False, reserved=False)
    at = facts(held("g0", "g2"), expected=held("g0", "g2"))
    assert others(gangs, at, 5.0) == [GangFailure("g", ("g1",), False)]
    assert list(gangs.quiet(5.0 + QUIET_S, at)) == []


def test_what_was_expected_to_be_bound_and_is_not_ends_a_moment_later() -> None:
    """That kube-scheduler withdraws a nomination may be seen after its next call."""
    gangs, uids = a_gang_of(3)
    cycle(gangs, uids, held("g0", "g1"))
    assert others(gangs, facts(held("g0", "g1"), expected=held("g1"))) == [GangFailure("g", ("g0", "g2"), False)]
    assert list(gangs.quiet(QUIET_S, facts(held("g1")))) == [GangFailure("g", tuple(uids), False)]


def test_what_is_seen_very_late_not_to_be_expected_any_more_ends_at_once() -> None:
    """kube-scheduler writes 50 statuses a second: of a large gang some come seconds later."""
    gangs, uids = a_gang_of(3)
    cycle(gangs, uids, held("g0", "g1"))
    others(gangs, facts(held("g0", "g1"), expected=held("g1")))
    for now_s in (QUIET_S, QUIET_S + 1):
        assert list(gangs.quiet(now_s, facts(held("g1"), expected=held("g1")))) == []
    gangs.withdrawn("g1", "g", QUIET_S + 1.5)
    assert list(gangs.quiet(QUIET_S + 2, facts(held("g1")))) == [GangFailure("g", tuple(uids), False)]


@pytest.mark.parametrize("kept", [held("g1"), held()])
def test_a_preemption_reservation_does_not_end_in_a_pause(kept: set[str]) -> None:
    gangs, uids = a_gang_of(3)
    reserved = held("g1") - kept
    cycle(gangs, uids[:2], reserved)
    assert len(list(gangs.quiet(QUIET_S, facts(reserved, kept=kept)))) == len(reserved)
    assert gangs.refuses("g2", "g", QUIET_S + 1) is bool(reserved)


@pytest.mark.parametrize("end", ["a pod of others", "time", "its group is gone"])
def test_a_gang_with_reservations_in_vain_yields_to_pods_that_were_refused_for_it(end: str) -> None:
    gangs, at = a_gang_without_its_launcher()
    assert others(gangs, at, 1.0) == []
    gangs.answered("other", "", fits=False, reserved=False)
    assert [one.others_wait for one in gangs.quiet(1.0 + QUIET_S, at)] == [True]
    assert [gangs.refuses(uid, "g", 4.0) for uid in ("g0", "g1")] == [True, True]
    assert not gangs.wakes()
    others(gangs, at, 5.0)
    gangs.answered("other", "", fits=True, reserved=True)
    assert gangs.refuses("g0", "g", 5.0), "more may fit"
    if end == "a pod of others":
        gangs.answered("other", "", fits=False, reserved=False)
    elif end == "time":
        assert list(gangs.quiet(1.0 + QUIET_S + YIELD_S, at)) == []
    else:
        gangs.set_min_count("g", None)
    assert gangs.wakes()
    assert not gangs.refuses("g0", "g", 5.0)


def test_a_gang_yields_also_if_it_is_tried_again_at_once() -> None:
    gangs, at = a_gang_without_its_launcher()
    others(gangs, at, 1.0)
    gangs.answered("other", "", fits=False, reserved=False)
    assert gangs.refuses("g0", "g", 1.0)
    assert list(gangs.quiet(1.0 + QUIET_S, facts(held("g1")))) == [GangFailure("g", ("g0", "g1", "launcher"), True)]
    assert gangs.refuses("g0", "g", 1.0 + QUIET_S)


def test_a_gang_that_no_pod_waits_for_does_not_yield() -> None:
    gangs, at = a_gang_without_its_launcher()
    others(gangs, at, 1.0)
    gangs.answered("other", "", fits=True, reserved=True)
    assert len(list(gangs.quiet(1.0 + QUIET_S, at))) == 1
    assert not gangs.refuses("g0", "g", 4.0)


def test_a_gang_that_pods_without_a_request_may_complete_keeps_its_reservations_until_kube_scheduler_goes_on() -> None:
    gangs, at = a_gang_without_its_launcher()
    assert list(gangs.quiet(60.0, at)) == [], "the launcher may be next"
    assert others(gangs, at, 61.0) == [], "the launcher may have a node"
    assert list(gangs.quiet(61.0 + QUIET_S, at)) == [GangFailure("g", ("g0", "g1", "launcher"), False)]


def test_a_gang_that_is_scheduled_keeps_its_reservations_until_it_is_bound() -> None:
    gangs, uids = a_gang_of(3, min_count=2)
    reserved = facts(held("g0", "g2"))
    cycle(gangs, uids, held("g0", "g2"))
    assert gangs.next_pod("other", "", reserved) == []
    assert list(gangs.quiet(QUIET_S, reserved)) == []


def test_pods_that_request_nothing_of_ours_count_unless_kube_scheduler_refused_them() -> None:
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "requests nothing")
    reserved = facts(held(*uids))
    cycle(gangs, uids, held(*uids))
    assert gangs.next_pod("other", "", reserved) == []
    gangs.see("launcher", "g", "unschedulable")
    gangs.called("g0", "g", 1.0)
    assert gangs.next_pod("g0", "g", reserved) == [], "at its second try it is refused until the watch shows it bound"
    assert others(gangs, reserved, 1.0) == []
    assert [one.group for one in gangs.quiet(1.0 + QUIET_S, reserved)] == ["g"]


def test_a_gang_that_is_tried_again_was_not_scheduled_whatever_was_counted() -> None:
    """Its launcher requests nothing of ours, and waits for another scheduler."""
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "requests nothing")
    reserved = facts(held(*uids))
    cycle(gangs, uids, held(*uids))
    assert list(gangs.quiet(QUIET_S, reserved)) == []
    assert gangs.next_pod("g0", "g", reserved, again=True) == [], "or g0 alone failed, before it was bound"
    cycle(gangs, uids, held(*uids), 10.0)
    assert others(gangs, reserved, 10.0) == [], "it may have a node this time"
    assert [one.group for one in gangs.quiet(10.0 + QUIET_S, reserved)] == ["g"], "it would be bound by now"


@pytest.mark.parametrize("what", ["nothing", "a pod of it is bound", "its group is another", "its pods are others"])
def test_a_gang_is_doubted_until_it_is_another(what: str) -> None:
    gangs, uids = a_gang_of(2, min_count=3)
    gangs.see("launcher", "g", "requests nothing")
    reserved = facts(held(*uids))
    cycle(gangs, uids, held(*uids))
    assert gangs.next_pod("g0", "g", reserved, again=True) == []
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
        gangs.see("launcher", "g", "requests nothing")
    cycle(gangs, uids, held(*uids), 10.0)
    assert others(gangs, reserved, 10.0) == []
    assert len(list(gangs.quiet(10.0 + QUIET_S, reserved))) == (what == "nothing")


def test_two_calls_in_a_row_for_one_pod_are_of_one_cycle() -> None:
    gangs, uids = a_gang_of(3)
    assert cycle(gangs, [uids[0], uids[1], uids[1], uids[2]], held("g0", "g2")) == []
    assert gangs.next_pod("g1", "g", facts(held("g0", "g2"))) == [GangFailure("g", ("g0", "g1"), False)]


def test_while_the_watch_is_behind_no_cycle_is_judged() -> None:
    gangs = Gangs()
    gangs.set_min_count("g", 2)
    cycle(gangs, ["g0"], held("g0"))
    assert gangs.next_pod("other", "", facts(held("g0"))) == []
    assert [one.uids for one in gangs.quiet(QUIET_S, facts(held("g0")))] == [("g0",)]


def test_a_call_that_takes_a_while_is_no_silence() -> None:
    gangs, uids = a_gang_of(2)
    cycle(gangs, uids, held("g0"))
    gangs.called("g1", "g", 30.0)
    assert list(gangs.quiet(31.9, facts(held("g0")))) == []
    assert len(list(gangs.quiet(32.0, facts(held("g0"))))) == 1


def test_a_gang_ends_with_a_pod_that_is_not_bound_and_not_with_one_that_is() -> None:
    gangs, _ = a_gang_of(3)
    reserved = facts(held("g2"))
    gangs.see("g0", "g", "bound")
    assert gangs.gone("g0", reserved) is None
    assert gangs.gone("g1", reserved) == GangFailure("g", ("g1", "g2"), others_wait=True)
    assert gangs.gone("g1", reserved) is None


def test_a_pod_beyond_min_count_that_is_deleted_costs_those_that_are_to_be_bound_nothing() -> None:
    gangs, uids = a_gang_of(3, min_count=2)
    cycle(gangs, uids, held("g0", "g1"))
    assert gangs.gone("g2", facts(held("g0", "g1"))) is None
    assert gangs.gone("g1", facts(held("g0"))) == GangFailure("g", ("g0", "g1"), others_wait=True)
