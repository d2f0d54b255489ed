"""Two conditions in a pod's status, as long as they hold: its memory cannot come back, or it is over its memory limit.

An Event is gone after an hour; a condition stays, and `kubectl wait --for=condition=...` waits for it. It is set where the arbiter's status shows the state, and set
to False when the status has not shown it for a while. Both are decided from the pod as the watch has it, so a plugin that starts anew goes on where
it was. The kubelet leaves conditions of others alone.

The right to write the status of pods is narrowed by the admission policy `conditions`; without it this does nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import structlog

from deviceplugin.pods.limit_violations import STRANDED, LimitViolation
from kube import paths
from kube.client import STRATEGIC_PATCH
from kube.errors import ApiError
from kube.objects import Condition, Pod
from vgpu.api.names import Names

LINGER_S: Final = 30.0
"""After the status showed the state last, until the condition is False. So one that comes and goes with each reading is written twice a minute at most.
Guessed."""
LAG_S: Final = 30.0
"""So long the watch may lag behind our own write. Guessed."""
RETRY_S: Final = 10.0
"""After an attempt that failed. Guessed."""
REFUSED_S: Final = 600.0
"""After one that the API server refused, as where the rights are missing. Guessed."""
MESSAGE_LIMIT: Final = 1024
"""Characters. Kubernetes allows more; Events have as many."""
OVER: Final = "Resolved"
"""Reason of a condition that is False."""
_REFUSALS: Final = (403, 405, 415, 422)
"""Not 401: the token was just rotated, and the next attempt reads the new one."""

log = structlog.get_logger("deviceplugin.pods.conditions")


@dataclass(frozen=True, slots=True)
class Violated:
    """What the status shows of a pod for one type of condition."""

    reason: str
    message: str


def violated(found: Iterable[LimitViolation], names: Names) -> dict[str, dict[str, Violated]]:
    """Pod UID -> type -> what it is about: of several containers the first, and how many more there are."""
    by_pod: dict[str, dict[str, list[LimitViolation]]] = {}
    for one in found:
        kind = names.memory_stranded if one.reason == STRANDED else names.memory_over_limit
        by_pod.setdefault(one.uid, {}).setdefault(kind, []).append(one)
    return {uid: {kind: _of(several) for kind, several in kinds.items()} for uid, kinds in by_pod.items()}


def _of(several: list[LimitViolation]) -> Violated:
    more = len({one.container for one in several}) - 1
    note = several[0].note + (f"; and {more} more containers of the pod" if more else "")
    return Violated(several[0].reason, note[:MESSAGE_LIMIT])


def due(
    conditions: Iterable[Condition], now: Mapping[str, Violated], lingering: Collection[str], types: Iterable[str]
) -> Iterator[Condition]:
    """What is to be written of a pod. `conditions`: as it has them; `lingering`: types that hold still, though the status shows them no more."""
    status = {one.type: one.status for one in conditions}
    for kind in types:
        if kind in now and status.get(kind) != "True":
            yield Condition(kind, "True", now[kind].reason, now[kind].message)
        elif kind not in now and kind not in lingering and status.get(kind) == "True":
            yield Condition(kind, "False", OVER, "")


class Sender(Protocol):
    """The API server, as far as this module uses it."""

    async def send(self, method: str, path: str, body: object = None, *, content_type: str) -> bytes:
        """Raises ApiError."""


class PodConditions:
    """Writes the conditions of this node's pods. `pods`: UID -> each, as the watch has them."""

    def __init__(
        self,
        client: Sender,
        pods: Callable[[], Mapping[str, Pod]],
        names: Names,
        *,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client, self._pods, self._names, self._clock, self._today = client, pods, names, clock, today
        self._types = (names.memory_stranded, names.memory_over_limit)
        self._now: dict[str, dict[str, Violated]] = {}
        self._last_s: dict[tuple[str, str], float] = {}
        """(UID, type) -> when the status showed it last."""
        self._written: dict[tuple[str, str], tuple[str, float]] = {}
        """(UID, type) -> status that was written, and when: the watch may lag."""
        self._again_s: dict[str, float] = {}
        """UID -> no attempt before then."""
        self._news = asyncio.Event()

    def follow(self, found: Iterable[LimitViolation]) -> None:
        """All that the status shows now."""
        self._now, now_s = violated(found, self._names), self._clock()
        self._last_s |= {(uid, kind): now_s for uid, kinds in self._now.items() for kind in kinds}
        self._news.set()

    async def run(self) -> None:
        """Until cancelled. Nothing is written before the status was read once."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.once()

    async def once(self) -> None:
        """Write what is due. Never raises for what the API server answers."""
        pods = dict(self._pods())
        self._forget(pods.keys())
        for uid, pod in pods.items():
            if pod.finished or self._again_s.get(uid, 0.0) > self._clock():
                continue
            if changes := tuple(self._due(pod)):
                await self._write(pod, changes)

    def _due(self, pod: Pod) -> Iterator[Condition]:
        now_s = self._clock()
        lingering = [kind for kind in self._types if now_s - self._last_s.get((pod.uid, kind), -LINGER_S) < LINGER_S]
        written = [
            Condition(kind, status)
            for kind in self._types
            for status, at_s in [self._written.get((pod.uid, kind), ("", 0.0))]
            if status and now_s - at_s < LAG_S
        ]
        return due((*pod.status.conditions, *written), self._now.get(pod.uid, {}), lingering, self._types)

    async def _write(self, pod: Pod, changes: tuple[Condition, ...]) -> None:
        meta, at = pod.metadata, self._today().strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions: list[dict[str, Any]] = [
            {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message, "lastTransitionTime": at}
            for c in changes
        ]
        change = {"metadata": {"uid": meta.uid}, "status": {"conditions": conditions}}
        path = paths.pod(meta.namespace, meta.name, "status")
        try:
            await self._client.send("PATCH", path, change, content_type=STRATEGIC_PATCH)
        except ApiError as error:
            if not (error.not_found or error.conflict):  # gone, or another pod has its name
                log.warning("a pod's condition is not written", pod=pod.key, uid=pod.uid, error=str(error))
            wait_s = REFUSED_S if error.status in _REFUSALS else RETRY_S
            self._again_s[pod.uid] = self._clock() + wait_s
            return
        now_s = self._clock()
        for one in changes:
            self._written[pod.uid, one.type] = one.status, now_s
            log.info("condition written", pod=pod.key, uid=pod.uid, type=one.type, status=one.status)

    def _forget(self, alive: Collection[str]) -> None:
        self._last_s = {key: at_s for key, at_s in self._last_s.items() if key[0] in alive}
        self._written = {key: what for key, what in self._written.items() if key[0] in alive}
        self._again_s = {uid: at_s for uid, at_s in self._again_s.items() if uid in alive}
