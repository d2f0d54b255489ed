"""When a gang fails: against the obvious slow way, which keeps every event and reads them all again."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.examples import examples
from vgpu.scheduling.gang_pauses import LONGEST_QUIET_S, LONGEST_S
from vgpu.scheduling.gangs import GAP_S, QUIET_S, WAY_S, Failed, Gangs, Room, Standing

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
    kept: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    """In question."""
    over_s: dict[str, float] = field(default_factory=dict)
    """When a pod of others was called for, since the last call."""
    cycle: list[Call] = field(default_factory=list)
    """Of all groups: calls since their attempt began."""
    last_s: dict[str, float] = field(default_factory=dict)
    others_wait: dict[str, bool] = field(default_factory=dict)
    last: tuple[str, str] = "", ""
    doubted: set[str] = field(default_factory=set)
    in_flight: set[str] = field(default_factory=set)
    log: list[tuple[str, float]] = field(default_factory=list)
    """UIDs of calls and their times; also the group alone, with a mark, where a pod of it was tried again."""
    paused: dict[str, list[str]] = field(default_factory=dict)
    """Group -> UIDs of the calls since its cycle seemed to be over, after those of the cycle and a mark."""
    paused_s: dict[str, float] = field(default_factory=dict)
    quiet_s: dict[str, float] = field(default_factory=dict)
    wakes: bool = False
    way_s: dict[str, float] = field(default_factory=dict)
    """Until when a gang makes way."""
    turned_away: set[str] = field(default_factory=set)
    """Pods that were refused since one of another group was called for."""
    quiet: set[str] = field(default_factory=set)
    """Groups that had nothing to lose when it was quiet."""

    def failing(self, group: str) -> set[str]:
        return self.pods(group) - self.in_flight - self.expected

    def run(self, group: str) -> list[str]:
        """UIDs of the last calls of a group that are of one cycle, as far as can be told."""
        found, since_s = list[str](), float("inf")
        for uid, at_s in reversed([one for one in self.log if one[0][0] == group]):
            if uid[1] == MARK or (since_s - at_s >= GAP_S and since_s < float("inf")):
                break
            found.insert(0, uid)
            since_s = at_s
        return list(dict.fromkeys(found))

    def pause_ends(self, group: str) -> None:
        calls = self.paused.pop(group, [])
        self.wakes |= bool(calls) and calls[-1] != MARK

    def way_ends(self, group: str) -> None:
        self.wakes |= self.way_s.pop(group, None) is not None

    def refuses(self, uid: str, group: str, now_s: float) -> bool:
        self.turned_away = {one for one in self.turned_away if one[0] == group}
        refused = self.is_refused(uid, group, now_s)
        self.turned_away |= {uid} if refused else set()
        return refused

    def is_refused(self, uid: str, group: str, now_s: float) -> bool:
        for other in [one for one in self.last_s if one != group]:
            self.over_s.setdefault(other, now_s)
        called = any(one.uid == uid for one in self.cycle)
        bound = sum(one[0] == group and standing == "bound" for one, standing in self.shown.items())
        waits = group in self.over_s and self.others_wait[group] and group not in self.quiet
        if called and waits and bound < self.min_count.get(group, 0):
            self.way_s.setdefault(group, now_s + WAY_S)
            self.stale |= self.pods(group)
        if now_s < self.way_s.get(group, 0):
            return True
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

    def counts(self, uid: str, at_the_end: bool, quiet: bool) -> bool:
        match self.shown.get(uid, "waits"):
            case "bound":
                return True
            case "asks nothing":
                return at_the_end or uid[0] not in self.doubted
            case "unschedulable":
                return at_the_end
        if quiet and uid in self.stale - self.in_flight - self.expected:
            return False
        return uid in self.reserved | self.kept or any(one.listed for one in self.cycle if one.uid == uid)

    def lacks(self, group: str, at_the_end: bool, quiet: bool = False) -> bool:
        return sum(self.counts(uid, at_the_end, quiet) for uid in self.pods(group)) < self.min_count[group]

    def cycle_failed(self, group: str) -> bool:
        known = group in self.min_count and sum(one[0] == group for one in self.shown) >= self.min_count[group]
        return known and self.lacks(group, at_the_end=True)

    def forget(self, group: str) -> None:
        self.cycle = [one for one in self.cycle if one.uid[0] != group]
        self.stale = {uid for uid in self.stale if uid[0] != group}
        self.log = [one for one in self.log if one[0][0] != group]
        for some in (self.last_s, self.others_wait, self.over_s):
            some.pop(group, None)
        self.quiet.discard(group)

    def tried_again(self, uid: str) -> set[str] | None:
        """A cycle of the pod's group is over. Whose reservations end; None: it did not fail."""
        group = uid[0]
        called = [one.uid for one in self.cycle if one.uid[0] == group]
        since = called[called.index(uid) + 1 :] if uid in called else called
        self.log.append((f"{group}{MARK}", 0.0))
        failed, others = self.cycle_failed(group), {one for one in self.stale if one[0] != group}
        if not failed:
            self.stale = others | (self.pods(group) - {uid})
            return None
        ended = self.failing(group) - set(since)
        self.stale = others | set(since)
        self.cycle = [one for one in self.cycle if one.uid[0] != group or one.uid in since]
        return ended


