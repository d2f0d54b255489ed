"""When a gang fails: against the obvious slow way, which keeps every event and reads them all again."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.examples import examples
from vgpu.gangs import QUIET_S, Failed, Gangs, Standing
from vgpu.pauses import LONGEST_QUIET_S, LONGEST_S

GROUPS = ("g", "h")
MARK = "|"
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
    in_flight: set[str] = field(default_factory=set)
    paused: dict[str, list[str]] = field(default_factory=dict)
    """Group -> UIDs of the calls since its cycle seemed to be over, after those of the cycle and a mark."""
    paused_s: dict[str, float] = field(default_factory=dict)
    quiet_s: dict[str, float] = field(default_factory=dict)
    wakes: bool = False
    quiet: set[str] = field(default_factory=set)
    """Groups that had nothing to lose when it was quiet."""

    def failing(self, group: str) -> set[str]:
        return self.pods(group) - self.in_flight

    def pause_ends(self, group: str) -> None:
        calls = self.paused.pop(group, [])
        self.wakes |= bool(calls) and calls[-1] != MARK

    def refuses(self, uid: str, group: str, now_s: float) -> bool:
        for other in [one for one in self.paused if one != group]:
            self.pause_ends(other)
        calls = self.paused.get(group)
        if calls is None:
            return False
        last = [one for one in calls if one != MARK][-1]
        if uid in calls and (uid != last or set(calls) == {uid, MARK}):
            self.pause_ends(group)
            return False
        if calls[-1] == MARK:
            longer_s = max(self.quiet_s.get(group, QUIET_S), 2 * (now_s - self.paused_s[group]))
            self.quiet_s[group] = min(LONGEST_QUIET_S, longer_s)
        calls.append(uid)
        return True

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
        self.quiet.discard(group)
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
        assert set(failed.uids) == self.slow.failing(group)
        assert len(failed.uids) == len(set(failed.uids))
        assert failed.others_wait is self.slow.others_wait.get(group, True)
        self.slow.reserved -= {uid for uid in failed.uids if self.slow.shown.get(uid) != "bound"}
        self.slow.forget(group)

    @rule(group=st.sampled_from(GROUPS), pods=st.sampled_from([None, 1, 2, 3, 3, 4]))
    def a_group_comes_or_goes(self, group: str, pods: int | None) -> None:
        self.gangs.set_min_count(group, pods)
        if pods is None:
            self.slow.min_count.pop(group, None)
            self._forget(group)
        else:
            self.slow.min_count[group] = pods

    def _forget(self, group: str) -> None:
        self.slow.doubted.discard(group)
        self.slow.in_flight = {uid for uid in self.slow.in_flight if uid[0] != group}
        self.slow.quiet_s.pop(group, None)
        self.slow.pause_ends(group)

    @rule(group=st.sampled_from(GROUPS))
    def the_group_is_shown_to_fit(self, group: str) -> None:
        self.gangs.fitted(group, self.slow.reserved.__contains__)
        waits = {uid for uid, standing in self.slow.shown.items() if uid[0] == group and standing == "waits"}
        if group in self.slow.min_count and waits & self.slow.reserved:
            self.slow.in_flight -= {uid for uid in UIDS if uid[0] == group}
            self.slow.in_flight |= waits & self.slow.reserved

    @rule(uid=st.sampled_from(UIDS))
    def a_refusal_is_shown(self, uid: str) -> None:
        self.gangs.refusal_shown(uid, uid[0])
        calls = self.slow.paused.get(uid[0], [MARK])
        if uid in calls[calls.index(MARK) :]:
            self.slow.pause_ends(uid[0])

    @rule(
        uid=st.sampled_from(UIDS),
        standing=st.sampled_from(["bound", "waits", "waits", "asks nothing", "unschedulable"]),
    )
    def the_watch_shows(self, uid: str, standing: Standing) -> None:
        self.gangs.see(uid, uid[0], standing)
        if standing == "bound" and self.slow.shown.get(uid) != "bound":
            self.slow.doubted.discard(uid[0])
            self.slow.quiet_s.pop(uid[0], None)
            self.slow.in_flight.discard(uid)
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
        refused = self.slow.refuses(uid, group, self.now_s)
        assert self.gangs.refuses(uid, group, self.now_s) is refused
        if refused:
            self.slow.reserved.discard(uid)
            return
        in_flight = uid in self.slow.in_flight
        self.slow.in_flight.discard(uid)
        again = uid in self.slow.reserved
        found = self.gangs.next_pod(uid, group, self.slow.reserved.__contains__, again=again)
        bound = [one for one, standing in self.slow.shown.items() if one[0] == group and standing == "bound"]
        if again and not in_flight and len(bound) < self.slow.min_count.get(group, 0):
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
            self.slow.quiet.discard(group)
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

    @rule(
        group=st.sampled_from(GROUPS),
        first=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        then=st.lists(st.integers(0, 3), max_size=3),
        seconds=st.sampled_from([1.0, 3.0, 5.0, 40.0]),
    )
    def a_cycle_that_pauses(self, group: str, first: list[int], then: list[int], seconds: float) -> None:
        self.the_watch_shows_all(group)
        for at in first:
            self.filter_is_called(f"{group}{at}", "reserved")
        self.time_passes(seconds)
        self.quiet()
        for at in then:
            self.filter_is_called(f"{group}{at}", "reserved")

    @precondition(lambda self: self.slow.cycle)
    @rule(data=st.data(), takes_s=st.sampled_from([0.0, 3.0]))
    def preempt_is_called(self, data: st.DataObject, takes_s: float) -> None:
        uid = data.draw(st.sampled_from([one.uid for one in self.slow.cycle]))
        self.gangs.called(uid, uid[0], self.now_s + takes_s)
        assert uid[0] not in self.slow.paused
        self.slow.last_s[uid[0]] = self.now_s + takes_s
        self.slow.quiet.discard(uid[0])

    @rule(uid=st.sampled_from(UIDS))
    def is_deleted(self, uid: str) -> None:
        group, standing = uid[0], self.slow.shown.pop(uid, None)
        if standing is not None:
            self.slow.in_flight.discard(uid)
        failed = self.gangs.gone(uid, self.slow.reserved.__contains__)
        if standing is not None and not any(one[0] == group for one in self.slow.shown):
            self._forget(group)
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
            assert set(failed.uids) == self.slow.failing(group) | {uid}
            self.slow.reserved -= {one for one in failed.uids if self.slow.shown.get(one) != "bound"}

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0, 40.0, LONGEST_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def quiet(self) -> None:
        for group in [one for one in self.slow.paused if self.now_s - self.slow.paused_s[one] >= LONGEST_S]:
            self.slow.pause_ends(group)
        quiet_s = {group: self.slow.quiet_s.get(group, QUIET_S) for group in GROUPS}
        quiet_s |= dict.fromkeys(self.slow.quiet, LONGEST_S)
        found = list(self.gangs.quiet(self.now_s, self.slow.reserved.__contains__))
        due = [group for group, last_s in self.slow.last_s.items() if self.now_s - last_s >= quiet_s[group]]
        over = {group for group in due if group in self.slow.min_count and self.slow.lacks(group, at_the_end=False)}
        over -= self.slow.quiet
        idle = {group for group in over if not self.slow.failing(group) & self.slow.reserved}
        self.slow.quiet |= idle
        assert {one.group for one in found} == over - idle
        for failed in found:
            self._pauses(failed.group)
            self._failed(failed)
        for group in set(due) - idle:
            self.slow.forget(group)

    def _pauses(self, group: str) -> None:
        called = [one.uid for one in self.slow.cycle if one.uid[0] == group]
        if self.slow.last[0] == group and self.slow.reserved & set(called) & self.slow.failing(group):
            self.slow.paused[group] = [*(uid for uid in called if uid != self.slow.last[1]), self.slow.last[1], MARK]
            self.slow.paused_s[group] = self.slow.last_s[group]

    @invariant()
    def pods_are_woken(self) -> None:
        assert self.gangs.wakes() is self.slow.wakes
        self.slow.wakes = False

    @invariant()
    def gangs_are_known(self) -> None:
        assert {group for group in GROUPS if group in self.gangs} == set(self.slow.min_count)


def test_a_gang_fails_as_the_rules_say_in_any_order() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples(300), stateful_step_count=40, deadline=None, derandomize=True)
    )
