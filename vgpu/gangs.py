"""Gangs: pods that are of use together only, and when the room that is reserved for one of them is given up.

kube-scheduler 1.36 tries the pods of a PodGroup one after the other, in one cycle (pkg/scheduler/schedule_one_podgroup.go). A pod that is refused
does not end the cycle. After the last pod either at least minCount pods have a node, and all that have one are bound; or none is bound, and all
are tried again: after a back-off, or at once where nothing else waits (feature gate SchedulerPopFromBackoffQ, on by default). An extender is told
neither how a cycle ended nor of a pod that kube-scheduler's own filters refused. So it counts.

A pod of a gang counts
    bound                 always
    not bound, with a request of ours     if room is reserved for it, or if filter left the choice of its node to kube-scheduler
    not bound, without a request of ours  always at the end of a cycle; later unless kube-scheduler says that it is unschedulable, and unless the gang
                                          was tried again though it seemed to be scheduled

A pod for which room is reserved is tried again only if its cycle failed, whatever was counted. While fewer than minCount pods are bound, that ends
the gang's reservations as well.

Reservations of a gang's pods that are not bound end when fewer than minCount count
    at the end of its cycle    kube-scheduler never tries two groups at a time, nor a pod twice in a cycle. So the cycle is over when filter is called
                               for a pod of no group or of another one, or for a pod for which it was called before the last one. (For one pod it
                               may be called twice in a row: with its nominated node, and with all nodes.)
    `QUIET_S` after its last call. If the cycle goes on after that, the rest of the gang is refused (`vgpu.pauses`)
    when one of its pods that is not bound is deleted

A gang may fit and one of its pods fail on its way to be bound, for a volume say. kube-scheduler then tries that pod again, and binds the others
whatever becomes of it. That the gang has fitted the PodGroup's condition says, the first time. Pods that had room then are in flight until
they are bound or tried again: their reservations do not end with the gang's.

Pure: a group is a text, the caller says what time it is and for which pods room is reserved. A group without a minCount (policy Basic, or not
known) is no gang: nothing here ends its reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from vgpu.pauses import LONGEST_S, Pauses

QUIET_S: Final = 2.0
"""Without a call about a gang, its cycle is over. Specified; calls of one cycle follow each other within milliseconds."""

Standing = Literal["bound", "waits", "asks nothing", "unschedulable"]
"""What the watch shows of a pod. `waits`: it is not bound, and requests something of ours. Else it requests nothing of ours, and is
`unschedulable` if kube-scheduler says so."""

Reserved = Callable[[str], bool]
"""Is room reserved for the pod of this UID?"""


@dataclass(frozen=True, slots=True)
class Failed:
    """A gang that is not scheduled."""

    group: str
    uids: tuple[str, ...]
    """All of its pods but those in flight, with one that is gone now: reservations of those that are not bound end."""
    others_wait: bool
    """Was a pod of no group, or of another one, refused since the gang's first call?"""


