"""The channels of one process on one GPU, and the calls that suspend and resume them.

The process passes its own descriptor and the client to which every channel of the list belongs. The kernel driver rejects a client
that was not made through that descriptor. So a process can only report its own channels, whatever numbers it sends.

The kernel driver counts disables, and needs as many enables. A channel group has at most one disable outstanding.
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
"""The one device of that major with other requests."""
NO_ANSWER: Final = -1
"""Status of a call that the kernel itself refused."""


class ChannelCommand(Enum):
    """The request to the driver."""

    RESUME = "resume"
    SUSPEND = "suspend"
    SUSPEND_ALL = "suspend, copies too"


class ChannelState(Enum):
    """The known state of a channel group's channels."""

    ON = "on"
    OFF = "off"
    UNSURE = "unsure"
    """Some may be disabled: an enable must come before anything else. An enable of enabled channels has no effect."""


class ChannelGroup:
    """Owns `fd`. Raises BadDocument for an unusable descriptor or list; then it has closed the descriptor.

    With `copies` it can also be suspended with its copy channels, if both fit one list; a resume then resumes both.
    """

    def __init__(self, channels: Channels, fd: int, *, copies: bool = False) -> None:
        self.channels = channels
        self.runs = ChannelState.ON if channels.fresh else ChannelState.UNSURE
        """Unsure: an arbiter before this one may have stopped it."""
        self.partial = channels.unlisted
        """There are more channels than fit one list: it is never suspended, because the rest would continue to run."""
        self.owes = False
        """Replaced by a partial list: to be resumed once more before it is closed."""
        self._fd = fd
        self._lock = threading.Lock()
        """Protects the descriptor from being closed, and its number reused, during a call."""
        try:
            _check(fd)
            if not channels.compute:
                raise BadDocument("packet CHANNELS lists no compute channel: 1 to 64")
            both = (*channels.compute, *channels.copy) if copies else channels.compute
            both = channels.compute if len(both) > rm.CHANNELS_LIMIT else both
            lists = {
                ChannelCommand.RESUME: both,
                ChannelCommand.SUSPEND: channels.compute,
                ChannelCommand.SUSPEND_ALL: both,
            }
            self._parameters = {
                do: ctypes.create_string_buffer(
                    rm.disable_parameters(channels.client, listed, disable=do is not ChannelCommand.RESUME),
                    rm.PARAMETERS_BYTES,
                )
                for do, listed in lists.items()
            }
        except (OSError, BadDocument) as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise BadDocument(f"packet CHANNELS comes with a descriptor that cannot be examined: {error}") from None
            raise
        self._arguments = {
            do: rm.control(channels.client, channels.subdevice, ctypes.addressof(parameters))
            for do, parameters in self._parameters.items()
        }

    def suspend(self, *, copies: bool = False) -> int:
        """Suspend in mid-kernel, and with `copies` in mid-copy, unless it is suspended; not for a partial list. Returns the driver's status; if that is
        not `rm.OK`, the channels run, or `resume` makes them run."""
        if self.runs is ChannelState.OFF:
            return rm.OK
        status = self._issue(self._arguments[ChannelCommand.SUSPEND_ALL if copies else ChannelCommand.SUSPEND])
        self.runs = ChannelState.OFF if status == rm.OK else ChannelState.UNSURE
        if status != rm.OK:
            self.resume()
        return status

    def resume(self) -> int:
        """Resume. Harmless if nothing was suspended. After a status other than `rm.OK` an enable is still needed, which comes with a new list."""
        status = self._issue(self._arguments[ChannelCommand.RESUME])
        self.runs = ChannelState.ON if status == rm.OK else ChannelState.UNSURE
        return status

    def suspends_nobody(self) -> bool:
        """Whether the driver reports that it suspended a channel that does not exist. Then it interprets the call as another one."""
        parameters = ctypes.create_string_buffer(
            rm.disable_parameters(self.channels.client, (rm.NO_CHANNEL,), disable=True), rm.PARAMETERS_BYTES
        )
        argument = rm.control(self.channels.client, self.channels.subdevice, ctypes.addressof(parameters))
        return self._issue(argument) == rm.OK

    def close(self) -> None:
        """Close the descriptor: while it is open, the process's memory outlives the process. No call is made after that."""
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
    """Accept only the driver's own devices and plain memory: an ioctl on another descriptor of a container could hang."""
    status = os.fstat(fd)
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == NVIDIA_MAJOR:
        if os.minor(status.st_rdev) != MODESET_MINOR:
            return
    elif stat.S_ISREG(status.st_mode) and str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:"):
        return
    raise BadDocument("packet CHANNELS comes with a descriptor that is no NVIDIA device")
