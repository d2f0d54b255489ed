"""New grant directories on their way to the disk: Allocate begins the write, the start of the container waits for it.

The kubelet admits nobody while it waits for Allocate, so Allocate does not wait for the disk. A kill of the plugin loses nothing: the
kernel has the directory. A loss of power may lose it until the write has ended, and then no process of the container has run. The
kubelet's own checkpoint names the directory by then only if it was written and committed in these milliseconds, on another disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from deviceplugin.calls import at_once
from vgpu.errors import Refused

LATER_S: Final = 1.0
"""A new directory's container starts within that time, usually: what can be done later is done then. Guessed."""
DISK_S: Final = 5.0
"""For a write to the disk, which takes milliseconds. Guessed."""


class Settling:
    """`settle` writes one directory, by its key, and waits for the disk. It runs in one thread of its own: a disk that never answers
    takes no thread from anybody else. `afterwards` runs in another one when nobody is likely to wait; `lull` as `calls.Calls.lull`."""

    def __init__(
        self,
        settle: Callable[[str], None],
        afterwards: Callable[[], None] = lambda: None,
        lull: Callable[[], Awaitable[None]] = at_once,
    ) -> None:
        self._settle, self._afterwards, self._lull = settle, afterwards, lull
        self._begun = False
        """Since `afterwards` ran last."""
        self._resting: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="settling")
        self._later = ThreadPoolExecutor(1, thread_name_prefix="afterwards")
        self._under_way: dict[str, asyncio.Future[None]] = {}
        """By key. One that failed stays until it has ended well, or its directory is gone."""

    def begin(self, key: str) -> None:
        """Write this directory; nobody waits."""
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._settle, key)
        self._under_way[key] = writing
        self._begun = True
        asyncio.get_running_loop().call_later(LATER_S, self.rest)
        writing.add_done_callback(lambda ended: self._ended(key, ended))

    def rest(self) -> None:
        """Nobody is likely to wait soon: run `afterwards` in the next lull, if any write was begun since it ran."""
        if self._begun and (self._resting is None or self._resting.done()):
            self._resting = asyncio.create_task(self._rest())

    def forget(self, key: str) -> None:
        """The directory is gone."""
        self._under_way.pop(key, None)

    @property
    def under_way(self) -> Collection[str]:
        """Keys of those that are not on the disk yet."""
        return tuple(self._under_way)

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
        await self._lull()
        self._begun = False
        await asyncio.get_running_loop().run_in_executor(self._later, self._afterwards)

    async def _one(self, key: str) -> None:
        writing = self._under_way.get(key)
        if writing is None:
            return
        try:
            async with asyncio.timeout(DISK_S):
                await asyncio.shield(writing)
        except TimeoutError:
            raise Refused(
                f"the state folder has not answered a write for {DISK_S:g} s: grant directory {key} is not on the disk"
            ) from None

    def _ended(self, key: str, writing: asyncio.Future[None]) -> None:
        failed = writing.cancelled() or writing.exception() is not None
        if not failed and self._under_way.get(key) is writing:
            del self._under_way[key]
