"""The bodies of the messages about elastic memory, types 18 to 28, 33 and 34 of the arbiter's protocol. `vgpu.protocol.wire` makes the packets.

All but PENDING are sent on the connection for bursts. Each body begins with the number of the GPU, which `wire` checks. Little-endian.
"""

from __future__ import annotations

import struct
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.protocol.messages import (
    Block,
    Blocks,
    Burst,
    Cancel,
    Discard,
    Discarded,
    Filled,
    Message,
    Pending,
    SwapIn,
    SwapMessage,
    SwapOut,
    Swappable,
    Unable,
    UnableReason,
    Unmap,
    Unmapped,
)

TYPES: Final[dict[type[Message], int]] = {
    Burst: 18, Swappable: 19, SwapOut: 20, Blocks: 21, Unmap: 22, Unmapped: 23, SwapIn: 24, Filled: 25, Cancel: 26,
    Unable: 27, Pending: 28, Discard: 33, Discarded: 34,
}  # fmt: skip
NUMBERS: Final = frozenset(TYPES.values())
BLOCKS_LIMIT: Final = 64
"""Blocks of one message, and so descriptors: the kernel passes at most 253 with one packet."""
MORE: Final = 1 << 31
"""Bit of the count of BLOCKS: another message follows."""
REASONS_LIMIT: Final = 31
"""Reasons of SWAPPABLE are 1 to this, and 0 for none."""

_TWO_SIZES = struct.Struct("<IIQQ")
_AMOUNT = struct.Struct("<IIQ")
_WORDS = struct.Struct("<II")
_BLOCK = struct.Struct("<QQ")
_IDS = struct.Struct(f"<II{BLOCKS_LIMIT}Q")
_LISTS: Final = {TYPES[kind]: kind for kind in (Unmap, Unmapped, SwapIn, Filled, Discard, Discarded)}
_SIZES: Final = {
    TYPES[Burst]: _TWO_SIZES.size, TYPES[Swappable]: _TWO_SIZES.size, TYPES[SwapOut]: _AMOUNT.size,
    TYPES[Cancel]: _WORDS.size, TYPES[Unable]: _WORDS.size, TYPES[Pending]: _AMOUNT.size,
    **dict.fromkeys(_LISTS, _IDS.size),
}  # fmt: skip


def body(message: SwapMessage) -> bytes:
    """The body of a message's packet."""
    match message:
        case Burst(gpu, guarantee_bytes, limit_bytes):
            return _TWO_SIZES.pack(gpu, 0, guarantee_bytes, limit_bytes)
        case Swappable(gpu, reason, elastic_bytes, away_bytes):
            return _TWO_SIZES.pack(gpu, reason, elastic_bytes, away_bytes)
        case SwapOut(gpu, amount) | Pending(gpu, amount):
            return _AMOUNT.pack(gpu, 0, amount)
        case Blocks(gpu, blocks, more):
            return _WORDS.pack(gpu, len(blocks) | MORE * more) + b"".join(_BLOCK.pack(b.id, b.bytes) for b in blocks)
        case (
            Unmap(gpu, ids) | Unmapped(gpu, ids) | SwapIn(gpu, ids) | Filled(gpu, ids)
            | Discard(gpu, ids) | Discarded(gpu, ids)
        ):  # fmt: skip
            return _IDS.pack(gpu, len(ids), *ids, *[0] * (BLOCKS_LIMIT - len(ids)))
        case Cancel(gpu):
            return _WORDS.pack(gpu, 0)
        case Unable(gpu, reason):
            return _WORDS.pack(gpu, reason)


def message(number: int, raw: bytes) -> SwapMessage:
    """The message of a body; `number` is one of `TYPES`, and the body has the size of its type. Raises BadDocument."""
    if number in _LISTS:
        gpu, count, *ids = _IDS.unpack(raw)
        return _LISTS[number](gpu, tuple(ids[: _count(count, _LISTS[number].__name__.upper())]))
    if number == TYPES[Blocks]:
        return _blocks(raw)
    if number == TYPES[Burst]:
        gpu, _, guarantee_bytes, limit_bytes = _TWO_SIZES.unpack(raw)
        return Burst(gpu, guarantee_bytes, limit_bytes)
    if number == TYPES[Swappable]:
        gpu, reason, elastic_bytes, away_bytes = _TWO_SIZES.unpack(raw)
        return Swappable(gpu, _swappable_reason(reason), elastic_bytes, away_bytes)
    if number in (TYPES[SwapOut], TYPES[Pending]):
        gpu, _, amount = _AMOUNT.unpack(raw)
        return (SwapOut if number == TYPES[SwapOut] else Pending)(gpu, amount)
    gpu, reason = _WORDS.unpack(raw)
    return Cancel(gpu) if number == TYPES[Cancel] else Unable(gpu, _unable_reason(reason))


def size_bytes(number: int, raw: bytes) -> int:
    """The size that this body must have."""
    if number != TYPES[Blocks]:
        return _SIZES[number]
    if len(raw) < _WORDS.size:
        return _WORDS.size
    count: int = _WORDS.unpack_from(raw)[1] & ~MORE
    return _WORDS.size + _BLOCK.size * min(count, BLOCKS_LIMIT)


def _blocks(raw: bytes) -> Blocks:
    gpu, word = _WORDS.unpack_from(raw)
    _count(word & ~MORE, "BLOCKS")
    return Blocks(gpu, tuple(Block(*pair) for pair in _BLOCK.iter_unpack(raw[_WORDS.size :])), bool(word & MORE))


def _count(count: int, name: str) -> int:
    if not 1 <= count <= BLOCKS_LIMIT:
        raise BadDocument(f"packet {name} names {count} blocks: 1 to {BLOCKS_LIMIT}")
    return count


def _swappable_reason(reason: int) -> int:
    if reason > REASONS_LIMIT:
        raise BadDocument(f"packet SWAPPABLE has reason {reason}: 0 to {REASONS_LIMIT}")
    return reason


def _unable_reason(reason: int) -> UnableReason:
    most = max(UnableReason)
    if not 1 <= reason <= most:
        raise BadDocument(f"packet UNABLE has reason {reason}: 1 to {most}")
    return UnableReason(reason)
