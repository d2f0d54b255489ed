"""The channels of one process on one card, and the call that stops and starts them.

The descriptor is the process's own, passed to us; the kernel driver checks that the client belongs to it, and every channel in
a list is looked up under that client. So a process can offer only what it owns, whatever numbers it sends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from vgpu import rm
from vgpu.errors import BadDocument
from vgpu.wire import Channels

NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidiactl and /dev/nvidia<n>. Specified: Linux's list of devices."""
NO_ANSWER: Final = -1
"""Status of a call that the kernel itself refused."""


class Seat:
    """Takes `fd` over. Raises BadDocument for a descriptor or a list that cannot be used; then the descriptor is closed."""

    def __init__(self, channels: Channels, fd: int) -> None:
        self.channels = channels
        self._fd = fd
        try:
            _check(fd)
            if channels.unlisted or not channels.compute:
                raise BadDocument(
                    f"packet CHANNELS lists {len(channels.compute)} compute channels, and not all: 1 to 64"
                )
            self._parameters = {
                disable: ctypes.create_string_buffer(
                    rm.disable_parameters(channels.client, channels.compute, disable=disable), rm.PARAMETERS_BYTES
                )
                for disable in (False, True)
            }
        except BadDocument:
            os.close(fd)
            raise
        self._arguments = {
            disable: rm.control(channels.client, channels.subdevice, ctypes.addressof(parameters))
            for disable, parameters in self._parameters.items()
        }

    def suspend(self) -> int:
        """Stop in mid-kernel. The driver's status; not `rm.OK`: some may be stopped, `resume` starts them."""
        return self._call(True)

    def resume(self) -> int:
        """Go on. Harmless when nothing was stopped."""
        return self._call(False)

    def close(self) -> None:
        """Give the descriptor up: as long as we hold it, the process's memory outlives it."""
        os.close(self._fd)

    def _call(self, disable: bool) -> int:
        argument = self._arguments[disable]
        try:
            fcntl.ioctl(self._fd, rm.CONTROL_REQUEST, argument)
        except OSError:
            return NO_ANSWER
        return rm.status(argument)


def _check(fd: int) -> None:
    """An ioctl on a descriptor that a tenant made up could hang: only the driver's own devices, and plain memory, are taken."""
    status = os.fstat(fd)
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == NVIDIA_MAJOR:
        return
    if stat.S_ISREG(status.st_mode) and str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:"):
        return
    raise BadDocument("packet CHANNELS comes with a descriptor that is no NVIDIA device")
