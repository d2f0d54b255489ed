"""When a gang fails, the obvious slow way: every event is kept, and all are read again each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from vgpu.scheduling.gang_facts import Standing
from vgpu.scheduling.gang_pauses import LONGEST_QUIET_S
from vgpu.scheduling.gangs import GAP_S, QUIET_S, YIELD_S

GROUPS = ("g", "h")
MARK = "|"
UIDS = [f"{group}{at}" for group in GROUPS for at in range(4)]
"""The first letter is the group; a pod `p` has none."""


@dataclass
class FilterCall:
    """About a pod, in the cycle that is under way or has just ended."""

    uid: str
    at_s: float
    listed: bool = False


@dataclass
class SlowGangs:
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
    cycle: list[FilterCall] = field(default_factory=list)
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
    """Until when a gang yields."""
    refused_lately: set[str] = field(default_factory=set)
    """Pods that were refused since one of another group was called for."""
    quiet: set[str] = field(default_factory=set)
    """Groups that had nothing to lose when it was quiet."""

    def failing(self, group: str) -> set[str]:
        return self.pods(group) - self.in_flight - self.expected

    def run(self, group: str) -> list[str]:
        """UIDs of the last calls of a group that are of one cycle, as far as is known."""
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
        self.refused_lately = {one for one in self.refused_lately if one[0] == group}
        refused = self.is_refused(uid, group, now_s)
        self.refused_lately |= {uid} if refused else set()
        return refused

    def is_refused(self, uid: str, group: str, now_s: float) -> bool:
        for other in [one for one in self.last_s if one != group]:
            self.over_s.setdefault(other, now_s)
        called = any(one.uid == uid for one in self.cycle)
        bound = sum(one[0] == group and standing == "bound" for one, standing in self.shown.items())
        waits = group in self.over_s and self.others_wait[group] and group not in self.quiet
        if called and waits and bound < self.min_count.get(group, 0):
            self.way_s.setdefault(group, now_s + YIELD_S)
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
            case "requests nothing":
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