@dataclass(slots=True)
class _Attempt:
    """The calls about one group, with no quiet between them."""

    last_s: float
    called: dict[str, bool] = field(default_factory=dict)
    """UIDs of this cycle, in order -> does the pod count without a reservation?"""
    others_wait: bool = False
    quiet: bool = False
    """Was it quiet since the last call, when no room was reserved? Then nothing ended, and the cycle may go on."""


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
        self._pauses = Pauses(QUIET_S)

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
            self._forget(group)
        else:
            self._min_count[group] = pods

    def fitted(self, group: str, reserved: Reserved) -> None:
        """kube-scheduler says for the first time that the group is scheduled: it binds those that have a node."""
        found = {uid for uid, standing in self._pods.get(group, {}).items() if standing == "waits" and reserved(uid)}
        if found and group in self._min_count:
            self._in_flight[group] = found

    def see(self, uid: str, group: str, standing: Standing) -> None:
        """A pod of a group came or changed. A pod never changes its group."""
        if standing == "bound" and self._pods.get(group, {}).get(uid) != "bound":
            self._doubted.discard(group)
            self._pauses.bound(group)
            self._land(uid, group)
        self._group[uid] = group
        self._pods.setdefault(group, {})[uid] = standing

    def gone(self, uid: str, reserved: Reserved) -> Failed | None:
        """A pod is deleted, or has ended. Its gang fails if it was not bound and too few of the others count."""
        group = self._group.pop(uid, None)
        if group is None:
            return None
        self._land(uid, group)
        uids, standing = self._failing(group), self._pods[group].pop(uid)
        if not self._pods[group]:
            del self._pods[group]
            self._forget(group)
        attempt = self._attempts.get(group)
        if attempt is not None:
            attempt.called.pop(uid, None)
        if standing == "bound" or group not in self._min_count:
            return None
        if self._count(group, reserved, cycle_ended_now=False) >= self._min_count[group]:
            return None
        return Failed(group, uids, others_wait=True)

    def refusal_shown(self, uid: str, group: str) -> None:
        """kube-scheduler says that the pod is unschedulable because `refuses` said so."""
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
        self._pauses.forget(group)

    # --- what kube-scheduler calls ---

    def refuses(self, uid: str, group: str, at_s: float) -> bool:
        """kube-scheduler calls filter for a pod of this group (empty: of none). Is it to be refused, whatever room there is?

        Then nothing else is to be told of the call, but for the answer.
        """
        return self._pauses.refuses(uid, group, at_s)

    def quiet_s(self, group: str) -> float:
        """Without a call for so long a cycle of this group seems to be over. Longer after each cycle in which `refuses` refused, up to a limit."""
        return self._pauses.quiet_s(group)

    def wakes(self) -> bool:
        """Since the last time that this was called, may pods have come to be tried again that were refused?"""
        return self._pauses.wakes()

    def next_pod(self, uid: str, group: str, reserved: Reserved, *, again: bool = False) -> list[Failed]:
        """kube-scheduler calls filter for a pod of this group (empty: of none). Which gangs' cycles ended now, and without success?

        `again`: room is reserved for the pod since an earlier call, and no bind call has come.
        """
        (before, last), self._last = self._last, (group, uid)
        found, in_flight = [], self._land(uid, group)
        if again and not in_flight and self._lacks_bound(group):
            self._doubted.add(group)
            uids, attempt = self._failing(group), self._attempts.pop(group, None)
            found.append(Failed(group, uids, others_wait=attempt is None or attempt.others_wait))
        if before != group:
            found += self._cycle_ended(before, reserved)
        elif uid != last and group in self._attempts and uid in self._attempts[group].called:
            found += self._cycle_ended(group, reserved)
            if group in self._attempts:
                self._attempts[group].called.clear()
        return found

    def _lacks_bound(self, group: str) -> bool:
        """Are fewer than minCount of its pods bound?"""
        bound = sum(standing == "bound" for standing in self._pods.get(group, {}).values())
        return bound < self._min_count.get(group, 0)

    def _cycle_ended(self, group: str, reserved: Reserved) -> list[Failed]:
        """Not judged where the watch shows fewer than minCount pods: kube-scheduler knew of that many, so the watch is behind."""
        if group not in self._attempts or len(self._pods.get(group, ())) < self._min_count.get(group, 0):
            return []
        failed = self._judge(group, reserved, cycle_ended_now=True) if group in self._min_count else None
        return [failed] if failed is not None else []

    def called(self, uid: str, group: str, at_s: float) -> None:
        """kube-scheduler calls about this pod. A call that takes a while is told of with the time until which it may take."""
        if group in self._pauses:
            return  # it was refused, and is of no attempt that counts
        attempt = self._attempts.setdefault(group, _Attempt(at_s))
        attempt.last_s, attempt.quiet = at_s, False
        attempt.called.setdefault(uid, False)

    def answered(self, uid: str, group: str, *, fits: bool, reserved: bool) -> None:
        """Filter answered for a pod of this group (empty: of none)."""
        attempt = self._attempts.get(group)
        if attempt is not None:
            attempt.called[uid] = fits and not reserved
        if not fits:
            for other, waiting in self._attempts.items():
                waiting.others_wait = waiting.others_wait or other != group

    def quiet(self, now_s: float, reserved: Reserved) -> Iterator[Failed]:
        """Gangs without a call for `QUIET_S`, or for as long as slow ones are given, that are not scheduled. End their reservations before the next call."""
        self._pauses.expire(now_s)
        for group, attempt in [item for item in self._attempts.items() if now_s >= self._over_s(*item)]:
            failed = self._judge(group, reserved, cycle_ended_now=False) if group in self._min_count else None
            self._attempts.pop(group, None)
            if failed is None or attempt.quiet:
                continue
            lost = {uid for uid in failed.uids if reserved(uid)}
            if not lost:
                attempt.quiet = True
                self._attempts[group] = attempt
                continue
            before, last = self._last
            if before == group and not lost.isdisjoint(attempt.called):
                self._pauses.begin(group, (*attempt.called, last), last, attempt.last_s)
            yield failed

    def _over_s(self, group: str, attempt: _Attempt) -> float:
        """From when on nothing more is to come of an attempt."""
        return attempt.last_s + (LONGEST_S if attempt.quiet else self._pauses.quiet_s(group))

    def _judge(self, group: str, reserved: Reserved, *, cycle_ended_now: bool) -> Failed | None:
        if self._count(group, reserved, cycle_ended_now=cycle_ended_now) >= self._min_count[group]:
            return None
        uids, attempt = self._failing(group), self._attempts.pop(group)
        return Failed(group, uids, attempt.others_wait)

    def _count(self, group: str, reserved: Reserved, *, cycle_ended_now: bool) -> int:
        """Pods of it that count."""
        attempt, shown = self._attempts.get(group), self._pods.get(group, {})
        called = attempt.called if attempt is not None else {}
        trusted, count = cycle_ended_now or group not in self._doubted, 0
        for uid in self._uids(group):
            standing = shown.get(uid, "waits")
            count += (
                standing == "bound"
                or (standing == "asks nothing" and trusted)
                or (standing == "unschedulable" and cycle_ended_now)
                or (standing == "waits" and (reserved(uid) or called.get(uid, False)))
            )
        return count

    def _failing(self, group: str) -> tuple[str, ...]:
        """Those of its pods that are not in flight."""
        in_flight = self._in_flight.get(group, ())
        return tuple(uid for uid in self._uids(group) if uid not in in_flight)

    def _uids(self, group: str) -> tuple[str, ...]:
        """Of its pods: those that the watch shows, and those that kube-scheduler called about."""
        attempt = self._attempts.get(group)
        return tuple(dict.fromkeys((*self._pods.get(group, ()), *(attempt.called if attempt is not None else ()))))
