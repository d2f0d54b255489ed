"""The channels of one process on one GPU, and the call that stops and starts them.

The descriptor is the process's own, passed to us, and the client named is the one that every channel of a list belongs to: the
kernel driver refuses a client that was not made through that descriptor. So a process can offer only what it owns, whatever
numbers it sends.

The kernel driver counts: as many enables are owed as disables were made. A channel group has at most one outstanding.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import threading
from enum import Enum
from pathlib import Path
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.gputime import resource_manager as rm
from vgpu.protocol.wire import Channels

NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidiactl and /dev/nvidia<n>. Specified: Linux's list of devices."""
MODESET_MINOR: Final = 254
"""The one device of that major that has other requests."""
NO_ANSWER: Final = -1
"""Status of a call that the kernel itself refused."""


class Do(Enum):
    """What is asked of the driver."""

    RESUME = "resume"
    SUSPEND = "suspend"
    SUSPEND_ALL = "suspend, copies too"


class Runs(Enum):
    """What is known of a channel group's channels."""

    ON = "on"
    OFF = "off"
    UNSURE = "unsure"
    """Some may be off: an enable is owed before anything else. To enable what is enabled changes nothing."""


class ChannelGroup:
    """Takes `fd` over. Raises BadDocument for a descriptor or a list that cannot be used; then the descriptor is closed.

    With `copies` it can also be suspended with its copy channels, where one list takes both; a resume then resumes both.
    """

    def __init__(self, channels: Channels, fd: int, *, copies: bool = False) -> None:
        self.channels = channels
        self.runs = Runs.ON if channels.fresh else Runs.UNSURE
        """Unsure: an arbiter before this one may have stopped it."""
        self.partial = channels.unlisted
        """There are more channels than a list takes: it is never suspended, as the rest would run on."""
        self.owes = False
        """Replaced by a partial list: to be started once more before it is closed."""
        self._fd = fd
        self._lock = threading.Lock()
        """So that the descriptor's number is not somebody else's by the time it is used."""
        try:
            _check(fd)
            if not channels.compute:
                raise BadDocument("packet CHANNELS lists no compute channel: 1 to 64")
            both = (*channels.compute, *channels.copy) if copies else channels.compute
            both = channels.compute if len(both) > rm.CHANNELS_LIMIT else both
            lists = {Do.RESUME: both, Do.SUSPEND: channels.compute, Do.SUSPEND_ALL: both}
            self._parameters = {
                do: ctypes.create_string_buffer(
                    rm.disable_parameters(channels.client, listed, disable=do is not Do.RESUME), rm.PARAMETERS_BYTES
                )
                for do, listed in lists.items()
            }
        except (OSError, BadDocument) as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise BadDocument(
                    f"packet CHANNELS comes with a descriptor that cannot be looked at: {error}"
                ) from None
            raise
        self._arguments = {
            do: rm.control(channels.client, channels.subdevice, ctypes.addressof(parameters))
            for do, parameters in self._parameters.items()
        }

    def suspend(self, *, copies: bool = False) -> int:
        """Stop in mid-kernel, and with `copies` in mid-copy, unless it is stopped; not for a partial list. The driver's status; not `rm.OK`: it runs, or `resume` makes it run."""
        if self.runs is Runs.OFF:
            return rm.OK
        status = self._issue(self._arguments[Do.SUSPEND_ALL if copies else Do.SUSPEND])
        self.runs = Runs.OFF if status == rm.OK else Runs.UNSURE
        if status != rm.OK:
            self.resume()
        return status

    def resume(self) -> int:
        """Go on. Harmless when nothing was stopped. An answer that is not `rm.OK` leaves an enable owed, which a fresh list pays."""
        status = self._issue(self._arguments[Do.RESUME])
        self.runs = Runs.ON if status == rm.OK else Runs.UNSURE
        return status

    def suspends_nobody(self) -> bool:
        """Does the driver answer that it suspended a channel that does not exist? Then it takes the call for another one."""
        nobody = ctypes.create_string_buffer(
            rm.disable_parameters(self.channels.client, (rm.NO_CHANNEL,), disable=True), rm.PARAMETERS_BYTES
        )
        argument = rm.control(self.channels.client, self.channels.subdevice, ctypes.addressof(nobody))
        return self._issue(argument) == rm.OK

    def close(self) -> None:
        """Give the descriptor up: as long as we hold it, the process's memory outlives it. Nothing is called after that."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _issue(self, argument: bytearray) -> int:
        with self._lock:
            if self._fd < 0:
                return NO_ANSWER
            try:
                fcntl.ioctl(self._fd, rm.CONTROL_REQUEST, argument)
            except OSError:
                return NO_ANSWER
            return rm.status(argument)


def _check(fd: int) -> None:
    """An ioctl on a descriptor that a container made up could hang: only the driver's own devices, and plain memory, are taken."""
    status = os.fstat(fd)
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == NVIDIA_MAJOR:
        if os.minor(status.st_rdev) != MODESET_MINOR:
            return
    elif stat.S_ISREG(status.st_mode) and str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:"):
        return
    raise BadDocument("packet CHANNELS comes with a descriptor that is no NVIDIA device")
