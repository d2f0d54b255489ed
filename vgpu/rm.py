"""The bytes of the NVIDIA kernel driver's interface that suspend and resume a process's channels.

Facts, measured on driver 580 and published with NVIDIA's open kernel modules (nvos.h, ctrl2080fifo.h): x86-64, drivers 535 to
595. Only packing and reading: the ioctl itself belongs to who holds the descriptor. The C side is shim/src/rm.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

CONTROL_REQUEST: Final = 0xC020462A
"""_IOWR('F', 0x2a, 32 bytes)."""

DISABLE_CHANNELS: Final = 0x2080110B
"""NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS."""

CHANNELS_LIMIT: Final = 64
"""Channels that one list holds. Specified."""

NO_CHANNEL: Final = 0xF0000001
"""A handle that no channel has: the driver library numbers its objects from 0x5c000000 on. Measured: answered by 0x21."""

BRANCHES_TRIED: Final[Mapping[int, str]] = {580: "H200, 580.159.04: 47,000 switches"}
"""Driver branches on which suspending was seen to do what it is used for, and on what."""

PARAMETERS_BYTES: Final = 536
OK: Final = 0
_CONTROL: Final = struct.Struct("<4I Q 2I")
_PARAMETERS: Final = struct.Struct(f"<B3x I 2B6x Q {CHANNELS_LIMIT}I {CHANNELS_LIMIT}I")


def is_tried(version: str) -> bool:
    """Was a driver of this branch tried? `version`: as the driver writes it, such as 580.159.04."""
    branch = version.strip().partition(".")[0]
    return branch.isdecimal() and int(branch) in BRANCHES_TRIED


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
    """What the driver answered, from the argument after the ioctl; `OK` or its own number."""
    return int(_CONTROL.unpack(argument)[-1])
