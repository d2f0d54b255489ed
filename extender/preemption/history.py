"""Nobody is evicted again and again: a pod is spared for a while after it was preempted so many times.

A pod that comes back under its own name (of a StatefulSet, or made by hand) is known by it. Others come back under new names: they
are counted together by their controller, which may lose as many times more as it has pods.

Each preemption is known by the UID of the pod that went, so that what several extenders saw of it, and what is read back (`remembered`),
counts once. `clock` is that of the wall, in seconds: what is remembered outlives a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kube.objects import Pod

TIMES: Final = 3
"""Preemptions of a pod within `PERIOD_S`. Guessed."""
PERIOD_S: Final = 3600.0

REMEMBERED: Final = 4096
"""Pods and controllers; the ones that were not preempted for longest are forgotten. Guessed."""
MOST_EACH: Final = 1024
"""Preemptions of one pod or controller that are remembered, the last ones; a controller that had so many is spared. Guessed."""
MOST_TOGETHER: Final = 32_768
"""Preemptions remembered: some 10 MB. Guessed."""
MOST_BYTES: Final = 500_000
"""Written down: those preempted last, less those too long to be written beside them. A ConfigMap takes 1 MiB."""
ENTRY: Final = 16
"""Bytes beside a name: quotes, colon, comma and time."""

Preempted = dict[str, dict[str, int]]
"""Identity -> UID of the pod that went -> when, in seconds since 1970."""

_READ: Final = msgspec.json.Decoder(Preempted)


def identity(pod: Pod) -> str:
    """What a pod has in common with the one that takes its place."""
    owner = next((one for one in pod.metadata.owner_references if one.controller), None)
    return pod.key if owner is None or owner.kind == "StatefulSet" else owner.uid


class PreemptionHistory:
    """Who was preempted lately."""

    def __init__(self, clock: Callable[[], float], *, times: int = TIMES, period_s: float = PERIOD_S) -> None:
        self._clock, self._times, self._period_s = clock, times, period_s
        self._when: dict[str, dict[str, float]] = {}
        self._together = 0
        self.tired = set[str]()
        """Identities that may be spared: no other is."""
        self.changes = 0
        """Preemptions seen by this extender itself: who writes them down looks whether there are more."""

    def __len__(self) -> int:
        """Preemptions that are remembered."""
        return self._together

    def preempted(self, pod: Pod) -> None:
        """It has just been evicted for another."""
        if self._note(identity(pod), {pod.uid: self._clock()}):
            self.changes += 1

    def protected(self, pod: Pod, alike: Callable[[str], int]) -> bool:
        """Has it had enough? `alike` says how many pods there are with an identity, and is asked only when it matters."""
        if not self._when:
            return False
        one = identity(pod)
        known = self._when.get(one)
        if not known:
            return False
        for uid in [uid for uid, at_s in known.items() if at_s <= self._clock() - self._period_s]:
            del known[uid]
            self._together -= 1
        if len(known) < self._times:
            self.tired.discard(one)
        return len(known) >= self._times and len(known) >= min(MOST_EACH, self._times * max(1, alike(one)))

    def written(self) -> bytes:
        """What is to be remembered over a restart."""
        since_s, size = self._clock() - self._period_s, 0
        kept: Preempted = {}
        for one, known in reversed(self._when.items()):
            lately = {uid: int(at_s) for uid, at_s in known.items() if at_s > since_s}
            takes = len(one) + ENTRY + sum(len(uid) + ENTRY for uid in lately)
            if size + takes <= MOST_BYTES:
                size += takes
                kept[one] = lately
        return msgspec.json.encode({one: kept[one] for one in reversed(kept) if kept[one]})

    def remembered(self, text: bytes | str) -> None:
        """Take in what an extender wrote down, this one or another. Raises MsgspecError where it cannot be read."""
        now_s = self._clock()
        for one, known in _READ.decode(text).items():
            self._note(
                one, {uid: float(min(at_s, now_s)) for uid, at_s in known.items() if at_s > now_s - self._period_s}
            )

    def _note(self, one: str, seen: Mapping[str, float]) -> bool:
        """Answers whether anything was new."""
        if not seen:
            return False
        known = self._when.pop(one, {})
        before = len(known)
        for uid, at_s in seen.items():
            known.setdefault(uid, at_s)
        new = len(known) > before
        if len(known) > MOST_EACH:
            known = {uid: known[uid] for uid in sorted(known, key=known.__getitem__)[-MOST_EACH:]}
        self._when[one] = known
        self._together += len(known) - before
        if len(known) >= self._times:
            self.tired.add(one)
        while len(self._when) > REMEMBERED or self._together > MOST_TOGETHER:
            oldest = next(iter(self._when))
            self._together -= len(self._when.pop(oldest))
            self.tired.discard(oldest)
        return new
