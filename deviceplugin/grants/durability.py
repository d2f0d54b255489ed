"""New grant directories on their way to the disk: Allocate begins the write, the start of the container waits for it.

The kubelet admits no other pod while it waits for Allocate, so Allocate does not wait for the disk. A kill of the plugin loses nothing: the
kernel has the directory. A loss of power may lose it until the write has ended, and then no process of the container has run. The
kubelet's own checkpoint names the directory by then only if it was written and committed in these milliseconds, on another disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from typing import Final

from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.grants.disk_thread import DiskThread, answered

LATER_S: Final = 1.0
"""A new directory's container starts within that time, usually: what can be done later is done then. Guessed."""


class Durability:
    """`sync_to_disk` writes one directory, by its key, and waits for the disk. It runs in one thread of its own: a disk that never answers
    occupies no thread of other work. What is `afterwards` runs in another one when probably no call waits; `until_idle` as
    `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self,
        sync_to_disk: Callable[[str], None],
        *afterwards: Callable[[], None],
        until_idle: Callable[[], Awaitable[None]] = without_waiting,
    ) -> None:
        self._sync_to_disk, self._until_idle = sync_to_disk, until_idle
        self.afterwards = [*afterwards]
        self._begun = False
        """Since `afterwards` ran last."""
        self._resting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._thread, self._later = DiskThread("durability"), DiskThread("afterwards")
        self._under_way: dict[str, Future[None]] = {}
        """By key. One that failed stays until it has ended well, or its directory is gone."""

    def begin(self, key: str) -> None:
        """Write this directory; the caller does not wait. Raises OSError when there can be no thread."""
        self._under_way = {other: writing for other, writing in self._under_way.items() if not _ended_well(writing)}
        self._under_way[key] = self._thread.begin_soon(self._sync_to_disk, key)
        self._begun = True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATER_S, self.rest)

    def rest(self) -> None:
        """Probably no call waits soon: run `afterwards` as soon as no call is in progress, if any write was begun since it ran."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._begun and (self._resting is None or self._resting.done()):
            self._resting = asyncio.create_task(self._rest())

    def forget(self, key: str) -> None:
        """The directory is gone."""
        self._under_way.pop(key, None)

    @property
    def under_way(self) -> Collection[str]:
        """Keys of those that are not on the disk yet."""
        return tuple(key for key, writing in self._under_way.items() if not _ended_well(writing))

    async def ended(self, keys: Collection[str]) -> None:
        """Return when these are on the disk, as far as this plugin wrote them. What failed before is tried once more: the directory may
        have been restored since. Raises OSError, Refused when the disk does not answer."""
        for key in keys:
            try:
                await self._one(key)
            except OSError:
                self.begin(key)
                await self._one(key)

    async def _rest(self) -> None:
        await self._until_idle()
        self._begun = False
        await asyncio.wrap_future(self._later.begin(self._do_afterwards))

    def _do_afterwards(self) -> None:
        for work in self.afterwards:
            work()

    async def _one(self, key: str) -> None:
        writing = self._under_way.get(key)
        if writing is None or _ended_well(writing):
            return
        await answered(
            asyncio.shield(asyncio.wrap_future(writing)), otherwise=f"grant directory {key} is not on the disk"
        )


def _ended_well(writing: Future[None]) -> bool:
    return writing.done() and writing.exception() is None
