"""A copy of one kind of object, kept in step with the API server: list once, then watch.

    async def main():
        pods = Cache(client, PODS, Pod, on_change=changed)
        async with asyncio.TaskGroup() as group:
            group.create_task(pods.run())
            await pods.has_synced.wait()
            pods.get("default/a")

`on_change(old, new)` is called in the order of the events, in the event loop that runs the cache; `None` stands for "is not there". An
object that was deleted and made again under its name while the watch was down is reported as both. A callback that raises is logged and
counted, and the cache goes on; it is called again for that object, at the object's next event or after a wait that doubles, until it returns.

When to list again: the server reports that our version is gone, or a line of the watch cannot be read. An object that does not
decode is kept as it was last known, and its key stands in `unknown` until it decodes or goes. The content of objects does not matter here.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from kube.client import JSON, METADATA, METADATA_LIST, Client
from kube.documents import EVENTS, THERE, Anonymous, ListPage
from kube.errors import ApiError
from kube.objects import key_of
from kube.pending_calls import DEPARTURES, Keyed, PendingCalls, pending_steps, steps
from vgpu.api.back_off import BackOff

PAGE: Final = 500
"""Objects a list call requests at once, as kubectl does: pages bound the server's memory and ours."""

WATCH_TIMEOUT_S: Final = (240, 480)
"""A watch ends by itself after a random time in this range, as in client-go, so that connections spread over API servers."""

BACKOFF_S: Final = (0.2, 30.0)
"""First and longest wait after a failure; doubled each time, and each wait is cut by up to a half at random."""

ROUNDS: Final = 4
"""Of the event loop. In the first it may run what waits before it reads sockets (uvloop), in the next it reads, then the watch is told of a line and applies it.
What arrived before is applied after these (tested on both loops)."""

log = structlog.get_logger("kube.cache")

T = TypeVar("T", bound=Keyed)
Found = TypeVar("Found")


class _RelistError(Exception):
    """The watch cannot be followed any further."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache has seen since it began. Counts never go down, except `objects`, `unknown` and `unreported`."""

    objects: int
    unknown: int
    synced: bool
    lists: int
    watches: int
    events: int
    bookmarks: int
    relists: Mapping[str, int]
    """Why the cache listed again: `gone`, `undecodable`, `error`."""
    undecodable: int
    callback_errors: int
    unreported: int
    """Objects of whose last change the callback raised: it is called again."""
    failures: int
    age_s: float
    """Since anything was last received from the API server; infinite before the first answer."""


