"""One GPU's copier: started, read, and started again when it ends or hangs, with growing delays while none becomes ready.

Before it is ready it reports its progress; from then on it states every 2 s that it is alive. One that does neither for too long is killed.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from hostpool.copier_log import LINE_BYTES, CopierProgress
from vgpu.api.back_off import BackOff

FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
"""Delays before a start after a copier that was not ready. Guessed: what lacks memory takes long to change."""
LEFT_S: Final = 5.0
"""How long a killed copier is waited for: one that hangs in the driver cannot be killed. Guessed."""

SILENT_S: Final = 10.0
"""How long a copier that is ready may state nothing. Guessed: five of its intervals. The arbiter counts it as away after 5 s without an answer."""
AGAIN_S: Final = 1.0
"""After that time it is read once more: this process itself may have been stopped. Guessed."""

log = structlog.get_logger("hostpool.copier")


class CopierProcess:
    """Runs from `run` until that is cancelled. `command`: what to start now, or why nothing can be; asked before each start."""

    def __init__(
        self, gpu: str, command: Callable[[], Sequence[str] | str], *, stall_s: float, end_s: float,
        changed: Callable[[], None], silent_s: float = SILENT_S,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        self.progress = CopierProgress()
        self.restarts = 0
        self.start_s: float | None = None
        """From the start of the process until it was ready; None while it is not."""
        self._failed = ""
        self._command, self._changed = command, changed
        self._stall_s, self._end_s, self._silent_s = stall_s, end_s, silent_s
        self._back_off = BackOff(FIRST_S, LONGEST_S)

    @property
    def ready(self) -> bool:
        """It takes jobs."""
        return self.progress.ready

    @property
    def reason(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.ready:
            return ""
        return self._failed or self.progress.last or "its copier starts"

    async def run(self) -> None:
        """Until cancelled: then the copier has ended, after it answered its jobs."""
        while True:
            command = self._command()
            if isinstance(command, str):
                self._fails(command)
            else:
                self._fails(await self._once(command))
                self.restarts += 1
            delay_s = self._back_off.failed()
            log.warning(
                "a GPU has no host pool now",
                gpu_uuid=self.gpu,
                why=self._failed,
                restarts=self.restarts,
                retry_s=delay_s,
            )
            self._changed()
            await asyncio.sleep(delay_s)

    async def _once(self, command: Sequence[str]) -> str:
        """One process, until it ends. Returns why it did."""
        self.progress, self.start_s = CopierProgress(), None
        started_s = asyncio.get_running_loop().time()
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, limit=LINE_BYTES
            )
        except OSError as error:
            return f"the copier cannot be started: {error}"
        self._changed()
        try:
            stalled = await self._read(process, started_s)
            if stalled:
                self._fails(stalled)  # it is not ready while it is waited for
                self._changed()
            stalled = await _ended(process, kill=bool(stalled)) or stalled
        except asyncio.CancelledError:
            await self._end(process)
            raise
        finally:
            last, self.progress = self.progress.last, CopierProgress()
        return stalled or f"its copier ended: {last or 'without a word'} ({_how(process.returncode)})"

    async def _read(self, process: Process, started_s: float) -> str:
        """Read its lines until it closes them. Returns why it is to be killed, if it is."""
        while True:
            try:
                line = await self._next(process)
            except TimeoutError:
                if self.ready:
                    return f"its copier hangs: it has not stated for {self._silent_s:g} s that it is alive"
                return f"its copier made no progress for {self._stall_s:g} s: {self.progress.last or 'it reported nothing'}"
            if not line:
                return ""
            was_ready = self.ready
            text = self.progress.read(line)
            if not text:
                continue
            log.info("copier", gpu_uuid=self.gpu, says=text)
            if self.ready and not was_ready:
                self.start_s, self._failed = asyncio.get_running_loop().time() - started_s, ""
                self._back_off.succeeded()
            self._changed()

    async def _next(self, process: Process) -> bytes:
        """Its next line; empty at the end. Raises TimeoutError if it hangs."""
        if not self.ready:
            return await asyncio.wait_for(_line(process), self._stall_s)
        if not self.progress.states_alive:
            return await _line(process)
        with suppress(TimeoutError):
            return await asyncio.wait_for(_line(process), self._silent_s)
        return await asyncio.wait_for(_line(process), AGAIN_S)

    async def _end(self, process: Process) -> None:
        """By SIGTERM: it answers its jobs and refuses others."""
        for number, wait_s in ((signal.SIGTERM, self._end_s), (signal.SIGKILL, LEFT_S)):
            with suppress(ProcessLookupError):
                process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await _drained(process)
                    return
        log.error("a copier hangs and is left behind", gpu_uuid=self.gpu, pid=process.pid)

    def _fails(self, why: str) -> None:
        self.progress, self.start_s, self._failed = CopierProgress(), None, why


async def _line(process: Process) -> bytes:
    """The next line, or a part of one that is too long; empty at the end."""
    if process.stderr is None:
        return b""
    try:
        return await process.stderr.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as error:
        return await process.stderr.read(max(1, error.consumed))


async def _drained(process: Process) -> None:
    """Until it has ended. Its lines are read, so that it does not wait for us."""
    while await _line(process):
        pass
    await process.wait()


async def _ended(process: Process, *, kill: bool) -> str:
    """Wait for the end of a process that has closed its standard error, or that is to be killed. Returns why it did not end."""
    for last in (False, True):
        if kill or last:
            with suppress(ProcessLookupError):
                process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEFT_S):
                await _drained(process)
                return ""
    return "its copier hangs and cannot be killed"


def _how(status: int | None) -> str:
    if status is None:
        return "it still runs"
    return f"signal {-status}" if status < 0 else f"status {status}"
