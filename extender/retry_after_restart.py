"""Have kube-scheduler try the pods that wait, after an extender died beside it.

kube-scheduler repeats calls of filter and bind that failed. A preempt call that failed ends like one for a pod that no eviction can help: the pod
is tried again when an event may help it in the eyes of the plugin that turned it down, here a pod's end or a node with more room. Where neither
comes, it waits until kube-scheduler tries every pod that it had left aside, after five to five and a half minutes
(podMaxInUnschedulablePodsDuration). Pods that filter turned down do not need this: they are tried again at any event, and `retrying` makes one
where room comes free without.

No write to the API wakes such a pod for sure, short of deleting another. But a kube-scheduler that starts tries every pod. So an extender that is younger than the kube-scheduler beside it ends that, once it can answer, if pods were turned down, and the
kubelet starts another. The chart lets the two containers see each other's processes for this alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from vgpu.api.process_stat import process_stat

PROC: Final = Path("/proc")
END_S: Final = 5.0
"""From SIGTERM, with which it gives up its lease and its calls, to SIGKILL. It takes less than 1 s (measured)."""
NAME_BYTES: Final = 15
"""The kernel keeps so many of a process's name (TASK_COMM_LEN, proc(5))."""

log = structlog.get_logger("extender.retry_after_restart")


@dataclass(frozen=True, slots=True)
class Beside:
    """A process in our pid namespace."""

    pid: int
    began: int
    """Ticks since the machine's start."""


class Waker:
    """`process`: name of kube-scheduler's, empty = leave it alone. `turned_down`: how many pods wait that fit nowhere, as kube-scheduler
    says. `missed`: was a preempt call answered before enough was known? Then its age does not matter, nor whether it has said so yet."""

    def __init__(
        self,
        process: str,
        *,
        turned_down: Callable[[], int],
        missed: Callable[[], bool],
        proc: Path = PROC,
        end_s: float = END_S,
    ) -> None:
        self._process, self._turned_down, self._missed = process, turned_down, missed
        self._proc, self._end_s = proc, end_s

    async def wake(self) -> None:
        """Once, as soon as preempt calls are answered. Raises nothing: without it pods wait longer."""
        pods, missed = self._turned_down(), self._missed()
        if not self._process or not (pods or missed):
            return
        try:
            own = beside(self._proc / "self")
            for one in list(named(self._process, self._proc)):
                if not missed and (own is None or own.began <= one.began):
                    continue
                log.warning(
                    "kube-scheduler is ended, so that it tries the pods again that wait", pid=one.pid, pods=pods
                )
                await self._end(one)
        except OSError as error:
            log.error(
                "kube-scheduler cannot be ended: pods that wait may be tried after minutes only", error=str(error)
            )

    async def _end(self, one: Beside) -> None:
        """Return when it has ended. Raises OSError."""
        try:
            fd = os.pidfd_open(one.pid)
        except ProcessLookupError:
            return
        try:
            if beside(self._proc / str(one.pid)) != one:
                return  # it has ended, and its pid is another's
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            if not await ends(fd, self._end_s):
                log.warning("kube-scheduler is killed", pid=one.pid, waited_s=self._end_s)
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                await ends(fd, self._end_s)
        except ProcessLookupError:
            return
        finally:
            os.close(fd)


def named(name: str, proc: Path = PROC) -> Iterator[Beside]:
    """Processes of this name that live."""
    for folder in proc.iterdir():
        if folder.name.isdecimal() and _comm(folder) == name.encode()[:NAME_BYTES]:
            found = beside(folder)
            if found is not None:
                yield found


def beside(folder: Path) -> Beside | None:
    """The process of a folder in /proc; None when it has ended."""
    try:
        stat = process_stat((folder / "stat").read_bytes())
    except OSError:
        return None
    return None if stat is None or stat.ended else Beside(stat.pid, stat.started)


async def ends(pidfd: int, within_s: float) -> bool:
    """Does the process end within this time?"""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def _comm(folder: Path) -> bytes:
    try:
        return (folder / "comm").read_bytes().rstrip(b"\n")
    except OSError:
        return b""