class Cache(Generic[T]):
    """See the module. `path` is a collection, such as `/api/v1/pods`; `shrink` may drop what the user of the cache never reads;
    with `metadata_only` the API server sends nothing but the metadata of each object."""

    def __init__(
        self,
        client: Client,
        path: str,
        kind: type[T],
        *,
        on_change: Callable[[T | None, T | None], None] | None = None,
        label_selector: str = "",
        field_selector: str = "",
        shrink: Callable[[T], T] | None = None,
        metadata_only: bool = False,
        page: int = PAGE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.path = path
        self.has_synced = asyncio.Event()
        self.unknown: dict[str, str] = {}
        """Key -> why this object could not be decoded. `get` answers what was last known of it, if anything."""
        self._client, self._on_change, self._shrink, self._page = client, on_change, shrink, page
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._decoder = msgspec.json.Decoder(kind)
        self._accept_list, self._accept = (METADATA_LIST, METADATA) if metadata_only else (JSON, JSON)
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._selectors = {name: value for name, value in selectors.items() if value}
        self._items: dict[str, T] = {}
        self._version = ""
        self.heard_s = float("-inf")
        """When anything was last received from the API server, by `clock`."""
        self.listed_s = float("-inf")
        """When the last complete list began: what was in the API by then has been reported, or is in `unknown`."""
        self._back_off = BackOff(*BACKOFF_S, jitter)
        self._pausing: asyncio.Event | None = None
        """Set to end the wait after a failure; None while there is no such wait."""
        self._changed = asyncio.Event()
        self._pending: dict[str, PendingCalls[T]] = {}
        self._owes = asyncio.Event()
        self._relists: dict[str, int] = {}
        self._lists = self._watches = self._events = self._bookmarks = 0
        self._undecodable = self._callback_errors = self._failures = 0

    def get(self, key: str) -> T | None:
        """The object as last seen. Keys are `namespace/name`, or `name` where there are no namespaces."""
        return self._items.get(key)

    def has(self, key: str, uid: str) -> bool:
        """Is there such an object, as far as is known? One that does not decode may be it."""
        found = self._items.get(key)
        return key in self.unknown or (found is not None and found.metadata.uid == uid)

    def items(self) -> Iterator[T]:
        """All objects. Do not await while iterating."""
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    async def changed(self) -> None:
        """Return after the next change of any object."""
        await self._changed.wait()

    def catch_up(self) -> None:
        """Try the API server again now if this waits after a failure, and soon again if a try fails, also one in progress: a caller needs the
        current objects."""
        self._back_off.succeeded()
        if self._pausing is not None:
            self._pausing.set()

    async def changes_within(self, seconds: float) -> bool:
        """Return when so much time has passed and what had arrived by then is applied: did any object change meanwhile? With 0 seconds the event loop does
        not rest: on a machine with other load a rest of 1 ms was one of 5 ms in a tenth of all cases (measured)."""
        next_change = self._changed
        if seconds > 0:
            await asyncio.sleep(seconds)
        for _ in range(ROUNDS):
            if next_change.is_set():
                break
            await asyncio.sleep(0)
        return next_change.is_set()

    async def wait_for(self, found: Callable[[], Found | None], *, timeout_s: float) -> Found | None:
        """What `found` returns as soon as it is not None, called now and after each change; None when time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (item := found()) is None:
                    await self.changed()
                return item
        return found()

    def statistics(self) -> CacheStatistics:
        """Counters for metrics and for debugging."""
        return CacheStatistics(
            objects=len(self._items), unknown=len(self.unknown), synced=self.has_synced.is_set(),
            lists=self._lists, watches=self._watches, events=self._events, bookmarks=self._bookmarks,
            relists=dict(self._relists), undecodable=self._undecodable, callback_errors=self._callback_errors,
            unreported=len(self._pending), failures=self._failures, age_s=self._clock() - self.heard_s,
        )  # fmt: skip

    async def run(self) -> None:
        """Keep the copy in step until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_on())
            group.create_task(self._report_pending())

    async def _follow_on(self) -> None:
        while True:
            try:
                if not self._version:
                    await self._list()
                if not await self._watch():
                    await self._pause(self._back_off.failed())
            except _RelistError as reason:
                self._relist(str(reason))
                await self._pause(self._back_off.failed())
            except ApiError as error:
                self._failures += 1
                if error.gone:
                    self._relist("gone")
                log.warning(
                    "lost the API server", path=self.path, error=str(error), failed_in_a_row=self._back_off.failures
                )
                await self._pause(self._back_off.failed(error.retry_after_s))

    async def _pause(self, seconds: float) -> None:
        """After a failure, or until a caller needs the API server's answer (`catch_up`)."""
        self._pausing = asyncio.Event()
        sleep, needed = asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._pausing.wait())
        try:
            await asyncio.wait((sleep, needed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pausing = None
            sleep.cancel()
            needed.cancel()

    async def _list(self) -> None:
        """Read everything, report every difference, and take the version to watch from."""
        began_s, seen = self._clock(), set[str]()
        params = {**self._selectors, "limit": str(self._page)}
        coming = asyncio.create_task(self._read_page(params))
        try:
            while True:
                page = await coming
                if page.metadata.continue_:
                    coming = asyncio.create_task(self._read_page(params | {"continue": page.metadata.continue_}))
                    await asyncio.sleep(0)  # the API server makes the next page while this one is reported
                for raw in page.items or ():
                    seen.add(self._take(raw))
                if not page.metadata.continue_:
                    break
        finally:
            coming.cancel()
        for key in [key for key in (*self._items, *self.unknown) if key not in seen]:
            self._drop(key, self._items.get(key))
        self._version, self.listed_s = page.metadata.resource_version, began_s
        self._lists += 1
        self._back_off.succeeded()
        self.has_synced.set()
        self._report_waiters()

    async def _read_page(self, params: Mapping[str, str]) -> ListPage:
        body = await self._client.get(self.path, params, accept=self._accept_list)
        self._heard()
        try:
            return msgspec.json.decode(body, type=ListPage)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ApiError(0, "Undecodable", f"list cannot be read: {error}", verb="LIST", path=self.path) from error

    async def _watch(self) -> bool:
        """Follow changes until the server ends the watch. Returns whether it sent anything. Raises _RelistError and ApiError."""
        low, high = WATCH_TIMEOUT_S
        params = {
            **self._selectors, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": self._version,
            "timeoutSeconds": str(round(low + (high - low) * self._jitter())),
        }  # fmt: skip
        self._watches += 1
        reported = False
        async with aclosing(self._client.stream(self.path, params, accept=self._accept)) as lines:
            async for line in lines:
                self._heard()
                reported = True
                self._back_off.succeeded()
                self._follow(line)
        return reported

    def _follow(self, line: bytes) -> None:
        """One line of the watch."""
        try:
            event = EVENTS.decode(line)
            if event.type in THERE and (new := self._decoded(event.object)) is not None:
                self._version = new.metadata.resource_version or self._version
                self._events += 1
                self._keep(new)
                self._report_waiters()
                return
            about = msgspec.json.decode(event.object, type=Anonymous)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("a line of the watch cannot be read", path=self.path, error=str(error))
            raise _RelistError("undecodable") from error
        if event.type == "ERROR":
            raise ApiError(
                about.code, "Gone" if about.code == 410 else "Watch", about.message, verb="WATCH", path=self.path
            )
        self._version = about.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            self._bookmarks += 1
            return
        self._events += 1
        if event.type == "DELETED":
            key = key_of(about.metadata.namespace, about.metadata.name)
            self._drop(key, self._items.get(key))
        else:
            self._take(event.object)
        self._report_waiters()

    def _decoded(self, raw: msgspec.Raw) -> T | None:
        """The object, None where it cannot be decoded: `_take` then finds the reason."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return self._decoder.decode(raw)
        return None

    def _take(self, raw: msgspec.Raw) -> str:
        """Keep an object as it is now and report the change. Returns its key."""
        try:
            new = self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return self._take_unknown(raw, str(error))
        return self._keep(new)

    def _keep(self, new: T) -> str:
        key = new.metadata.key
        self.unknown.pop(key, None)
        if self._shrink:
            new = self._shrink(new)
        old = self._items.get(key)
        if old is not None and old.metadata.resource_version == new.metadata.resource_version != "":
            return key
        self._items[key] = new
        self._report(key, old, new)
        return key

    def _take_unknown(self, raw: msgspec.Raw, why: str) -> str:
        self._undecodable += 1
        try:
            meta = msgspec.json.decode(raw, type=Anonymous).metadata
            key = key_of(meta.namespace, meta.name)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            key = ""
        log.error("an object cannot be decoded; what was known of it stands", path=self.path, object=key, error=why)
        self.unknown[key] = why
        return key

    def _drop(self, key: str, old: T | None) -> None:
        self.unknown.pop(key, None)
        self._items.pop(key, None)
        if old is not None:
            self._report(key, old, None)

    def _report(self, key: str, old: T | None, new: T | None) -> None:
        """Report a change, and first what is pending of this object. Where the callback raises, this is pending from now on."""
        pending = self._pending.pop(key, None)
        tries = pending.tries if pending is not None else 0
        for before, now in steps(old, new) if pending is None else pending_steps(pending, new):
            if not self._called(before, now):
                self._pending[key] = PendingCalls(before, now, tries + 1)
                self._owes.set()
                return

    def _called(self, old: T | None, new: T | None) -> bool:
        if self._on_change is None:
            return True
        try:
            self._on_change(old, new)
        except Exception:  # a caller's mistake about one object must not stop the copy of all others
            self._callback_errors += 1
            kept = new if new is not None else old
            log.exception("on_change raised", path=self.path, object=kept.metadata.key if kept is not None else "")
            return False
        return True

    async def _report_pending(self) -> None:
        """Call the callback again for the objects on which it raised."""
        back_off = BackOff(*BACKOFF_S, self._jitter)
        while True:
            if not self._pending:
                self._owes.clear()
                await self._owes.wait()
                back_off.succeeded()
            await self._sleep(back_off.failed())
            for key in list(self._pending):
                self._report(key, None, self._items.get(key))
                pending = self._pending.get(key)
                if pending is not None and pending.tries >= DEPARTURES and key not in self._items:
                    del self._pending[key]
                    log.error(
                        "on_change kept raising for a deleted object and is not called again",
                        path=self.path,
                        object=key,
                    )
            self._report_waiters()

    def _report_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _heard(self) -> None:
        self.heard_s = self._clock()

    def _relist(self, reason: str) -> None:
        self._version = ""
        self._relists[reason] = self._relists.get(reason, 0) + 1
