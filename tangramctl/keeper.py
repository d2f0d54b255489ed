"""The daemon of a state root: keeps one arbiter running while there are runs, and ends with it some time after the last.

    python -m tangramctl.keeper ROOT LOCK_FD IDLE_S [FAKE_DRIVER_FOLDER]

It starts with the keeper's lock (a descriptor that `service.ensure` opened and passed on), so there is one of it however
many runs start at once; the lock is free the moment it ends. Its children end with it, and keep a lock of their own until then: the
next keeper waits for that, so no run mistakes an arbiter that is ending for one that stays. It removes what ended runs left, starts the arbiter again when
it ended, and serves no requests: its pid stands in keeper.json.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

from tangramctl.copiers import RunCopiers, limits_mib, pool_folder
from tangramctl.errors import CommandError
from tangramctl.machine import StateRoot, restrict_umask, try_lock
from tangramctl.proc import carried, start_ticks
from tangramctl.records import Run, runs
from tangramctl.service import answers

CHECK_S: Final = 0.5
"""How often it checks for runs that have ended. Guessed: short for a person, and 20 us a run."""
STOP_S: Final = 5.0
"""How long a child may take to end before it is killed. Guessed."""
VAIN_STARTS: Final = 3
"""So many arbiters in a row that ended before they answered, and no other is started. Guessed."""
DRIVER_LOOK_S: Final = 0.02
CHILDREN_LOOK_S: Final = 0.01
_SIGNALS: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG, linux/prctl.h."""
_libc = ctypes.CDLL(None)


class GaveUp(Exception):
    """A child does not run; the text is for the person whose run waits."""


