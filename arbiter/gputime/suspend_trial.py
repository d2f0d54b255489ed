"""Whether this machine's driver can suspend. `python -m arbiter.gputime.suspend_trial --program tangram-trial` tests one GPU and prints the verdict.

It observes the GPU and not only status codes: a kernel of the trial program counts in the host's memory. The count moves before a
suspend, stands still after it and moves again after the resume. This process suspends the program's channels with the code
and the rights of an arbiter. No container's process takes part, so none can decide for the others.

The device plugin starts this and ends it if it takes too long: an ioctl of an unknown driver may never return.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

from arbiter.gputime.channels import ChannelGroup
from vgpu.api.errors import BadDocument
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict, verdict_to_text
from vgpu.protocol.messages import Channels

STILL_S: Final = 0.02
"""A suspended count must not move for this long. Specified."""
MOVES_S: Final = 2.0
"""A count that runs moves within microseconds; with other processes on the GPU it waits for their time slices. Guessed."""
START_S: Final = 20.0
"""A context on an idle machine takes 0.1 to 0.5 s, on a GPU without persistence mode some seconds. Guessed."""
ROUNDS: Final = 3


class TrialCannotRun(Exception):
    """The trial shows nothing about the driver."""


class Faulty(Exception):
    """The GPU's memory did not keep what was copied to it, or a copy failed."""


class NoSuspend(Exception):
    """The driver did not suspend or resume as an arbiter needs it."""


class TrialProgram:
    """The trial program, with a kernel that counts."""

    def __init__(self, path: Path, libraries: Path | None) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(START_S)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the program that Tangram is installed with
                [str(path), str(theirs.fileno()), *([str(libraries)] if libraries else [])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            self._ours.close()
            raise
        finally:
            theirs.close()

    def channels(self) -> tuple[Channels, int]:
        """Its channels and their descriptor, once the count moves. Raises TrialCannotRun, Faulty."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._ours, 2048, 1)
        except TimeoutError:
            raise TrialCannotRun(f"the trial program has not started its kernel within {START_S:g} s") from None
        except OSError as error:
            raise TrialCannotRun(f"the trial program's channels cannot be received: {error}") from None
        what, _, rest = packet.decode(errors="replace").partition(" ")
        if what != "channels" or not fds:
            for fd in fds:
                os.close(fd)
            if what == "faulty":
                raise Faulty(rest)
            raise TrialCannotRun(rest or f"the trial program ended with status {self._process.wait(START_S)}")
        client, subdevice, *compute = (int(word) for word in rest.split())
        return Channels(0, client, subdevice, tuple(compute), (), fresh=True), fds[0]

    def count(self) -> int:
        """The present count. Raises TrialCannotRun if the program has ended."""
        try:
            self._ours.send(b"?")
            return int(self._ours.recv(64))
        except (OSError, ValueError) as error:
            raise TrialCannotRun(f"the trial program ended while it was tried: {error}") from None

    def end(self) -> None:
        """Close the connection, and kill the program if it does not end by itself."""
        self._ours.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel may keep the process for longer
            self._process.wait(2.0)


def attempt(count: Callable[[], int], channel_group: ChannelGroup) -> TrialVerdict:
    """Suspend and resume `ROUNDS` times and compare the counts. Raises NoSuspend with the reason; then the channel group runs, if it can."""
    rounds = [_round(count, channel_group) for _ in range(ROUNDS)]
    return TrialVerdict(
        TrialOutcome.WORKS,
        before=min(one[0] for one in rounds),
        during=max(one[1] for one in rounds),
        after=min(one[2] for one in rounds),
        suspend_us=median(one[3] for one in rounds),
        resume_us=median(one[4] for one in rounds),
    )


def _round(count: Callable[[], int], channel_group: ChannelGroup) -> tuple[int, int, int, float, float]:
    before = _moved(count)
    if not before:
        raise TrialCannotRun("the kernel does not count, though nothing is suspended")
    began = time.monotonic()
    status = channel_group.suspend()
    suspend_us = (time.monotonic() - began) * 1e6
    if status != rm.OK:
        raise NoSuspend(f"the driver answered {status & 0xFFFFFFFF:#x} to a suspend")
    stood = count()
    time.sleep(STILL_S)
    during = count() - stood
    began = time.monotonic()
    status = channel_group.resume()
    resume_us = (time.monotonic() - began) * 1e6
    if status != rm.OK:
        raise NoSuspend(f"the driver answered {status & 0xFFFFFFFF:#x} to a resume")
    if during:
        raise NoSuspend(f"the kernel counted {during} in the {STILL_S * 1000:g} ms after the suspend")
    after = _moved(count)
    if not after:
        raise NoSuspend(f"the kernel does not go on within {MOVES_S:g} s after the resume")
    return before, during, after, suspend_us, resume_us


def _moved(count: Callable[[], int]) -> int:
    """How far the count moves in `STILL_S`, or until its first move; 0 = no move within `MOVES_S`."""
    began, stood = time.monotonic(), count()
    while time.monotonic() - began < MOVES_S:
        time.sleep(STILL_S)
        if moved := count() - stood:
            return moved
    return 0


def run(program: Path, libraries: Path | None = None) -> TrialVerdict:
    """Run the trial on the first GPU that CUDA lists for this process."""
    try:
        started = TrialProgram(program, libraries)
    except OSError as error:
        return TrialVerdict(TrialOutcome.CANNOT_RUN, f"{program} cannot be started: {error}")
    channel_group = None
    try:
        channels, fd = started.channels()
        channel_group = ChannelGroup(channels, fd)
        if channel_group.suspends_nobody():
            raise NoSuspend("the driver suspended a channel that does not exist: it interprets the call as another one")
        return attempt(started.count, channel_group)
    except (TrialCannotRun, BadDocument) as error:
        return TrialVerdict(TrialOutcome.CANNOT_RUN, str(error))
    except Faulty as error:
        return TrialVerdict(TrialOutcome.FAULTY, str(error))
    except NoSuspend as error:
        return TrialVerdict(TrialOutcome.NO_SUSPEND, str(error))
    finally:
        if channel_group is not None:
            channel_group.close()
        started.end()


def main() -> None:
    """Print the verdict as a line of JSON. The exit status is always 0."""
    parser = argparse.ArgumentParser(
        prog="python -m arbiter.gputime.suspend_trial", description="Does this machine's driver suspend?"
    )
    parser.add_argument("--program", type=Path, required=True, help="the trial program, tangram-trial")
    parser.add_argument("--libraries", type=Path, help="folder with libcuda.so.1; left out = where the loader finds it")
    options = parser.parse_args()
    sys.stdout.write(verdict_to_text(run(options.program, options.libraries)) + "\n")


if __name__ == "__main__":
    main()
