"""The owner of a controller: what is above a Job, a JobSet or a RayCluster, read when it is first needed and cached for a while.

Of each controller only its metadata are read, one GET each, by a few readers at a time; kinds are not watched. What is waited for, known
and refused is bounded. `above` never waits: what it does not know yet it answers with `OwnerUnknown`, and has it read.

Knows nothing of queues, and decides nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum
from itertools import takewhile
from typing import Final

import msgspec
import structlog

from kube.client import METADATA, Client
from kube.errors import ApiError
from kube.objects import MetadataOnly, OwnerReference
from kube.paths import of_kind

READERS: Final = 4
"""GETs at a time. Guessed: some 500 controllers a second from an API server that is near."""

READ_S: Final = 5.0
"""For one GET. Guessed."""

AGAIN_S: Final = 30.0
"""From a GET that failed, or found another object under the name, to the next one. Guessed."""

AGE_S: Final = 600.0
"""A controller is read again after this: it may have another owner by then. Guessed."""

MOST_KNOWN: Final = 65_536
"""Controllers that are remembered, some 30 MiB; then the ones read longest ago are forgotten. Guessed."""

MOST_WAITING: Final = 4_096
"""Controllers that wait to be read, or to be read again after a failure; others are not noted, and are when they are requested again. Guessed."""

VERSION: Final = re.compile(r"v[0-9]{1,9}((alpha|beta)[0-9]{1,9})?")
"""Versions of an API, as Kubernetes names them: a path is made of it, and the creator of a pod writes it."""

LONGEST_NAME: Final = 253
LONGEST_UID: Final = 64
"""Characters of a name, as Kubernetes limits it, and of a UID: of an owner reference the API server limits neither."""

log = structlog.get_logger("extender.preemption.owners")


class OwnerUnknown(Enum):
    """Why the owner of a controller is not known."""

    YET = "not yet"
    """It is being read, or will be again."""
    EVER = "unknown kind"
    """It is of a kind that is not read at all."""


Above = OwnerReference | OwnerUnknown | None
"""The controller above one; None: there is none."""


_Key = tuple[str, str]
"""Namespace and UID. The creator of a pod writes the UID: with one of another namespace it proves nothing about that namespace's pods."""


class Controllers:
    """`resources` are those that may be read, as kubectl names them (`jobs.batch`, `pods`). `on_read` is called with each namespace in which
    a controller is known, or is not known any more."""

    def __init__(
        self,
        client: Client,
        resources: Iterable[str],
        clock: Callable[[], float],
        on_read: Callable[[str], object],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client, self._clock, self._on_read, self._sleep = client, clock, on_read, sleep
        self._resources = frozenset(resources)
        self._known: dict[_Key, tuple[float, OwnerReference | None]] = {}
        """When it was read, and whose it is; in the order of reading."""
        self._failed: dict[_Key, float] = {}
        """When reading it failed, in that order."""
        self._waiting: dict[_Key, OwnerReference] = {}
        self._reading = 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def waiting(self) -> int:
        """Controllers that wait to be read, those that are being read included."""
        return len(self._waiting) + self._reading

    @property
    def unreadable(self) -> int:
        """Controllers of which the last read failed."""
        return len(self._failed)

    def above(self, namespace: str, one: OwnerReference) -> Above:
        """The owner of this controller. If it is not known yet, it is read from now on."""
        key = namespace, one.uid
        known = self._known.get(key)
        if known is not None:
            return known[1]
        if self._resource(one) is None:
            return OwnerUnknown.EVER
        if key not in self._failed and len(self._waiting) < MOST_WAITING:
            self._waiting.setdefault(key, one)
            self._idle.clear()
            self._wake.set()
        return OwnerUnknown.YET

    async def settled(self, within_s: float) -> None:
        """Return when nothing waits to be read, or so much time has passed."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            log.info("controllers of pods are not all read yet", waiting=self.waiting)

    def expire(self) -> None:
        """Once a second: forget what is old."""
        now_s = self._clock()
        for key, _ in list(takewhile(lambda one: one[1] <= now_s - AGAIN_S, self._failed.items())):
            del self._failed[key]
        for key, _ in list(takewhile(lambda one: one[1][0] <= now_s - AGE_S, self._known.items())):
            del self._known[key]
            self._on_read(key[0])

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(READERS):
                group.create_task(self._read_on())

    async def _read_on(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            key = next(iter(self._waiting))
            one = self._waiting.pop(key)
            self._reading += 1
            try:
                await self._read(key, one)
            finally:
                self._reading -= 1
                if not self.waiting:
                    self._idle.set()

    async def _read(self, key: _Key, one: OwnerReference) -> None:
        resource = self._resource(one)
        if resource is None:
            return
        path = of_kind(one.api_version, resource, key[0], one.name)
        try:
            body = await self._client.get(path, timeout_s=READ_S, accept=METADATA)
            found = msgspec.json.decode(body, type=MetadataOnly).metadata
        except (ApiError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._fail(key, path, str(error))
            if isinstance(error, ApiError) and error.transient:
                await self._sleep(max(1.0, min(error.retry_after_s, AGAIN_S)))
            return
        if found.uid != one.uid:
            self._fail(key, path, "another object has its name")
            return
        self._failed.pop(key, None)
        self._known[key] = self._clock(), controller_of(found.owner_references)
        if len(self._known) > MOST_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._on_read(oldest[0])
        self._on_read(key[0])

    def _fail(self, key: _Key, path: str, why: str) -> None:
        log.warning("a controller cannot be read: its pods are not evicted", path=path[:300], error=why[:300])
        self._failed[key] = self._clock()
        if len(self._failed) > MOST_WAITING:
            del self._failed[next(iter(self._failed))]

    def _resource(self, one: OwnerReference) -> str | None:
        """The resource as which it is read; None if its kind is not read."""
        group, _, version = one.api_version.rpartition("/")
        if not (VERSION.fullmatch(version) and 0 < len(one.uid) <= LONGEST_UID and 0 < len(one.name) <= LONGEST_NAME):
            return None
        if one.name in (".", ".."):
            return None
        kind = one.kind.lower()
        for plural in (f"{kind}s", f"{kind}es", f"{kind[:-1]}ies"):
            if (f"{plural}.{group}" if group else plural) in self._resources:
                return plural
        return None


def controller_of(owners: Iterable[OwnerReference]) -> OwnerReference | None:
    """The one that an object is managed by, None when there is none."""
    return next((one for one in owners if one.controller), None)
