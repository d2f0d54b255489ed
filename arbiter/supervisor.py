"""`tangram-arbiter-supervisor`: runs the arbiter, and runs it again when it dies.

The first program of the arbiter's container. The container runtime and the kubelet need seconds to start a container again, and wait
longer each time. Processes wait for an absent arbiter, so a restart within a second fails none of them.

It decides only when to start: at once after an arbiter that had served, with growing delays after one that had not. If no arbiter has
served since this program began, the program ends with the arbiter's status, so that the kubelet shows it. The arbiter's own /healthz shows
whether it is alive and ready: while it is absent, no program answers.

Loading the arbiter takes a second of a processor, so a spare one is loaded beside the one that serves, and waits.

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
"""Environment variable of a spare arbiter: the descriptor on which it reads that it is needed."""
READY: Final = b"READY=1"
LOADED: Final = b"STATUS=loaded"
SPARE_EVERY_S: Final = 10.0
"""Spares that end by themselves are replaced at most this often. Guessed."""
FIRST_S: Final = 0.5
MOST_S: Final = 15.0
"""Delay before a start after an arbiter that had not served; doubled each time. Guessed."""
OFTEN: Final = 30
OFTEN_S: Final = 60.0
"""This many deaths in this time count as if it had not served. Guessed."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)


class RestartDelay:
    """When to start again. Not `vgpu.api.back_off`: this program loads the standard library only."""

    def __init__(self) -> None:
        self.in_a_row = 0
        """Deaths in a row before it served."""
        self._died_s: deque[float] = deque(maxlen=OFTEN)

    def delay_s(self, at_s: float, *, served: bool) -> float:
        """The delay after a death at `at_s`."""
        often = len(self._died_s) == OFTEN and at_s - self._died_s[0] < OFTEN_S
        self._died_s.append(at_s)
        if served and not often:
            self.in_a_row = 0
            return 0.0
        self.in_a_row += 1
        return min(FIRST_S * 2.0 ** min(self.in_a_row - 1, 10), MOST_S)


class ArbiterSupervisor:
    """The supervisor of one program, `command`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._child = self._spare = 0
        self._spare_word = -1
        """The end of the pipe on which the spare waits."""
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
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # reaps the arbiter's orphaned children

    def run(self) -> int:
        """Run until a signal ends it, or until no restart makes sense. Returns the exit status."""
        while True:
            self._start()
            status = self._wait_for_end()
            if self._reported:
                return status
            if not self._ever_served:
                _log("error", "the arbiter ended before it served", status=status)
                return status or 1
            delay_s = self._restart_delay.delay_s(time.monotonic(), served=self._served)
            self._restarts += 1
            _log(
                "warning",
                "the arbiter ended and is started again",
                status=status,
                restarts=self._restarts,
                delay_s=delay_s,
            )
            if delay_s:
                _log("error", "the arbiter dies again and again", deaths=self._restart_delay.in_a_row, delay_s=delay_s)
            self._pause(delay_s)
            if self._reported:
                return 0

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._reported = self._reported or number in ENDING
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _start(self) -> None:
        self._read_notes()
        self._served = False  # of this one
        if self._spare and self._need_spare():
            return
        self._child = self._fork({})

    def _need_spare(self) -> bool:
        """Notify the spare that it is needed. Returns whether that succeeded."""
        word, self._spare_word, self._spare_at_s = self._spare_word, -1, -inf
        self._child, self._spare = self._spare, 0
        try:
            os.write(word, str(self._restarts).encode())
        except OSError:
            return False  # it has ended, and is reaped like any other child
        finally:
            os.close(word)
        return True

    def _keep_spare(self) -> None:
        """Load a spare arbiter once the present one serves, so that it does not slow that one's start."""
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
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # no signal is lost between the fork and the exec
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
            _log("error", "the arbiter cannot be started", command=self._command[0], reason=str(error))
        finally:
            os._exit(127)

    def _wait_for_end(self) -> int:
        while (status := self._reap()) is None:
            self._keep_spare()
            self._pause(SPARE_EVERY_S, whole=False)
        return status

    def _reap(self) -> int | None:
        """Reap all ended children. Returns the arbiter's status, if it was among them."""
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
        self._read_notes()  # it may have served and died in one moment
        return found

    def _pause(self, seconds: float, *, whole: bool = True) -> None:
        """Wait for `seconds`, or until the end is requested; unless `whole`, also until any signal or message of the arbiter."""
        until_s = time.monotonic() + seconds
        while not (self._reported and whole) and (left_s := until_s - time.monotonic()) > 0:
            select.select([self._bell, self._notes], [], [], left_s)
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
            self._read_notes()
            if not whole:
                return

    def _read_notes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                words = self._notes.recv(4096)
                if words == READY:
                    self._served = self._ever_served = True
                elif words == LOADED:
                    _log("info", "a spare arbiter is loaded")


def needed() -> bool:
    """For the loaded arbiter: as a spare, wait until the supervisor needs it. False = the supervisor never will."""
    fd = os.environ.pop(SPARE, "")
    if fd:
        _notify(LOADED)
        word = os.read(int(fd), 64)
        os.close(int(fd))
        os.environ[RESTARTS] = word.decode()
        return bool(word)
    return True


def notify_ready() -> None:
    """Notify the supervisor that the arbiter serves (NOTIFY_SOCKET, the protocol of systemd)."""
    _notify(READY)


def _notify(words: bytes) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(words, "\0" + address[1:] if address.startswith("@") else address)


def _log(level: str, event: str, **about: object) -> None:
    """Log in the arbiter's format. A closed log does not end the program."""
    line = {**about, "event": event, "level": level, "timestamp": datetime.now(UTC).isoformat()}
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(line).encode() + b"\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with the arbiter's arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(ArbiterSupervisor([sys.executable, "-P", "-m", "arbiter", *given]).run())


if __name__ == "__main__":
    main()