class Machine(RuleBasedStateMachine):
    """Pods come, are tried, reserved for, bound and deleted; PodGroups come and go; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.gangs, self.slow, self.now_s = Gangs(), Slow(), 100.0

    @property
    def room(self) -> Room:
        """As it is now."""
        return Room(*(some.__contains__ for some in (self.slow.reserved, self.slow.kept, self.slow.expected)))

    def _failed(self, failed: Failed, uids: set[str]) -> None:
        assert set(failed.uids) == uids
        assert len(failed.uids) == len(set(failed.uids))
        assert failed.others_wait is self.slow.others_wait.get(failed.group, True)
        self.slow.reserved -= {uid for uid in failed.uids if self.slow.shown.get(uid) != "bound"}

    @rule(group=st.sampled_from(GROUPS), pods=st.sampled_from([None, 1, 2, 3, 3, 4]))
    def a_group_comes_or_goes(self, group: str, pods: int | None) -> None:
        self.gangs.set_min_count(group, pods)
        if pods is None:
            self.slow.min_count.pop(group, None)
            self.slow.forget(group)
            self._forget(group)
        else:
            self.slow.min_count[group] = pods

    def _forget(self, group: str) -> None:
        self.slow.doubted.discard(group)
        self.slow.in_flight = {uid for uid in self.slow.in_flight if uid[0] != group}
        self.slow.stale = {uid for uid in self.slow.stale if uid[0] != group}
        self.slow.quiet_s.pop(group, None)
        self.slow.turned_away = {uid for uid in self.slow.turned_away if uid[0] != group}
        self.slow.pause_ends(group)
        self.slow.way_ends(group)

    @rule(group=st.sampled_from(GROUPS))
    def the_group_is_shown_to_fit(self, group: str) -> None:
        self.gangs.fitted(group, self.room)
        waits = {uid for uid, standing in self.slow.shown.items() if uid[0] == group and standing == "waits"}
        found = waits & (self.slow.reserved | self.slow.kept) - self.slow.expected - self.slow.stale
        if group in self.slow.min_count and found:
            self.slow.in_flight -= {uid for uid in UIDS if uid[0] == group}
            self.slow.in_flight |= found

    @rule(uid=st.sampled_from(UIDS))
    def a_pod_is_expected_to_be_bound(self, uid: str) -> None:
        if uid in self.slow.reserved:
            self.slow.expected.add(uid)
            self.slow.in_flight.discard(uid)
            self.gangs.nominated(uid, uid[0])

    @precondition(lambda self: self.slow.expected)
    @rule(data=st.data())
    def a_pod_is_expected_no_more(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.slow.expected)))
        self.slow.expected.discard(uid)
        self.gangs.withdrawn(uid, uid[0], self.now_s)
        if uid[0] not in self.slow.last_s:
            self.slow.last_s[uid[0]], self.slow.others_wait[uid[0]] = self.now_s, False
        self.slow.quiet.discard(uid[0])
        self.slow.stale.add(uid)
        self.slow.quiet.discard(uid[0])

    @rule(uid=st.sampled_from(UIDS), kept=st.booleans())
    def room_is_kept_or_not(self, uid: str, kept: bool) -> None:
        if kept:
            self.slow.kept.add(uid)
        else:
            self.slow.kept.discard(uid)

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
        self._next(uid, group)
        self.slow.reserved.discard(uid)
        self.slow.expected.discard(uid)
        if answer == "reserved":
            self.slow.reserved.add(uid)
        if group:
            self.gangs.called(uid, group, self.now_s)
            self._heard(uid, self.now_s)
            self.slow.others_wait.setdefault(group, False)
            self.slow.cycle = [one for one in self.slow.cycle if one.uid != uid]
            self.slow.cycle.append(Call(uid, self.now_s, answer == "listed"))
        self.gangs.answered(uid, group, fits=answer != "refused", reserved=answer == "reserved")
        for other in [one for one in self.slow.way_s if one != group and answer == "refused"]:
            self.slow.way_ends(other)
        for other in self.slow.last_s:
            self.slow.others_wait[other] |= answer == "refused" and other != group

    def _heard(self, uid: str, at_s: float) -> None:
        self.slow.last_s[uid[0]] = at_s
        self.slow.log.append((uid, at_s))
        self.slow.over_s.pop(uid[0], None)
        self.slow.quiet.discard(uid[0])
        self.slow.stale.discard(uid)

    def _next(self, uid: str, group: str) -> None:
        """Before filter."""
        slow, again = self.slow, uid in self.slow.reserved
        found = self.gangs.next_pod(uid, group, self.room, again=again)
        (before, last), slow.last = slow.last, (group, uid)
        if before != group and before in slow.last_s and slow.cycle_failed(before):
            expected = {one for one in slow.pods(before) if one in slow.reserved & slow.expected}
            over_s, last_s = slow.over_s.get(before), slow.last_s[before]
            self._failed(found.pop(0), slow.failing(before))
            slow.forget(before)
            if expected:
                slow.stale |= expected
                slow.last_s[before], slow.others_wait[before] = last_s, False
                slow.over_s |= {before: over_s} if over_s is not None else {}
        in_flight = uid in slow.in_flight or (again and uid in slow.expected)
        slow.in_flight.discard(uid)
        repeated = again or uid in slow.turned_away or (uid != last and any(one.uid == uid for one in slow.cycle))
        slow.turned_away -= slow.turned_away if uid in slow.turned_away else set()
        bound = [one for one, standing in slow.shown.items() if one[0] == group and standing == "bound"]
        if repeated and not in_flight and len(bound) < slow.min_count.get(group, 0):
            slow.doubted |= {group} if again else set()
            if uid not in slow.stale and (ended := slow.tried_again(uid)) is not None:
                self._failed(found.pop(0), ended)
                if group in slow.others_wait:
                    slow.others_wait[group] = False
        assert found == []

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
        self._heard(uid, self.now_s + takes_s)
        self.slow.cycle.sort(key=lambda one: one.uid == uid)

    @rule(uid=st.sampled_from(UIDS))
    def is_deleted(self, uid: str) -> None:
        group, standing = uid[0], self.slow.shown.pop(uid, None)
        if standing is not None:
            self.slow.in_flight.discard(uid)
        failed = self.gangs.gone(uid, self.room)
        if standing is not None and not any(one[0] == group for one in self.slow.shown):
            self._forget(group)
        if standing is not None:
            self.slow.cycle = [one for one in self.slow.cycle if one.uid != uid]
            self.slow.stale.discard(uid)
        fails = (
            standing not in (None, "bound")
            and group in self.slow.min_count
            and self.slow.lacks(group, at_the_end=False)
        )
        assert (failed is not None) is fails
        if failed is not None:
            assert set(failed.uids) == self.slow.failing(group) | {uid}
            self.slow.reserved -= {one for one in failed.uids if self.slow.shown.get(one) != "bound"}
        for some in (self.slow.reserved, self.slow.kept, self.slow.expected):
            some.discard(uid)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0, 5.0, 40.0, LONGEST_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def quiet(self) -> None:
        for group in [one for one in self.slow.paused if self.now_s - self.slow.paused_s[one] >= LONGEST_S]:
            self.slow.pause_ends(group)
        for group in [one for one, until_s in self.slow.way_s.items() if self.now_s >= until_s]:
            self.slow.way_ends(group)
        found = {one.group: one for one in self.gangs.quiet(self.now_s, self.room)}
        for group in list(self.slow.last_s):
            if self._is_due(group):
                self._quiet(group, found.pop(group, None))
        assert found == {}

    def _is_due(self, group: str) -> bool:
        slow = self.slow
        if group in slow.quiet:
            return self.now_s - slow.last_s[group] >= LONGEST_S
        if group in slow.over_s:
            return self.now_s - slow.over_s[group] >= QUIET_S
        return self.now_s - slow.last_s[group] >= slow.quiet_s.get(group, QUIET_S)

    def _quiet(self, group: str, failed: Failed | None) -> None:
        slow, ended, all_fail = self.slow, set[str](), False
        if group in slow.min_count:
            all_fail = slow.lacks(group, at_the_end=True)
            if not all_fail:
                all_fail = slow.lacks(group, at_the_end=False, quiet=True)
                in_question = all_fail or slow.failing(group) & slow.stale & slow.reserved
                if in_question and group not in slow.over_s and self.now_s - slow.last_s[group] < LONGEST_S:
                    assert failed is None
                    return
            ended = slow.failing(group) if all_fail else slow.failing(group) & slow.stale & slow.reserved
        lost = ended & slow.reserved
        if group in slow.quiet or not lost:
            assert failed is None
            keeps = all_fail and group not in slow.quiet
            last_s, others_wait, log = slow.last_s[group], slow.others_wait[group], slow.log
            cycle, over_s = [one for one in slow.cycle if one.uid[0] == group], slow.over_s.get(group)
            slow.forget(group)
            if keeps:
                slow.quiet.add(group)
                slow.cycle += cycle
                slow.log = log
                slow.last_s[group], slow.others_wait[group] = last_s, others_wait
                slow.over_s |= {group: over_s} if over_s is not None else {}
            return
        assert failed is not None
        if slow.last[0] == group and lost & {one.uid for one in slow.cycle}:
            called = slow.run(group)
            slow.paused[group] = [*(uid for uid in called if uid != slow.last[1]), slow.last[1], MARK]
            slow.paused_s[group] = slow.last_s[group]
        if all_fail and group in slow.over_s and slow.others_wait[group]:
            slow.way_s[group] = self.now_s + WAY_S
        self._failed(failed, ended)
        slow.forget(group)

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
