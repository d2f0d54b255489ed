"""The bodies of the messages by which memory is opened across processes, types 29 to 32 of the arbiter's protocol. `vgpu.protocol.wire` makes the packets.

They are sent on the connection for memory, if the page shows `UNDERSTANDS_OPEN`. Little-endian.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from vgpu.api.errors import BadDocument
from vgpu.protocol.passing_messages import Convert, Export, Exported, Open, PassingMessage, UnopenedReason

TYPES: Final[dict[Any, int]] = {Convert: 29, Open: 30, Export: 31, Exported: 32}
NUMBERS: Final = frozenset(TYPES.values())
HANDLE_BYTES: Final = 64
HANDLE_MAGIC: Final = b"TNGRIPC\x01"
"""The first bytes of an emulated handle: no handle of the driver begins so. The last byte is its version."""
KEY_BYTES: Final = 32
"""The first bytes of a handle, which all handles of memory in the same blocks have in common. The rest names the allocation."""
PASSED_LIMIT: Final = 64
"""Blocks, and so descriptors, of one message."""
BLOCKS_LIMIT: Final = 1024
"""Blocks of one allocation: 512 GiB, at 512 MiB each."""
PAGE_BYTES: Final = 2 * 2**20
"""Every block is a multiple of it."""

_AMOUNT = struct.Struct("<IIQ")
_HANDLE = struct.Struct(f"<{HANDLE_BYTES}s")
_EXPORTED = struct.Struct(f"<6IQ{PASSED_LIMIT}Q")
_SIZES: Final = {29: _AMOUNT.size, 30: _HANDLE.size, 31: _HANDLE.size, 32: _EXPORTED.size}


def key_of(handle: bytes) -> bytes | None:
    """The key of HOLD and DROP for the blocks that an emulated handle is in; None: it is none."""
    if not handle.startswith(HANDLE_MAGIC):
        return None
    return handle[:KEY_BYTES] + bytes(HANDLE_BYTES - KEY_BYTES)


def body(message: PassingMessage) -> bytes:
    """The body of a message's packet."""
    match message:
        case Convert(gpu, amount):
            return _AMOUNT.pack(gpu, 0, amount)
        case Open(handle) | Export(handle):
            return _HANDLE.pack(handle)
        case Exported(gpu, amount, total, first, blocks, reason):
            sizes = (*blocks, *[0] * (PASSED_LIMIT - len(blocks)))
            return _EXPORTED.pack(gpu, len(blocks), reason or 0, first, total, 0, amount, *sizes)


def size_bytes(number: int) -> int:
    """The size of the body of this type."""
    return _SIZES[number]


def message(number: int, raw: bytes) -> PassingMessage:
    """The message of a body, which has the size of its type. Raises BadDocument."""
    if number == TYPES[Convert]:
        gpu, _, amount = _AMOUNT.unpack(raw)
        return Convert(gpu, amount)
    if number != TYPES[Exported]:
        return (Open if number == TYPES[Open] else Export)(raw)
    gpu, count, reason, first, total, _, amount, *sizes = _EXPORTED.unpack(raw)
    if count == 0:
        return Exported(gpu, amount, total, first, (), _reason(reason))
    if reason or count > PASSED_LIMIT or total > BLOCKS_LIMIT or first + count > total:
        raise BadDocument(
            f"packet EXPORTED names {count} blocks from {first}, of {total}, with reason {reason}: 1 to {PASSED_LIMIT} of {BLOCKS_LIMIT} at most, and no reason"
        )
    blocks = tuple(sizes[:count])
    if any(size == 0 or size % PAGE_BYTES for size in blocks) or sum(blocks) > amount:
        raise BadDocument(f"packet EXPORTED has a block that is no multiple of 2 MiB, or blocks beyond {amount} bytes")
    return Exported(gpu, amount, total, first, blocks)


def _reason(reason: int) -> UnopenedReason:
    most = max(UnopenedReason)
    if not 1 <= reason <= most:
        raise BadDocument(f"packet EXPORTED without blocks has reason {reason}: 1 to {most}")
    return UnopenedReason(reason)
