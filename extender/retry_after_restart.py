"""Restart kube-scheduler after the extender beside it has died, so that it retries pending pods.

kube-scheduler repeats filter and bind calls that failed. A preempt call that failed ends like one for a pod that no eviction helps: the pod is
retried at an event that may help it by the plugin that rejected it, here the end of a pod or a node with more capacity. If no such event
comes, kube-scheduler retries it with all its unschedulable pods, after 5 to 5.5 minutes (podMaxInUnschedulablePodsDuration). Pods that filter
rejected do not need this: they are retried at any event, and `retry_after_lapse` makes one where capacity comes free without.

No write to the API is sure to wake such a pod, short of deleting another pod. But a kube-scheduler that starts tries every pod. So if pods
were rejected, an extender that is younger than the kube-scheduler beside it ends that process once it can answer calls, and the kubelet
starts another. For this alone the chart lets the two containers see each other's processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from vgpu.api.process_stat import process_stat

PROC: Final = Path("/proc")
END_S: Final = 5.0
"""From SIGTERM, at which kube-scheduler releases its lease and ends its calls, to SIGKILL. It takes less than 1 s (measured)."""
NAME_BYTES: Final = 15
"""Of a process's name that the kernel keeps (TASK_COMM_LEN, proc(5))."""

log = structlog.get_logger("extender.retry_after_restart")


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process in this pid namespace."""

    pid: int
    began: int
    """Ticks since the machine's start."""


class SchedulerRestarter:
    """`process`: name of kube-scheduler's process; empty: never end it."""

    def __init__(self, process: str, *, proc: Path = PROC, end_s: float = END_S) -> None:
        self._process, self._proc, self._end_s = process, proc, end_s

    async def restart(self, pods: int, *, missed: bool) -> None:
        """To be called once, as soon as preempt calls are answered. Raises nothing: without it pods wait longer.

        `pods`: how many wait that fit nowhere, as kube-scheduler reports. `missed`: was a preempt call answered before enough was known? Then
        neither kube-scheduler's age nor `pods` matters.
        """
        if not self._process or not (pods or missed):
            return
        try:
            own = running_process(self._proc / "self")
            for one in list(processes_named(self._process, self._proc)):
                if not missed and (own is None or own.began <= one.began):
                    continue
                log.warning(
                    "kube-scheduler is restarted, so that it retries the pods that wait", pid=one.pid, pods=pods
                )
                await self._end(one)
        except OSError as error:
            log.error(
                "kube-scheduler cannot be restarted: pods that wait may be retried only after minutes", error=str(error)
            )

    async def _end(self, one: RunningProcess) -> None:
        """Return when it has ended. Raises OSError."""
        try:
            fd = os.pidfd_open(one.pid)
        except ProcessLookupError:
            return
        try:
            if running_process(self._proc / str(one.pid)) != one:
                return  # it has ended, and another process has its pid
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            if not await ends(fd, self._end_s):
                log.warning("kube-scheduler is killed", pid=one.pid, waited_s=self._end_s)
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                await ends(fd, self._end_s)
        except ProcessLookupError:
            return
        finally:
            os.close(fd)


def processes_named(name: str, proc: Path = PROC) -> Iterator[RunningProcess]:
    """Running processes of this name."""
    for folder in proc.iterdir():
        if folder.name.isdecimal() and _comm(folder) == name.encode()[:NAME_BYTES]:
            found = running_process(folder)
            if found is not None:
                yield found


def running_process(folder: Path) -> RunningProcess | None:
    """The process of a folder in /proc; None when it has ended."""
    try:
        stat = process_stat((folder / "stat").read_bytes())
    except OSError:
        return None
    return None if stat is None or stat.ended else RunningProcess(stat.pid, stat.started)


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