class ArbiterKeeper:
    """The arbiter of one state root, and on a fake machine its driver."""

    def __init__(self, machine: StateRoot, lock_fd: int, children_fd: int | None, idle_s: float) -> None:
        self._machine, self._idle_s = machine, idle_s
        self._passed = [] if children_fd is None else [children_fd]
        self._lock_inode = os.fstat(lock_fd).st_ino
        self._driver: subprocess.Popen[bytes] | None = None
        self._arbiter: subprocess.Popen[bytes] | None = None
        self._copiers = RunCopiers(machine, self._log, _die_with_parent, self._passed)
        self._bursts = False
        """Whether the arbiter serves bursts: it does from the first run on that may burst."""
        self._runs: list[Run] = []
        self._failed_starts = 0
        """Arbiters started since one answered."""
        self._busy_until_s = time.monotonic()
        self._reported = True
        self._logged = ""

    def keep(self) -> None:
        """Until it is stopped, or idle. Raises GaveUp."""
        self._start_driver()
        with self._machine.locked():
            self._bursts = bool(self._limits())
        if not self._bursts:
            self._copiers.remove()
        self._start_arbiter()
        while True:
            received = signal.sigtimedwait(_SIGNALS, CHECK_S)
            if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                return
            if not self._still_ours():
                return  # the session is over and took its folder along
            self._restart_dead()
            if not self._reported:
                self._report()
            with self._machine.locked():
                if self._idle():
                    self._stop_children()  # before a new run can take the arbiter for one that stays
                    self._copiers.remove()
                    return
            self._keep_copiers()

    def _limits(self) -> dict[str, int]:
        """GPU -> limit of its runs that may burst. Under the lock."""
        try:
            return limits_mib(self._machine, runs(self._machine))
        except OSError as error:
            self._log(f"the runs of {self._machine.root} cannot be listed: {error}")
            return {}

    def _keep_copiers(self) -> None:
        """An arbiter without bursts makes place for one with them: its processes connect again."""
        limits = limits_mib(self._machine, self._runs) if self._machine.copier() is not None else {}
        if limits and not self._bursts:
            self._bursts = True
            _end(self._arbiter)
            self._start_arbiter()
        self._copiers.keep(limits)

    def stop(self) -> None:
        """End the children. No run is granted anything meanwhile."""
        if not self._still_ours():
            self._stop_children()
            self._copiers.remove()
            return
        with self._machine.locked():
            self._stop_children()
            if not self._limits():
                self._copiers.remove()

    def _still_ours(self) -> bool:
        try:
            return self._machine.keeper_lock.stat().st_ino == self._lock_inode
        except FileNotFoundError:
            return False

    def _stop_children(self) -> None:
        _end(self._arbiter)  # before the copiers: it reads their answers
        self._copiers.stop()
        _end(self._driver)

    def _idle(self) -> bool:
        """No run, and none that is being started, for the whole of the idle time."""
        wanted = None
        try:
            self._runs = runs(self._machine)
            busy = bool(self._runs)
            wanted = try_lock(self._machine.wanted_lock)
        except OSError as error:  # an error in one folder does not stop the others
            self._log(f"the runs of {self._machine.root} cannot be listed: {error}")
            busy = True
        if busy or wanted is None:
            self._busy_until_s = time.monotonic()
        elif time.monotonic() - self._busy_until_s >= self._idle_s:
            return True  # with the lock held: a new run waits until this process has ended
        if wanted is not None:
            os.close(wanted)
        return False

    def _restart_dead(self) -> None:
        if self._driver is not None and self._driver.poll() is not None:
            raise GaveUp(f"the fake driver ended with {self._driver.returncode}")
        if self._failed_starts and answers(self._machine.status_socket):
            self._failed_starts = 0
        if self._arbiter is not None and self._arbiter.poll() is not None:
            if self._failed_starts >= VAIN_STARTS:
                raise GaveUp(
                    f"the arbiter ended with {self._arbiter.returncode} as soon as it was started: {self._last_words()}"
                )
            self._start_arbiter()

    def _last_words(self) -> str:
        lines = self._machine.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it logged nothing"

    def _start_arbiter(self) -> None:
        """Processes that an earlier arbiter served get time to report their memory before anything new is leased."""
        machine = self._machine
        grants = {str(folder / "grant") for folder in machine.grants.iterdir()}
        grace = [] if carried(grants) else ["--grace-ms", "0"]
        command = [
            sys.executable, "-P", "-m", "arbiter", "--grants-dir", str(machine.grants), "--metrics-host", "127.0.0.1",
            "--metrics-port", "0", "--log-level", "warning", *grace,
        ]  # fmt: skip
        env = os.environ | machine.driver_env() | {"TANGRAM_ARBITER_STATUS_SOCKET": str(machine.status_socket)}
        env["TANGRAM_ARBITER_GRANTS_IN_ENVIRONMENT"] = "true"  # a run has no mount to be known by
        env["TANGRAM_ARBITER_BYPASS"] = "report"  # its processes are the user's own
        if self._bursts:
            env["TANGRAM_ARBITER_BURST"] = "true"
            env["TANGRAM_ARBITER_COPIERS_DIR"] = str(pool_folder(machine))
        if machine.programs is not None:
            env["TANGRAM_ARBITER_DRIVER_ROOT"] = str(machine.root / "driver")
        self._arbiter = subprocess.Popen(
            command, env=env, preexec_fn=_die_with_parent, stdin=subprocess.DEVNULL, pass_fds=self._passed
        )
        self._failed_starts += 1
        self._report()

    def _start_driver(self) -> None:
        machine = self._machine
        if machine.programs is None:
            return
        command = [
            str(machine.programs / "nvidia-fake-driverd"), "--config", str(machine.driver_config),
            "--socket", str(machine.driver_socket),
        ]  # fmt: skip
        output = machine.root / "driver.log"
        with output.open("w") as log:
            self._driver = subprocess.Popen(
                command, preexec_fn=_die_with_parent, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                pass_fds=self._passed,
            )  # fmt: skip
        while not answers(machine.driver_socket):
            if self._driver.poll() is not None:
                why = output.read_text(errors="replace").strip().removeprefix("nvidia-fake-driverd: ")
                raise GaveUp(f"the fake driver does not start: {why}")
            signal.sigtimedwait({signal.SIGCHLD}, DRIVER_LOOK_S)

    def _report(self) -> None:
        """The processes that run. Where it cannot be written, as on a full disk, the arbiter works all the same: it is written later."""
        if self._arbiter is None:
            return
        pid = os.getpid()
        fresh = self._machine.keeper_file.with_suffix(".new")
        reported = {
            "pid": pid,
            "start_ticks": start_ticks(pid),
            "arbiter_pid": self._arbiter.pid,
            "idle_s": self._idle_s,
            "bursts": self._bursts,
        }
        try:
            fresh.write_text(json.dumps(reported))
            fresh.rename(self._machine.keeper_file)
        except OSError as error:
            self._reported = False
            self._log(f"{self._machine.keeper_file} cannot be written: {error.strerror}")
        else:
            self._reported = True

    def _log(self, text: str) -> None:
        """In the log, once in a row: it is on the same disk."""
        if text != self._logged:
            self._logged = text
            with contextlib.suppress(OSError):
                print(f"keeper: {text}", file=sys.stderr, flush=True)


def _end(child: subprocess.Popen[bytes] | None) -> None:
    if child is None or child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _die_with_parent() -> None:
    _libc.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _childless(machine: StateRoot) -> int | None:
    """The children's lock, once those of an earlier keeper have ended; None where one does not end, as in a call of a driver that hangs."""
    until_s = time.monotonic() + STOP_S
    while (lock := try_lock(machine.children_lock)) is None and time.monotonic() < until_s:
        time.sleep(CHILDREN_LOOK_S)
    return lock


def main() -> NoReturn:
    """See the module."""
    root, lock_fd, idle_s, *programs = sys.argv[1:]
    os.set_inheritable(int(lock_fd), False)
    restrict_umask()
    machine = StateRoot(Path(root), Path(programs[0]) if programs else None)
    children_fd = _childless(machine)
    if os.fork() != 0:
        os._exit(0)  # the run that started it becomes a command, which expects no child it did not make
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    keeper = ArbiterKeeper(machine, int(lock_fd), children_fd, float(idle_s))
    code = 0
    try:
        keeper.keep()
    except (GaveUp, CommandError, OSError) as error:
        with contextlib.suppress(OSError):  # the folder itself may be what is gone
            machine.trouble.write_text(f"{error}\n")
        code = 1
    keeper.stop()
    sys.exit(code)


if __name__ == "__main__":
    main()
