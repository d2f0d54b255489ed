"""Gangs: pods that are useful only together, and when the reservations of a gang end.

kube-scheduler 1.36 tries the pods of a PodGroup one after the other, in one cycle (pkg/scheduler/schedule_one_podgroup.go). A pod that is refused
does not end the cycle. After the last pod either at least minCount pods have a node, and all that have one are bound; or none is bound, and all are tried
again: after a back-off, or at once where nothing else waits. An extender sees neither how a cycle ended nor a pod that kube-scheduler's own
filters refused. So it counts.

A pod of a gang counts
    bound                 always
    not bound, with a request of ours     if it has a reservation, or if filter left the choice of its node to kube-scheduler
    not bound, without a request of ours  always at the end of a cycle; later unless kube-scheduler reports that it is unschedulable, and unless the gang
                                          was tried again though it seemed to be scheduled

Reservations of a gang's pods that are not bound end when fewer than minCount count
    at the end of its cycle    kube-scheduler never tries two groups at a time, nor a pod twice in a cycle. So the cycle is over when filter is called
                               for a pod of no group or of another one, or for a pod for which it was called before the last one. (For one pod it
                               may be called twice in a row: with its nominated node, and with all nodes.)
    `QUIET_S` after its last call. If the cycle goes on after that, the rest of the gang is refused (`vgpu.scheduling.gang_pauses`)
    when one of its pods that is not bound is deleted

When filter is called for a pod a second time, the next cycle may have begun with an earlier call: with pods that kube-scheduler's own filters refused
before. So only what was reserved before the pod's first call ends with the cycle. Pods called for since are in question until filter is called for
them again. So are all others where enough seem to count, and yet a pod with a reservation is tried again.

A gang that fits only if pods in question count, or pods without a request of ours that are unschedulable or doubted, keeps its reservations until
kube-scheduler goes on to a pod of others. `QUIET_S` after that a pod in question counts, and keeps its reservation, only if kube-scheduler is seen to bind it
(`ReservationFacts.expected`). If a pod of others was refused meanwhile, the gang yields: it is refused for `YIELD_S`, or until a pod of others is refused
again. Otherwise kube-scheduler, which tries all of them again together, might try the gang first each time.

A gang may fit and one of its pods fail on its way to be bound, for example at a volume. kube-scheduler then tries that pod again, and binds the others
whatever becomes of it. So the others are in flight until they are bound or tried again: their reservations do not end with the gang's. kube-scheduler
shows which those are: it nominates each to its node and, the first time, sets the PodGroup's condition.

Pure: a group is a text, and the caller passes the time and which pods have reservations. A group without a minCount (policy Basic, or not
known) is no gang: nothing here ends its reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from vgpu.scheduling.gang_facts import GangFailure, ReservationFacts, Standing
from vgpu.scheduling.gang_pauses import LONGEST_S, GangPauses, GangRefusal

QUIET_S: Final = 2.0
"""Without a call about a gang, its cycle is over. Specified; calls of one cycle follow each other within milliseconds."""

GAP_S: Final = 0.5
"""Between two calls after which the second may be of another cycle. kube-scheduler's shortest back-off is 1 s (DefaultPodInitialBackoffDuration)."""

YIELD_S: Final = 10.0
"""Longest time for which a gang yields. kube-scheduler's longest back-off (DefaultPodMaxBackoffDuration)."""


@dataclass(slots=True)
class _Attempt:
    """The calls about one group, with no quiet between them."""

    last_s: float
    called: dict[str, bool] = field(default_factory=dict)
    """UIDs in the order of their last calls -> does the pod count without a reservation?"""
    run: set[str] = field(default_factory=set)
    """UIDs of the last calls: of one cycle, as far as is known."""
    others_wait: bool = False
    over_s: float | None = None
    """When kube-scheduler continued with a pod of others."""
    quiet: bool = False
    """Was it quiet since the last call, when there was no reservation? Then nothing ended, and the cycle may go on."""


