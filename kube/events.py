"""Report to users what happened to their objects: Events in the group events.k8s.io/v1.

Recording never waits and never fails: an Event is put in a queue that `run` empties. The same Event recorded again within
`SERIES_S` becomes a count on the first Event, and an object with too many Events gets no more for a while.
What happens to an object again and again, with a note that differs each time, is a series: it is counted on the first Event, which keeps its
note (the API does not let it change), and the count is written when it has doubled, so that it costs ten writes in ten minutes.
What was dropped is counted. Does not decide when to report something.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import structlog

from kube import paths
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Node, Pod, Slim
from kube.patch import merge

SERIES_S: Final = 600.0
"""The same note within this time is counted on the Event that exists. As in client-go."""
BURST: Final = 25
"""Events about one object before it is slowed down. As in client-go."""
REFILL_S: Final = 300.0
"""Afterwards one Event in this time. As in client-go."""
QUEUE: Final = 1000
"""Events waiting to be written. Guessed."""
OBJECTS: Final = 4096
"""Objects and series remembered; the oldest are forgotten. As in client-go."""
NOTE_LIMIT: Final = 1024
"""Characters of a note. Specified by the API."""

Kind = Literal["Normal", "Warning"]

log = structlog.get_logger("kube.events")


class ObjectReference(Slim, frozen=True):
    """What an Event is about."""

    api_version: str = "v1"
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    field_path: str = ""


def about(thing: Pod | Node, container: str = "") -> ObjectReference:
    """The reference to a pod (or one of its containers) or a node, also where a program decodes more of a pod than `Pod` has."""
    kind = "Pod" if isinstance(thing, Pod) else "Node"
    meta = thing.metadata
    field = f"spec.containers{{{container}}}" if container else ""
    return ObjectReference("v1", kind, meta.namespace, meta.name, meta.uid, "", field)


@dataclass(frozen=True, slots=True)
class EventStatistics:
    """Events since the recorder began."""

    written: int
    counted: int
    """Added to the count of an Event that existed."""
    dropped: int
    """Not written: too many about one object, a full queue, or the API refused."""


@dataclass(frozen=True, slots=True)
class _Notice:
    """One thing to write."""

    regarding: ObjectReference
    reason: str
    note: str
    kind: Kind
    action: str
    series: str

    @property
    def key(self) -> _Key:
        """What is the same with this is counted."""
        return self.regarding, self.reason, self.kind, self.series, "" if self.series else self.note


_Key = tuple[ObjectReference, str, Kind, str, str]


@dataclass(slots=True)
class _Series:
    name: str
    began_at: float
    count: int = 1


@dataclass(slots=True)
class _Allowance:
    tokens: float
    at: float


class Recorder:
    """Writes Events as `component`, from `instance` (a pod or node name)."""

    def __init__(
        self,
        client: Client,
        component: str,
        instance: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client, self._component, self._instance = client, component, instance
        self._clock, self._now = clock, now
        self._queue: asyncio.Queue[_Notice] = asyncio.Queue(QUEUE)
        self._series: OrderedDict[_Key, _Series] = OrderedDict()
        self._allowances: OrderedDict[ObjectReference, _Allowance] = OrderedDict()
        self._written = self._counted = self._dropped = 0
        self._number = 0

    def event(
        self,
        regarding: ObjectReference,
        reason: str,
        note: str,
        type: Kind = "Normal",  # noqa: A002 - the API's own word
        *,
        action: str = "",
        series: str = "",
    ) -> None:
        """Record that `reason` (CamelCase, constant) happened to `regarding`; `note` is the sentence for the user. What has the same `series`, if
        any, is counted on the first Event whatever its note."""
        try:
            self._queue.put_nowait(_Notice(regarding, reason, note[:NOTE_LIMIT], type, action or reason, series))
        except asyncio.QueueFull:
            self._dropped += 1

    def statistics(self) -> EventStatistics:
        """Counters for metrics."""
        return EventStatistics(self._written, self._counted, self._dropped)

    async def run(self) -> None:
        """Write what is queued until cancelled."""
        while True:
            notice = await self._queue.get()
            try:
                await self._write(notice)
            except ApiError as error:
                self._dropped += 1
                log.warning(
                    "an Event was not written", reason=notice.reason, object=notice.regarding.name, error=str(error)
                )
            finally:
                self._queue.task_done()

    async def flush(self) -> None:
        """Return when all that was queued is written or dropped. For tests and orderly ends."""
        await self._queue.join()

    async def _write(self, notice: _Notice) -> None:
        series = self._series.get(notice.key)
        if series is not None and self._clock() - series.began_at >= SERIES_S:
            series = None
        if series is not None:
            series.count += 1
            if notice.series and series.count & (series.count - 1):
                self._counted += 1
                return
        if not self._allowed(notice.regarding):
            self._dropped += 1
            return
        namespace = notice.regarding.namespace or "default"
        if series is not None:
            change = {"series": {"count": series.count, "lastObservedTime": self._micro_time()}}
            try:
                await merge(self._client, paths.events(namespace, series.name), change)
            except ApiError as error:
                if not error.not_found:
                    raise
            else:
                self._counted += 1
                return
        await self._create(notice, namespace)

    async def _create(self, notice: _Notice, namespace: str) -> None:
        self._number += 1
        name = f"{notice.regarding.name[:200]}.{time.time_ns():x}{self._number:x}"
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": self._micro_time(), "action": notice.action, "reason": notice.reason, "note": notice.note, "type": notice.kind,
            "reportingController": self._component, "reportingInstance": self._instance[:128],
            "regarding": notice.regarding,
        }  # fmt: skip
        await self._client.send("POST", paths.events(namespace), body)
        self._written += 1
        self._series[notice.key] = _Series(name, self._clock())
        self._series.move_to_end(notice.key)
        while len(self._series) > OBJECTS:
            self._series.popitem(last=False)

    def _allowed(self, regarding: ObjectReference) -> bool:
        now = self._clock()
        has = self._allowances.setdefault(regarding, _Allowance(BURST, now))
        self._allowances.move_to_end(regarding)
        while len(self._allowances) > OBJECTS:
            self._allowances.popitem(last=False)
        has.tokens = min(float(BURST), has.tokens + (now - has.at) / REFILL_S)
        has.at = now
        if has.tokens < 1:
            return False
        has.tokens -= 1
        return True

    def _micro_time(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
