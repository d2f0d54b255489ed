"""Write the CDI specification where container runtimes read it, in a thread: its disk, or the driver's files that it is made from, may never answer.

One thread writes, so two writes never interleave. It writes what was wanted last when it comes to it: of several states that wait for a disk, the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

import structlog

from deviceplugin.gpus import cdi
from deviceplugin.grants.disk_thread import DiskThread
from vgpu.api.inventory import Inventory

WRITE_S: Final = 5.0
"""For a specification of some KiB, which takes milliseconds. Guessed."""

T = TypeVar("T")
Described = Callable[[Inventory], tuple[Inventory, Mapping[str, str]]]
"""The inventory -> with all MIG instances, and further names of some: name -> UUID."""

log = structlog.get_logger("deviceplugin.gpus.cdi")


class CdiNotWritten(OSError):
    """The disk has not answered in time. What was wanted is written once it does."""


class CdiFile:
    """Of one node. `described` is called in the event loop, at each write."""

    def __init__(
        self, folder: Path, root: cdi.DriverRoot, described: Described, *, write_s: float = WRITE_S,
        write: Callable[[Path, Inventory, cdi.DriverRoot, Mapping[str, str]], bool] = cdi.write,
    ) -> None:  # fmt: skip
        self._path, self._root, self._described, self._write_s, self._write = (
            folder / cdi.SPEC_FILE,
            root,
            described,
            write_s,
            write,
        )
        self._disk = DiskThread("cdi")
        self._lock = Lock()
        self._inventory: Inventory | None = None
        self._wanted: tuple[Inventory, Mapping[str, str]] | None = None
        """What is to be there, until a write of it begins."""
        self._next: Future[None] | None = None
        """The write that has not begun."""

    async def write(self, inventory: Inventory) -> None:
        """What a probe found. Raises OSError, and then it is written with the next write."""
        self._inventory = inventory
        await self.again()

    async def again(self) -> None:
        """As probed last: MIG instances were made or removed since. Nothing where NVIDIA's runtime finds the devices, and on a node without GPUs. Raises OSError."""
        if (inventory := self._inventory) is None or inventory.access != "cdi" or not inventory.gpus:
            return
        with self._lock:
            self._wanted = self._described(inventory)
            if self._next is None:
                self._next = self._disk.begin(self._write_wanted)
            write = self._next
        await self._answered(write)

    async def restore(self) -> None:
        """Write it if it is lost: a container that starts would not find its devices. Raises OSError."""
        if self._inventory is None or self._inventory.access != "cdi":
            return
        if not await self._answered(self._disk.begin(self._path.exists)):
            await self.again()

    def _write_wanted(self) -> None:
        with self._lock:
            wanted, self._wanted, self._next = self._wanted, None, None
        if wanted is not None and self._write(self._path.parent, wanted[0], self._root, wanted[1]):
            log.info("CDI specification written", path=str(self._path))

    async def _answered(self, work: Future[T]) -> T:
        """Its answer. Raises what it raises, and CdiNotWritten; the work goes on all the same."""
        done = asyncio.wrap_future(work)
        done.add_done_callback(_seen)
        if not (await asyncio.wait([done], timeout=self._write_s))[0]:
            raise CdiNotWritten(
                f"{self._path} was not written within {self._write_s:g} s: its disk, or the driver's files, do not answer"
            )
        return await done


def _seen(done: asyncio.Future[Any]) -> None:
    """A late error is nobody's: the next write reports its own."""
    if not done.cancelled():
        done.exception()
