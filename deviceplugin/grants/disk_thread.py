"""A thread for the state folder's disk, which may never answer: a caller waits for it for a bounded time, and no other thread hangs.

One queue and one thread, without the machinery of a pool: a call of the kubelet waits for both ways. What waits in the queue and is
given up is never begun.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final, TypeVar

from vgpu.api.errors import Refused

DISK_S: Final = 5.0
"""For work on the disk, which takes milliseconds. Guessed."""

T = TypeVar("T")


class DiskThread:
    """Does one thing after another in a thread of this name. The thread begins with the first, and a program ends without it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.put, None)

    def begin(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Queue the work; the caller need not wait. Raises OSError when there can be no thread."""
        if self._thread is None:
            self._start()
        done: Future[T] = Future()
        self._work.put(_promised(done, work, arguments))
        return done

    def begin_soon(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """As `begin`, after what the event loop does now: waking a thread takes longer than an answer of the kubelet can wait."""
        if self._thread is None:
            self._start()
        done: Future[T] = Future()
        asyncio.get_running_loop().call_soon(self._work.put, _promised(done, work, arguments))
        return done

    async def do(self, work: Callable[..., T], *arguments: object, otherwise: str) -> T:
        """Its answer, as `answered` has it. What has not begun by then never will."""
        return await answered(asyncio.wrap_future(self.begin(work, *arguments)), otherwise=otherwise)

    def _start(self) -> None:
        thread = threading.Thread(target=_do_all, args=(self._work,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # of threading: the system has no more
            raise OSError(errno.EAGAIN, f"no thread for {self._name}: {error}") from None
        self._thread = thread


async def answered(work: Awaitable[T], *, otherwise: str) -> T:
    """Its answer. Raises what it raises; Refused, which ends with `otherwise`, when the disk does not answer in `DISK_S`."""
    try:
        async with asyncio.timeout(DISK_S):
            return await work
    except TimeoutError:
        raise Refused(f"the state folder has not answered a write for {DISK_S:g} s: {otherwise}") from None


def _do_all(work: SimpleQueue[Callable[[], None] | None]) -> None:
    """Until None comes: the worker has no user any more."""
    while (do := work.get()) is not None:
        do()


def _promised(done: Future[T], work: Callable[..., T], arguments: tuple[object, ...]) -> Callable[[], None]:
    """Does the work, unless it was given up, and passes the result to the caller that waits for it."""

    def do() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work(*arguments))
            except BaseException as error:  # noqa: BLE001 (the caller that waits gets it)
                done.set_exception(error)

    return do
