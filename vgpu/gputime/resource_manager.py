"""The bytes of the NVIDIA kernel driver's interface that suspend and resume a process's channels.

Measured on driver 580; `vgpu.gputime.driver_abi` has the layouts of NVIDIA's open kernel modules by branch, and all agree. x86-64. This module only
packs and unpacks: the caller makes the ioctl on its own descriptor. The C side is shim/src/gputime/rm.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from vgpu.gputime.driver_abi import BRANCHES, DISABLE_CHANNELS, DISABLE_CHANNELS_ENTRIES, RM_DISABLE

CONTROL_REQUEST: Final = 0xC020462A
"""_IOWR('F', 0x2a, 32 bytes)."""

CHANNELS_LIMIT: Final = DISABLE_CHANNELS_ENTRIES
"""Channels that fit one list. Specified."""

NO_CHANNEL: Final = 0xF0000001
"""A handle that no channel has: the driver library numbers its objects from 0x5c000000 on. Measured: the driver returns 0x21."""

PARAMETERS_BYTES: Final = RM_DISABLE[0]
OK: Final = 0
_CONTROL: Final = struct.Struct("<4I Q 2I")
_PARAMETERS: Final = struct.Struct(f"<B3x I 2B6x Q {CHANNELS_LIMIT}I {CHANNELS_LIMIT}I")


def is_known(version: str) -> bool:
    """Whether the table has the layout of this branch's ioctls. `version`: the driver's own text, such as 580.159.04."""
    branch = version.strip().partition(".")[0]
    return branch.isdecimal() and int(branch) in BRANCHES


def disable_parameters(client: int, channels: Sequence[int], *, disable: bool) -> bytes:
    """The list of one client's channels to suspend or resume. ValueError outside 1 to 64 channels."""
    if not 1 <= len(channels) <= CHANNELS_LIMIT:
        raise ValueError(f"{len(channels)} channels in a list: 1 to {CHANNELS_LIMIT}")
    empty = [0] * (CHANNELS_LIMIT - len(channels))
    return _PARAMETERS.pack(disable, len(channels), 0, 0, 0, *[client] * len(channels), *empty, *channels, *empty)


def control(client: int, subdevice: int, parameters_at: int) -> bytearray:
    """The argument of the ioctl; `parameters_at` is the address of `disable_parameters` in this process."""
    return bytearray(_CONTROL.pack(client, subdevice, DISABLE_CHANNELS, 0, parameters_at, PARAMETERS_BYTES, 0))


def status(argument: bytes | bytearray) -> int:
    """The driver's status, from the argument after the ioctl; `OK` or the driver's own number."""
    return int(_CONTROL.unpack(argument)[-1])
