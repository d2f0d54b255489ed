"""Cycles of gangs that seem to be over and may go on: kube-scheduler pauses between two pods, and reservations of the first ones have ended.

If it then goes on and the others fit, it binds all of them, though another pod may have the capacity of the first ones by then. So the
others are refused until the cycle is seen to be over. A cycle is over when kube-scheduler calls
    for a pod of another gang, or of none: it never tries two at a time
    for a pod of the gang for which it called before the last call: it never tries a pod twice in a cycle
or when it reports that a refused pod is unschedulable: it writes that after the cycle. Otherwise after `LONGEST_S`.

A gang whose cycle did go on is given twice the pause from then on, up to `LONGEST_QUIET_S`, until one of its pods is bound. So one that is
slow at every try, because another extender takes seconds for a pod, is refused once and then scheduled. One whose pauses are longer than
`LONGEST_QUIET_S` is refused at every try, and the refusal must report that: see `GangRefusal`.

Pure, as `vgpu.scheduling.gangs`, which is its one caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

LONGEST_S: Final = 300.0
"""After the last call no pod is refused any more. As long as a reservation of a gang lives (`vgpu.scheduling.reservations`)."""

LONGEST_QUIET_S: Final = 60.0
"""Longest time for which a slow gang keeps its reservations after its last call: as long as a pod without a gang. kube-scheduler's own default for the answer
of an extender is 5 s (DefaultExtenderTimeout)."""


@dataclass(frozen=True, slots=True)
class GangRefusal:
    """Why the rest of a cycle is refused."""

    paused_s: float
    """For so long kube-scheduler paused."""
    number: int
    """Another one for each cycle."""


@dataclass(slots=True)
class _Open:
    """A cycle that may go on."""

    called: frozenset[str]
    """UIDs of the pods that were called for in it before the pause."""
    last: str
    """UID of the last call."""
    last_s: float
    number: int
    """Of all such cycles."""
    paused_s: float = 0.0
    """From the last call to the first that was refused."""
    refused: set[str] = field(default_factory=set)


class GangPauses:
    """By group. `quiet_s`: without a call for so long a cycle seems to be over."""

    def __init__(self, quiet_s: float) -> None:
        self._default_s = quiet_s
        self._open: dict[str, _Open] = {}
        self._quiet_s: dict[str, float] = {}
        self._refused_lately: dict[str, set[str]] = {}
        """UIDs that were refused, of the group that kube-scheduler called about last. If one of them is tried, a cycle has begun since."""
        self._wake = False
        self._begun = 0

    def __contains__(self, group: str) -> bool:
        """May a cycle of this group go on that seems to be over?"""
        return group in self._open

    def quiet_s(self, group: str) -> float:
        """Without a call for so long a cycle of this group seems to be over."""
        return self._quiet_s.get(group, self._default_s)

    def refusal(self, group: str) -> GangRefusal | None:
        """Why pods of this group are refused; None where none is."""
        one = self._open.get(group)
        return GangRefusal(one.paused_s, one.number) if one is not None and one.refused else None

    def begin(self, group: str, called: Iterable[str], last: str, last_s: float) -> None:
        """Reservations of this group end because it was quiet after the call for `last` at `last_s`. `called`: UIDs that are surely of that cycle."""
        self._begun += 1
        self._open[group] = _Open(frozenset(called) | {last}, last, last_s, self._begun)

    def refuses(self, uid: str, group: str, at_s: float) -> bool:
        """kube-scheduler calls filter for a pod of this group (empty: of none). Does an earlier cycle go on with it?"""
        self._end(lambda other, _: other != group)
        self._refused_lately = {group: self._refused_lately.get(group, set())}
        one = self._open.get(group)
        if one is None:
            return False
        before = one.called | one.refused
        if uid in before and (uid != one.last or before == {uid}):
            self._end(
                lambda other, _: other == group
            )  # pods refused last may be of this cycle already, which then fails
            return False
        if not one.refused:
            one.paused_s = at_s - one.last_s
            self._quiet_s[group] = min(LONGEST_QUIET_S, max(self.quiet_s(group), 2 * one.paused_s))
        one.refused.add(uid)
        one.last = uid
        self.turn_away(uid, group)
        return True

    def turn_away(self, uid: str, group: str) -> None:
        """The pod is refused, here or elsewhere."""
        self._refused_lately = {group: self._refused_lately.get(group, set()) | {uid}}

    def comes_back(self, uid: str, group: str) -> bool:
        """The pod is tried. Was it refused since a pod of others was tried? Answered once for each group."""
        back = uid in self._refused_lately.get(group, ())
        if back:
            del self._refused_lately[group]
        return back

    def refusal_shown(self, uid: str, group: str) -> None:
        """kube-scheduler reports that the pod is unschedulable because it was refused here."""
        self._end(lambda other, one: other == group and uid in one.refused)

    def expire(self, now_s: float) -> None:
        """End refusals that have lasted long enough: no pod is refused for ever."""
        self._end(lambda _, one: now_s >= one.last_s + LONGEST_S)

    def bound(self, group: str) -> None:
        """A pod of it is."""
        self._quiet_s.pop(group, None)

    def forget(self, group: str) -> None:
        """It is no gang, or has no pods any more."""
        self._end(lambda other, _: other == group)
        self._quiet_s.pop(group, None)
        self._refused_lately.pop(group, None)

    def wakes(self) -> bool:
        """Since the last time that this was called, did a cycle end whose refused pods no event would retry?"""
        wake, self._wake = self._wake, False
        return wake

    def _end(self, over: Callable[[str, _Open], bool]) -> None:
        for group in [group for group, one in self._open.items() if over(group, one)]:
            self._wake |= bool(self._open.pop(group).refused)