class Gangs:
    """Groups by name, pods by UID."""

    def __init__(self) -> None:
        self._min_count: dict[str, int] = {}
        self._pods: dict[str, dict[str, Standing]] = {}
        """Group -> its pods, as the watch shows them."""
        self._group: dict[str, str] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._last = "", ""
        """Group and UID of the last pod that kube-scheduler called filter for; a pod of no group has an empty one."""
        self._doubted: set[str] = set()
        """Gangs that were tried again though they seemed to be scheduled: of their pods that request nothing of ours, some have no node."""
        self._in_flight: dict[str, set[str]] = {}
        """Group -> its pods that kube-scheduler has a node for since the group fitted, and binds whatever becomes of the others."""
        self._stale: dict[str, set[str]] = {}
        """Group -> its pods in question: those of an earlier cycle, or of the one that is under way."""
        self._yields_until_s: dict[str, float] = {}
        """Gang -> until when at most it is refused, in favour of others that wait."""
        self._wake = False
        self._pauses = GangPauses(QUIET_S)

    def __len__(self) -> int:
        return len(self._min_count)

    def __contains__(self, group: str) -> bool:
        """Is it a gang?"""
        return group in self._min_count

    # --- what the watches show ---

    def set_min_count(self, group: str, pods: int | None) -> None:
        """So many pods are scheduled together, or none; None: it is no gang, or gone."""
        if pods is None:
            self._min_count.pop(group, None)
            self._attempts.pop(group, None)
            self._forget(group)
        else:
            self._min_count[group] = pods

    def fitted(self, group: str, facts: ReservationFacts) -> None:
        """kube-scheduler reports for the first time that the group is scheduled: it binds those that have a node."""
        waits = {uid for uid, standing in self._pods.get(group, {}).items() if standing == "waits" and _has(uid, facts)}
        found = {uid for uid in waits - self._stale.get(group, set()) if not facts.expected(uid)}
        if found and group in self._min_count:
            self._in_flight[group] = found

    def nominated(self, uid: str, group: str) -> None:
        """kube-scheduler is seen to be about to bind the pod. From now on `ReservationFacts.expected` shows whether it still is."""
        self._land(uid, group)

    def withdrawn(self, uid: str, group: str, at_s: float) -> None:
        """The pod was expected to be bound, and is no longer: it failed before that. It is in question whether it was tried again since."""
        self._attempts.setdefault(group, _Attempt(at_s)).quiet = False  # there is a reservation to lose
        self._stale.setdefault(group, set()).add(uid)

    def see(self, uid: str, group: str, standing: Standing) -> None:
        """A pod of a group came or changed. A pod never changes its group."""
        if standing == "bound" and self._pods.get(group, {}).get(uid) != "bound":
            self._doubted.discard(group)
            self._pauses.bound(group)
            self._land(uid, group)
        self._group[uid] = group
        self._pods.setdefault(group, {})[uid] = standing

    def gone(self, uid: str, facts: ReservationFacts) -> GangFailure | None:
        """A pod is deleted, or has ended. Its gang fails if it was not bound and too few of the others count."""
        group = self._group.pop(uid, None)
        if group is None:
            return None
        self._land(uid, group)
        uids, standing = self._failing(group, facts), self._pods[group].pop(uid)
        self._stale.get(group, set()).discard(uid)
        if not self._pods[group]:
            del self._pods[group]
            self._forget(group)
        if (attempt := self._attempts.get(group)) is not None:
            attempt.called.pop(uid, None)
        if standing == "bound" or group not in self._min_count or not self._lacks(group, facts):
            return None
        return GangFailure(group, tuple(dict.fromkeys((*uids, uid))), others_wait=True)

    def refusal_shown(self, uid: str, group: str) -> None:
        """kube-scheduler reports that the pod is unschedulable because `refuses` rejected it in the cycle that may go on."""
        self._pauses.refusal_shown(uid, group)

    def _land(self, uid: str, group: str) -> bool:
        """The pod is not in flight any more. Was it?"""
        some = self._in_flight.get(group, set())
        was = uid in some
        some.discard(uid)
        if not some:
            self._in_flight.pop(group, None)
        return was

    def _forget(self, group: str) -> None:
        self._doubted.discard(group)
        self._in_flight.pop(group, None)
        self._stale.pop(group, None)
        self._end_yielding(lambda other, _: other == group)
        self._pauses.forget(group)

    # --- what kube-scheduler calls ---

    def refuses(self, uid: str, group: str, at_s: float) -> bool:
        """kube-scheduler calls filter for a pod of this group (empty: of none). Is it to be refused, whatever is free?

        Then nothing else is to be recorded of the call, but for the answer.
        """
        for other, attempt in self._attempts.items():
            if other != group and attempt.over_s is None:
                attempt.over_s = at_s
        own = self._attempts.get(group, _Attempt(at_s))
        others_wait = own.over_s is not None and own.others_wait and not own.quiet
        if others_wait and uid in own.called and self._lacks_bound(group):  # it had reservations in vain
            self._yields_until_s.setdefault(group, at_s + YIELD_S)
            self._stale[group] = set(self._uids(group))
        if at_s < self._yields_until_s.get(group, at_s):
            self._pauses.turn_away(uid, group)
            return True
        return self._pauses.refuses(uid, group, at_s)

    def refusal(self, group: str) -> GangRefusal | None:
        """Why `refuses` refuses pods of this group; None where it refuses none."""
        return self._pauses.refusal(group)

    def wakes(self) -> bool:
        """Since the last time that this was called, have refused pods become due for another try?"""
        wake, self._wake = self._wake, False
        return self._pauses.wakes() or wake

    def _end_yielding(self, over: Callable[[str, float], bool]) -> None:
        for group in [group for group, until_s in self._yields_until_s.items() if over(group, until_s)]:
            del self._yields_until_s[group]
            self._wake = True

    def next_pod(self, uid: str, group: str, facts: ReservationFacts, *, again: bool = False) -> list[GangFailure]:
        """kube-scheduler calls filter for a pod of this group (empty: of none). Which gangs' cycles ended now, and without success?

        `again`: the pod has a reservation since an earlier call, and no bind call has come.
        """
        (before, last), self._last = self._last, (group, uid)
        found = self._cycle_ended(before, facts) if before != group else []
        in_flight = self._land(uid, group) or (again and facts.expected(uid))
        repeated = self._pauses.comes_back(uid, group) or again or (uid != last and uid in self._called(group))
        if repeated and not in_flight and self._lacks_bound(group):
            if again:
                self._doubted.add(group)
            if uid not in self._stale.get(group, ()):
                found += self._tried_again(uid, group, facts)
        return found

    def _lacks_bound(self, group: str) -> bool:
        """Are fewer than minCount of its pods bound?"""
        bound = sum(standing == "bound" for standing in self._pods.get(group, {}).values())
        return bound < self._min_count.get(group, 0)

    def _cycle_ended(self, group: str, facts: ReservationFacts) -> list[GangFailure]:
        """No call is in question: none of the next cycle has come yet."""
        if group not in self._attempts or not self._cycle_failed(group, facts):
            return []
        uids = self._failing(group, facts)
        expected = {uid for uid in self._uids(group) if facts.reserved(uid) and facts.expected(uid)}
        attempt = self._attempts.pop(group)
        self._stale.pop(group, None)
        if expected:  # it may be seen late that they are not bound
            self._attempts[group], self._stale[group] = _Attempt(attempt.last_s, over_s=attempt.over_s), expected
        return [GangFailure(group, uids, attempt.others_wait)]

    def _tried_again(self, uid: str, group: str, facts: ReservationFacts) -> list[GangFailure]:
        """A cycle is over, and the next one has begun with this call, or with one since the pod's last."""
        called, attempt = list(self._called(group)), self._attempts.get(group)
        since = called[called.index(uid) + 1 :] if uid in called else called
        failed = self._cycle_failed(group, facts)
        if attempt is not None:
            attempt.run.clear()
        if not failed:
            self._stale[group] = {one for one in self._uids(group) if one != uid}
            return []
        self._stale[group] = set(since)
        uids = tuple(one for one in self._failing(group, facts) if one not in since)
        others_wait = attempt is None or attempt.others_wait
        if attempt is not None:
            attempt.called = {one: attempt.called[one] for one in since}
            attempt.others_wait = False
        return [GangFailure(group, uids, others_wait)]

    def _cycle_failed(self, group: str, facts: ReservationFacts) -> bool:
        """Not decided where the watch shows fewer than minCount pods: kube-scheduler had seen that many, so the watch is behind."""
        if group not in self._min_count or len(self._pods.get(group, ())) < self._min_count[group]:
            return False
        return self._lacks(group, facts, cycle_ended_now=True)

    def called(self, uid: str, group: str, at_s: float) -> None:
        """kube-scheduler calls about this pod. A call that takes a while is recorded with the time until which it may take."""
        if group in self._pauses:
            return  # it was refused, and is of no attempt that counts
        attempt = self._attempts.setdefault(group, _Attempt(at_s))
        if at_s - attempt.last_s >= GAP_S:
            attempt.run.clear()
        attempt.run.add(uid)
        attempt.last_s, attempt.over_s, attempt.quiet = at_s, None, False
        attempt.called[uid] = attempt.called.pop(uid, False)
        self._stale.get(group, set()).discard(uid)

    def answered(self, uid: str, group: str, *, fits: bool, reserved: bool) -> None:
        """Filter answered for a pod of this group (empty: of none)."""
        if (attempt := self._attempts.get(group)) is not None:
            attempt.called[uid] = fits and not reserved
        if not fits:
            self._end_yielding(lambda other, _: other != group)
            for other, waiting in self._attempts.items():
                waiting.others_wait = waiting.others_wait or other != group

    def quiet(self, now_s: float, facts: ReservationFacts) -> Iterator[GangFailure]:
        """Gangs without a call for `QUIET_S`, or for as long as slow ones are given, that are not scheduled; and of those that are, pods that
        are not. End their reservations before the next call."""
        self._pauses.expire(now_s)
        self._end_yielding(lambda _, until_s: now_s >= until_s)
        for group, attempt in [one for one in self._attempts.items() if now_s >= self._over_s(*one)]:
            failing, lacks = self._unscheduled(group, attempt, now_s, facts)
            if failing is None:
                continue
            lost = {uid for uid in failing if facts.reserved(uid)}
            del self._attempts[group]
            self._stale.pop(group, None)
            if lacks and not lost and not attempt.quiet:
                attempt.quiet = True
                self._attempts[group] = attempt
            elif lost and not attempt.quiet:
                if lacks and attempt.over_s is not None and attempt.others_wait:
                    self._yields_until_s[group] = now_s + YIELD_S
                before, last = self._last
                if before == group and not lost.isdisjoint(attempt.called):
                    self._pauses.begin(group, attempt.run, last, attempt.last_s)
                yield GangFailure(group, failing, attempt.others_wait)

    def _unscheduled(
        self, group: str, attempt: _Attempt, now_s: float, facts: ReservationFacts
    ) -> tuple[tuple[str, ...] | None, bool]:
        """Pods whose reservations end, and whether the whole gang fails; None: that cannot be decided yet."""
        if group not in self._min_count:
            return (), False
        failing = self._failing(group, facts)
        if self._lacks(group, facts, cycle_ended_now=True):
            return failing, True
        stale = tuple(uid for uid in failing if uid in self._stale.get(group, ()) and facts.reserved(uid))
        lacks = self._lacks(group, facts, quiet=True)
        if (lacks or stale) and attempt.over_s is None and now_s < attempt.last_s + LONGEST_S:
            return None, lacks
        return (failing if lacks else stale), lacks

    def _over_s(self, group: str, attempt: _Attempt) -> float:
        """From when on nothing more is to come of an attempt."""
        if attempt.quiet:
            return attempt.last_s + LONGEST_S
        if attempt.over_s is not None:
            return attempt.over_s + QUIET_S
        return attempt.last_s + self._pauses.quiet_s(group)

    def _lacks(
        self, group: str, facts: ReservationFacts, *, cycle_ended_now: bool = False, quiet: bool = False
    ) -> bool:
        """Do fewer than minCount of its pods count?"""
        called, shown = self._called(group), self._pods.get(group, {})
        trusted, stale, count = cycle_ended_now or group not in self._doubted, self._stale.get(group, ()), 0
        for uid in self._uids(group):
            standing = shown.get(uid, "waits")
            in_question = quiet and uid in stale and not self._is_in_flight(uid, group, facts)
            count += (
                standing == "bound"
                or (standing == "requests nothing" and trusted)
                or (standing == "unschedulable" and cycle_ended_now)
                or (standing == "waits" and not in_question and (_has(uid, facts) or called.get(uid, False)))
            )
        return count < self._min_count[group]

    def _called(self, group: str) -> Mapping[str, bool]:
        return self._attempts[group].called if group in self._attempts else {}

    def _is_in_flight(self, uid: str, group: str, facts: ReservationFacts) -> bool:
        return facts.expected(uid) or uid in self._in_flight.get(group, ())

    def _failing(self, group: str, facts: ReservationFacts) -> tuple[str, ...]:
        """Those of its pods that are not in flight."""
        return tuple(uid for uid in self._uids(group) if not self._is_in_flight(uid, group, facts))

    def _uids(self, group: str) -> tuple[str, ...]:
        """Of its pods: those that the watch shows, and those that kube-scheduler called about."""
        return tuple(dict.fromkeys((*self._pods.get(group, ()), *self._called(group))))


def _has(uid: str, facts: ReservationFacts) -> bool:
    return facts.reserved(uid) or facts.kept(uid)
