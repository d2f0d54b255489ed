"""`tangram-arbiter-supervisor`: runs the arbiter, and runs it again when it dies.

The first program of the arbiter's container. The container runtime and the kubelet need seconds to start a container again, and wait
longer each time. Processes wait for an absent arbiter, so a restart within a second fails none of them.

It decides only when to start: at once after an arbiter that had served, later and later after one that had not. An arbiter that never
served since this program began is the kubelet's to show: the program ends with its status. Whether the arbiter lives and is ready
the arbiter's own /healthz says, also while it is absent: nobody answers then.

To load the arbiter takes a second of a processor, so a spare one is loaded beside the one that serves, and waits to be needed.

Standard library only, so that it is small and starts before anything can fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from types import FrameType
from typing import Final, NoReturn

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
PASSED_ON: Final = (*ENDING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
RESTARTS: Final = "TANGRAM_ARBITER_RESTARTS"
"""Environment variable of the arbiter: how often it was started again."""
SPARE: Final = "TANGRAM_ARBITER_SPARE_FD"
"""Where a spare arbiter reads that it is needed."""
READY: Final = b"READY=1"
LOADED: Final = b"STATUS=loaded"
SPARE_EVERY_S: Final = 10.0
"""Spares that end by themselves are replaced this often at most. Guessed."""
FIRST_S: Final = 0.5
MOST_S: Final = 15.0
"""Before a start, after an arbiter that had not served; twice as long each time. Guessed."""
OFTEN: Final = 30
OFTEN_S: Final = 60.0
"""So many deaths in so long count as if it had not served. Guessed."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)


class RestartDelay:
    """When to start again. Not `vgpu.api.back_off`: this program loads the standard library only."""

    def __init__(self) -> None:
        self.in_a_row = 0
        """Deaths before it served."""
        self._died_s: deque[float] = deque(maxlen=OFTEN)

    def delay_s(self, at_s: float, *, served: bool) -> float:
        """After a death at `at_s`."""
        often = len(self._died_s) == OFTEN and at_s - self._died_s[0] < OFTEN_S
        self._died_s.append(at_s)
        if served and not often:
            self.in_a_row = 0
            return 0.0
        self.in_a_row += 1
        return min(FIRST_S * 2.0 ** min(self.in_a_row - 1, 10), MOST_S)


