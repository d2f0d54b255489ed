"""When a gang fails: against the obvious slow way of slow_gangs.py."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.examples import examples
from tests.unit.vgpu.scheduling.slow_gangs import GROUPS, MARK, UIDS, FilterCall, SlowGangs
from vgpu.scheduling.gang_facts import GangFailure, ReservationFacts, Standing
from vgpu.scheduling.gang_pauses import LONGEST_S
from vgpu.scheduling.gangs import QUIET_S, YIELD_S, Gangs


class GangMachine(RuleBasedStateMachine):
    """Pods come, are tried, reserved for, bound and deleted; PodGroups come and go; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.gangs, self.slow, self.now_s = Gangs(), SlowGangs(), 100.0

    @property
    def facts(self) -> ReservationFacts:
        """As it is now."""
        return ReservationFacts(
            *(some.__contains__ for some in (self.slow.reserved, self.slow.kept, self.slow.expected))
        )

    def _failed(self, failed: GangFailure, uids: set[str]) -> None:
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
        self.slow.refused_lately = {uid for uid in self.slow.refused_lately if uid[0] != group}
        self.slow.pause_ends(group)
        self.slow.way_ends(group)

    @rule(group=st.sampled_from(GROUPS))
    def the_group_is_shown_to_fit(self, group: str) -> None:
        self.gangs.fitted(group, self.facts)
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
    def a_preemption_reservation_is_made_or_ended(self, uid: str, kept: bool) -> None:
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
        standing=st.sampled_from(["bound", "waits", "waits", "requests nothing", "unschedulable"]),
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
            self.slow.cycle.append(FilterCall(uid, self.now_s, answer == "listed"))
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
        found = self.gangs.next_pod(uid, group, self.facts, again=again)
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
        repeated = again or uid in slow.refused_lately or (uid != last and any(one.uid == uid for one in slow.cycle))
        slow.refused_lately -= slow.refused_lately if uid in slow.refused_lately else set()
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
        failed = self.gangs.gone(uid, self.facts)
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
        found = {one.group: one for one in self.gangs.quiet(self.now_s, self.facts)}
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

    def _quiet(self, group: str, failed: GangFailure | None) -> None:
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
            slow.way_s[group] = self.now_s + YIELD_S
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
        GangMachine,
        settings=settings(max_examples=examples(300), stateful_step_count=40, deadline=None, derandomize=True),
    )
