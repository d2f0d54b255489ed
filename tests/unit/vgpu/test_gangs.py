"""When a gang fails: against the obvious slow way, which keeps every event and reads them all again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.examples import examples
from vgpu.gangs import QUIET_S, Failed, Gangs, Standing

GROUPS = ("g", "h")
UIDS = [f"{group}{at}" for group in GROUPS for at in range(4)]
"""The first letter is the group; a pod `p` has none."""


@dataclass
class Call:
    """About a pod, in the cycle that is under way or has just ended."""

    uid: str
    at_s: float
    listed: bool = False


@dataclass
class Slow:
    """Lists, gone through from the start each time."""

    min_count: dict[str, int] = field(default_factory=dict)
    shown: dict[str, Standing] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    cycle: list[Call] = field(default_factory=list)
    """Of all groups: calls since their attempt began."""
    last_s: dict[str, float] = field(default_factory=dict)
    others_wait: dict[str, bool] = field(default_factory=dict)
    last: tuple[str, str] = "", ""
    doubted: set[str] = field(default_factory=set)

    def pods(self, group: str) -> set[str]:
        return {uid for uid in (*self.shown, *(one.uid for one in self.cycle)) if uid[0] == group}

    def counts(self, uid: str, at_the_end: bool) -> bool:
        match self.shown.get(uid, "waits"):
            case "bound":
                return True
            case "asks nothing":
                return at_the_end or uid[0] not in self.doubted
            case "unschedulable":
                return at_the_end
        return uid in self.reserved or any(one.listed for one in self.cycle if one.uid == uid)

    def lacks(self, group: str, at_the_end: bool) -> bool:
        return sum(self.counts(uid, at_the_end) for uid in self.pods(group)) < self.min_count[group]

    def forget(self, group: str) -> None:
        self.cycle = [one for one in self.cycle if one.uid[0] != group]
        self.last_s.pop(group, None)
        self.others_wait.pop(group, None)

    def cycle_ends(self, uid: str, group: str) -> str:
        """The gang whose cycle ended when filter was called for this pod, and failed by the count."""
        (before, last), self.last = self.last, (group, uid)
        over = before != group or (uid != last and any(one.uid == uid for one in self.cycle))
        if not over or before not in self.last_s:
            return ""
        known = before in self.min_count and sum(one[0] == before for one in self.shown) >= self.min_count[before]
        if known and self.lacks(before, at_the_end=True):
            return before
        if before == group:
            self.cycle = [one for one in self.cycle if one.uid[0] != group]
        return ""


class Machine(RuleBasedStateMachine):
    """Pods come, are tried, reserved for, bound and deleted; PodGroups come and go; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.gangs, self.slow, self.now_s = Gangs(), Slow(), 100.0

    def _failed(self, failed: Failed) -> None:
        group = failed.group
        assert set(failed.uids) == self.slow.pods(group)
        assert len(failed.uids) == len(set(failed.uids))
        assert failed.others_wait is self.slow.others_wait.get(group, True)
        self.slow.reserved -= {uid for uid in failed.uids if self.slow.shown.get(uid) != "bound"}
        self.slow.forget(group)

    @rule(group=st.sampled_from(GROUPS), pods=st.sampled_from([None, 1, 2, 3, 3, 4]))
    def a_group_comes_or_goes(self, group: str, pods: int | None) -> None:
        self.gangs.set_min_count(group, pods)
        if pods is None:
            self.slow.min_count.pop(group, None)
            self.slow.doubted.discard(group)
        else:
            self.slow.min_count[group] = pods

    @rule(
        uid=st.sampled_from(UIDS),
        standing=st.sampled_from(["bound", "waits", "waits", "asks nothing", "unschedulable"]),
    )
    def the_watch_shows(self, uid: str, standing: Standing) -> None:
        self.gangs.see(uid, uid[0], standing)
        if standing == "bound" and self.slow.shown.get(uid) != "bound":
            self.slow.doubted.discard(uid[0])
        self.slow.shown[uid] = standing

    @rule(group=st.sampled_from(GROUPS))
    def the_watch_shows_all(self, group: str) -> None:
        """What happens most, in one step: the machine gets further."""
        self.a_group_comes_or_goes(group, 4)
        for at in range(4):
            self.the_watch_shows(f"{group}{at}", "waits")

    @rule(uid=st.sampled_from([*UIDS, "p"]), answer=st.sampled_from(["reserved", "reserved", "listed", "refused"]))
    def filter_is_called(self, uid: str, answer: str) -> None:
        group = "" if uid == "p" else uid[0]
        again = uid in self.slow.reserved
        found = self.gangs.next_pod(uid, group, self.slow.reserved.__contains__, again=again)
        bound = [one for one, standing in self.slow.shown.items() if one[0] == group and standing == "bound"]
        if again and len(bound) < self.slow.min_count.get(group, 0):
            self.slow.doubted.add(group)
            assert found[0].group == group
            self._failed(found.pop(0))
        ended = self.slow.cycle_ends(uid, group)
        assert [one.group for one in found] == ([ended] if ended else [])
        for failed in found:
            self._failed(failed)
        self.slow.reserved.discard(uid)
        if answer == "reserved":
            self.slow.reserved.add(uid)
        if group:
            self.gangs.called(uid, group, self.now_s)
            self.slow.last_s[group] = self.now_s
            self.slow.others_wait.setdefault(group, False)
            self.slow.cycle = [one for one in self.slow.cycle if one.uid != uid]
            self.slow.cycle.append(Call(uid, self.now_s, answer == "listed"))
        self.gangs.answered(uid, group, fits=answer != "refused", reserved=answer == "reserved")
        for other in self.slow.last_s:
            self.slow.others_wait[other] |= answer == "refused" and other != group

    @rule(group=st.sampled_from(GROUPS), refused=st.integers(0, 4))
    def a_cycle(self, group: str, refused: int) -> None:
        for at in range(4):
            self.filter_is_called(f"{group}{at}", "refused" if at == refused else "reserved")

    @precondition(lambda self: self.slow.cycle)
    @rule(data=st.data(), takes_s=st.sampled_from([0.0, 3.0]))
    def preempt_is_called(self, data: st.DataObject, takes_s: float) -> None:
        uid = data.draw(st.sampled_from([one.uid for one in self.slow.cycle]))
        self.gangs.called(uid, uid[0], self.now_s + takes_s)
        self.slow.last_s[uid[0]] = self.now_s + takes_s

    @rule(uid=st.sampled_from(UIDS))
    def is_deleted(self, uid: str) -> None:
        group, standing = uid[0], self.slow.shown.pop(uid, None)
        failed = self.gangs.gone(uid, self.slow.reserved.__contains__)
        if standing is not None and not any(one[0] == group for one in self.slow.shown):
            self.slow.doubted.discard(group)
        if standing is not None:
            self.slow.cycle = [one for one in self.slow.cycle if one.uid != uid]
        self.slow.reserved.discard(uid)
        fails = (
            standing not in (None, "bound")
            and group in self.slow.min_count
            and self.slow.lacks(group, at_the_end=False)
        )
        assert (failed is not None) is fails
        if failed is not None:
            assert set(failed.uids) == self.slow.pods(group) | {uid}
            self.slow.reserved -= {one for one in failed.uids if self.slow.shown.get(one) != "bound"}

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def quiet(self) -> None:
        found = list(self.gangs.quiet(self.now_s, self.slow.reserved.__contains__))
        due = [group for group, last_s in self.slow.last_s.items() if self.now_s - last_s >= QUIET_S]
        over = {group for group in due if group in self.slow.min_count and self.slow.lacks(group, at_the_end=False)}
        assert {one.group for one in found} == over
        for failed in found:
            self._failed(failed)
        for group in due:
            self.slow.forget(group)

    @invariant()
    def gangs_are_known(self) -> None:
        assert {group for group in GROUPS if group in self.gangs} == set(self.slow.min_count)


def test_a_gang_fails_as_the_rules_say_in_any_order() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples(300), stateful_step_count=40, deadline=None, derandomize=True)
    )


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