class Supervisor:
    """Of one program, `command`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._child = self._spare = 0
        self._spare_word = -1
        """The end of a pipe at which the spare waits."""
        self._spare_at_s = -inf
        self._reported = False
        """To end."""
        self._served = self._ever_served = False
        self._restarts = 0
        self._restart_delay = RestartDelay()
        self._bell, bell = socket.socketpair()
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.bind("")  # an abstract name that the kernel chooses
        for sock in (self._bell, bell, self._notes):
            sock.setblocking(False)
        self._rings = bell
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the arbiter leaves behind is reaped here

    def run(self) -> int:
        """Until a signal ends it, or until it makes no sense: the exit status."""
        while True:
            self._start()
            status = self._wait_for_end()
            if self._reported:
                return status
            if not self._ever_served:
                _say("error", "the arbiter ended before it served", status=status)
                return status or 1
            delay_s = self._restart_delay.delay_s(time.monotonic(), served=self._served)
            self._restarts += 1
            _say(
                "warning",
                "the arbiter ended and is started again",
                status=status,
                restarts=self._restarts,
                delay_s=delay_s,
            )
            if delay_s:
                _say("error", "the arbiter dies again and again", deaths=self._restart_delay.in_a_row, delay_s=delay_s)
            self._pause(delay_s)
            if self._reported:
                return 0

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._reported = self._reported or number in ENDING
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _start(self) -> None:
        self._hear()
        self._served = False  # of this one
        if self._spare and self._need_spare():
            return
        self._child = self._fork({})

    def _need_spare(self) -> bool:
        """Whether it took note."""
        word, self._spare_word, self._spare_at_s = self._spare_word, -1, -inf
        self._child, self._spare = self._spare, 0
        try:
            os.write(word, str(self._restarts).encode())
        except OSError:
            return False  # it has ended: reaped as any other
        finally:
            os.close(word)
        return True

    def _keep_spare(self) -> None:
        """One arbiter more, once the one that serves is there: it takes no processor from its start."""
        now_s = time.monotonic()
        if (
            self._spare
            or not self._served
            or not self._child
            or self._reported
            or now_s < self._spare_at_s + SPARE_EVERY_S
        ):
            return
        self._spare_at_s = now_s
        reads, self._spare_word = os.pipe()
        os.set_inheritable(reads, True)
        self._spare = self._fork({SPARE: str(reads)})
        os.close(reads)

    def _fork(self, more: dict[str, str]) -> int:
        name = os.fsdecode(self._notes.getsockname())
        environment = {**os.environ, "NOTIFY_SOCKET": "@" + name[1:], RESTARTS: str(self._restarts), **more}
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # none is lost between the fork and the exec
        pid = os.fork()
        if pid == 0:
            self._become(parent, environment)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        if self._reported:  # while no arbiter ran
            os.kill(pid, signal.SIGTERM)
        return pid

    def _become(self, parent: int, environment: dict[str, str]) -> NoReturn:
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # no arbiter without its supervisor
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in PASSED_ON:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            os.execve(self._command[0], self._command, environment)  # noqa: S606 - the arbiter
        except BaseException as error:  # noqa: BLE001 - this is a copy of the supervisor: it must not go on
            _say("error", "the arbiter cannot be started", command=self._command[0], reason=str(error))
        finally:
            os._exit(127)

    def _wait_for_end(self) -> int:
        while (status := self._reap()) is None:
            self._keep_spare()
            self._pause(SPARE_EVERY_S, whole=False)
        return status

    def _reap(self) -> int | None:
        """Whatever ended. The status of the arbiter, if it was that."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    self._child = 0
                    code = os.waitstatus_to_exitcode(status)
                    found = 128 - code if code < 0 else code
                if pid == self._spare:
                    self._spare = 0
                    os.close(self._spare_word)
                    self._spare_word = -1
        self._hear()  # it may have served and died in one moment
        return found

    def _pause(self, seconds: float, *, whole: bool = True) -> None:
        """For so long, or until the end is requested; where it is not to be whole, until any signal or word of the arbiter's."""
        until_s = time.monotonic() + seconds
        while not (self._reported and whole) and (left_s := until_s - time.monotonic()) > 0:
            select.select([self._bell, self._notes], [], [], left_s)
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
            self._hear()
            if not whole:
                return

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                words = self._notes.recv(4096)
                if words == READY:
                    self._served = self._ever_served = True
                elif words == LOADED:
                    _say("info", "a spare arbiter is loaded")


def needed() -> bool:
    """For the arbiter, when it is loaded: wait until it is needed, where the supervisor keeps it as a spare. False = it never will be."""
    fd = os.environ.pop(SPARE, "")
    if fd:
        _notify(LOADED)
        word = os.read(int(fd), 64)
        os.close(int(fd))
        os.environ[RESTARTS] = word.decode()
        return bool(word)
    return True


def notify_ready() -> None:
    """The arbiter serves: say so to whoever started it and waits for that (NOTIFY_SOCKET, as systemd has it)."""
    _notify(READY)


def _notify(words: bytes) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(words, "\0" + address[1:] if address.startswith("@") else address)


def _say(level: str, event: str, **about: object) -> None:
    """As the arbiter logs. A log that is gone is no reason to end."""
    line = {**about, "event": event, "level": level, "timestamp": datetime.now(UTC).isoformat()}
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(line).encode() + b"\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Takes the arbiter's arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(Supervisor([sys.executable, "-P", "-m", "arbiter", *given]).run())


if __name__ == "__main__":
    main()
