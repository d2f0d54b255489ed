"""The preemption history: a pod that was preempted too often lately is protected from eviction for a while.

A pod that comes back under its own name (of a StatefulSet, or without a controller) is identified by it. Others come back under new names:
they are counted together by their controller, which may lose as many times more as it has pods.

Each preemption is recorded by the UID of the evicted pod, so that it counts once, however many extenders saw it or read it back. `clock` is
the wall clock, in seconds, because the history outlives a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kube.objects import Pod

TIMES: Final = 3
"""Preemptions of a pod within `PERIOD_S`. Guessed."""
PERIOD_S: Final = 3600.0

MOST_IDENTITIES: Final = 4096
"""Pods and controllers; those preempted longest ago are forgotten. Guessed."""
MOST_EACH: Final = 1024
"""Preemptions of one pod or controller that are recorded, the last ones; a controller that had so many is protected. Guessed."""
MOST_TOGETHER: Final = 32_768
"""Preemptions recorded: some 10 MB. Guessed."""
MOST_BYTES: Final = 500_000
"""Of the text: those preempted last, without those too long to fit beside them. A ConfigMap takes 1 MiB."""
ENTRY: Final = 16
"""Bytes beside a name: quotes, colon, comma and time."""

Preempted = dict[str, dict[str, int]]
"""Identity -> UID of the evicted pod -> when, in seconds since 1970."""

_READ: Final = msgspec.json.Decoder(Preempted)


def identity(pod: Pod) -> str:
    """What a pod has in common with the one that replaces it."""
    owner = next((one for one in pod.metadata.owner_references if one.controller), None)
    return pod.key if owner is None or owner.kind == "StatefulSet" else owner.uid


class PreemptionHistory:
    """Preemptions of the last `period_s` seconds."""

    def __init__(self, clock: Callable[[], float], *, times: int = TIMES, period_s: float = PERIOD_S) -> None:
        self._clock, self._times, self._period_s = clock, times, period_s
        self._when: dict[str, dict[str, float]] = {}
        self._together = 0
        self.often_preempted = set[str]()
        """Identities that may be protected: no other is."""
        self.changes = 0
        """Preemptions seen by this extender itself: the store writes when there are more."""

    def __len__(self) -> int:
        """Preemptions that are recorded."""
        return self._together

    def preempted(self, pod: Pod) -> None:
        """It has just been evicted for another."""
        if self._note(identity(pod), {pod.uid: self._clock()}):
            self.changes += 1

    def protected(self, pod: Pod, replicas: Callable[[str], int]) -> bool:
        """Was it preempted too often to be evicted now? `replicas` counts the pods with an identity, and is called only if it matters."""
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
            self.often_preempted.discard(one)
        return len(known) >= self._times and len(known) >= min(MOST_EACH, self._times * max(1, replicas(one)))

    def to_json(self) -> bytes:
        """The history as it is stored over a restart."""
        since_s, size = self._clock() - self._period_s, 0
        kept: Preempted = {}
        for one, known in reversed(self._when.items()):
            lately = {uid: int(at_s) for uid, at_s in known.items() if at_s > since_s}
            takes = len(one) + ENTRY + sum(len(uid) + ENTRY for uid in lately)
            if size + takes <= MOST_BYTES:
                size += takes
                kept[one] = lately
        return msgspec.json.encode({one: kept[one] for one in reversed(kept) if kept[one]})

    def read_back(self, text: bytes | str) -> None:
        """Add what this extender or another has stored. Raises MsgspecError if it cannot be read."""
        now_s = self._clock()
        for one, known in _READ.decode(text).items():
            self._note(
                one, {uid: float(min(at_s, now_s)) for uid, at_s in known.items() if at_s > now_s - self._period_s}
            )

    def _note(self, one: str, seen: Mapping[str, float]) -> bool:
        """Returns whether anything was new."""
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
            self.often_preempted.add(one)
        while len(self._when) > MOST_IDENTITIES or self._together > MOST_TOGETHER:
            oldest = next(iter(self._when))
            self._together -= len(self._when.pop(oldest))
            self.often_preempted.discard(oldest)
        return new
