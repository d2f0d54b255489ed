"""The arbiter's protocol, version 1: messages to packets and back.

One packet of a SOCK_SEQPACKET socket is one message: a header of 16 bytes and a body whose size its type fixes. Everything is
little-endian. docs/reference/protocol.md specifies which side sends which message and when; shim/src/link/wire.h is the same in C. This module handles
bytes only: no socket, no ledger. The messages themselves are in `vgpu.protocol.messages`, and have the same names here.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.protocol import passing_wire, swap_wire
from vgpu.protocol.messages import (
    Activity,
    ActivityKind,
    Block,
    Blocks,
    Burst,
    Cancel,
    Channels,
    Context,
    Discard,
    Discarded,
    Drop,
    Error,
    Filled,
    Hello,
    Hold,
    HoldState,
    Lease,
    Leased,
    LeaseKind,
    ListedProcess,
    Measured,
    Message,
    Pending,
    Processes,
    ProcessList,
    Recall,
    Report,
    Return,
    Space,
    Step,
    SwapIn,
    SwapOut,
    Swappable,
    Unable,
    UnableReason,
    Unmap,
    Unmapped,
    Usage,
    Welcome,
    WelcomeGpu,
)  # fmt: skip
from vgpu.protocol.passing_messages import Convert, Export, Exported, Open, UnopenedReason

__all__ = [
    "Activity", "ActivityKind", "Block", "Blocks", "Burst", "Cancel", "Channels", "Context", "Convert", "Discard", "Discarded", "Drop", "Error", "Export", "Exported", "Filled", "Hello", "Hold", "HoldState",
    "Lease", "LeaseKind", "Leased", "ListedProcess", "Measured", "Message", "Open", "Pending", "ProcessList", "Processes", "Recall", "Report", "Return", "Space",
    "Step", "SwapIn", "SwapOut", "Swappable", "Unable", "UnableReason", "Unmap", "Unmapped", "UnopenedReason", "Usage", "Welcome", "WelcomeGpu", "decode", "encode",
]  # fmt: skip

MAGIC: Final = 0x52474E54
"""'TNGR' in memory."""
VERSION: Final = 1
GPUS_LIMIT: Final = 64
PROCESSES_LIMIT: Final = 1024
"""Processes of a PROCESS_LIST; further ones are omitted."""
PACKET_LIMIT: Final = 16_448
"""The longest message: a PROCESS_LIST of 1,024 processes has 16,408 bytes."""
REQUEST_LIMIT: Final = 4096
"""The longest message that a library sends."""
GPU_TIME_AT: Final = 1024
"""Offset in the page of the container's state: u64 beat_ms, u32 off, u32 gate."""
WORDS_AT: Final = GPU_TIME_AT + 16
"""Offset in the page of the arbiter's features and settings: u32 features, u32 wait_ms. Both are 0 for an arbiter without these words."""
UNDERSTANDS_REPORT: Final = 1
UNDERSTANDS_GROW: Final = 2
UNDERSTANDS_STILL: Final = 4
UNDERSTANDS_DRAINED: Final = 8
UNDERSTANDS_RESUMED: Final = 16
UNDERSTANDS_BURST: Final = 32
UNDERSTANDS_OPEN: Final = 64
SHOWS_LIMITS: Final = 128
UNDERSTANDS_DISCARD: Final = 256
UNDERSTANDS_WAITED: Final = 512
"""Bits of the features."""
LIMITS_AT: Final = 2048
"""Offset in the page of the limits in effect, one u64 for each GPU, if the features have `SHOWS_LIMITS`."""
WAITED_SHIFT: Final = 8
WAITED_MOST_MS: Final = 2**24 - 1
"""The bits above the kind, of LEASE: how long the allocation has waited before."""
KERNELS_ONLY: Final = 1
"""Bit of the value of WORK and STILL."""
ABOUT_TO: Final = 1
"""Bit of the value of RESUMED: the process resumes its channels next; without it, it has just resumed them."""
LATE_SHIFT: Final = 32
"""The bits above, of WORK: microseconds since the work began, if the report is late."""
REASONS_LIMIT: Final = 31
"""Reasons of a REPORT are 1 to this: a library keeps them as bits of one word."""
CHANNELS_LIMIT: Final = 64
"""Channels of one kind, of one client on one GPU; the kernel driver's own limit for a list."""
UNLISTED: Final = 1
FRESH: Final = 2
AWAY: Final = 4
"""Flags of a CHANNELS."""
FOR_GPU_TIME: Final = 1
"""Flag of a HELLO: this connection reports channels and work, and leases nothing."""
FOR_CONTEXT: Final = 2
"""Flag of a HELLO: the driver is being initialised, and a context may follow."""
FOR_BURST: Final = 4
"""Flag of a HELLO: this connection receives the burst limits and orders to swap, and leases nothing."""
PAGE_BYTES: Final = 4096
"""The page that comes with WELCOME. It begins with the unleased bytes: one u64 for each GPU."""
LIBRARY_VERSION_BYTES: Final = 32
KEY_BYTES: Final = 64
"""Key of memory that processes share: an IPC handle, or a pool's export data of a pointer."""
ERROR_TEXT_BYTES: Final = 124

_HEADER = struct.Struct("<IHHII")
_HELLO = struct.Struct(f"<II{LIBRARY_VERSION_BYTES}s")
_WELCOME = struct.Struct("<II")
_GPU = struct.Struct("<16sQII")
_LEASE = struct.Struct("<IIQQ")
_LEASED = struct.Struct("<IIQQ")
_AMOUNT = struct.Struct("<IIQ")
_USAGE = struct.Struct("<IIQQ")
_ERROR = struct.Struct(f"<I{ERROR_TEXT_BYTES}s")
_CONTEXT = struct.Struct("<IIQ")
_MEASURED = struct.Struct("<IIQQ")
_GPU_ONLY = struct.Struct("<II")
_CHANNELS = struct.Struct("<6I64I64I")
_ACTIVITY = struct.Struct("<IIQ")
_REPORT = struct.Struct("<II")
_SHARED = struct.Struct(f"<IIIIQ{KEY_BYTES}s")
_PROCESS = struct.Struct("<IIQ")

_TYPES: Final[dict[type[Message], int]] = {
    Hello: 1, Welcome: 2, Lease: 3, Leased: 4, Return: 5, Recall: 6, Usage: 7, Error: 8,
    Context: 9, Measured: 10, Processes: 11, ProcessList: 12, Channels: 13, Activity: 14, Hold: 15, Drop: 16, Report: 17,
    **swap_wire.TYPES, **passing_wire.TYPES,
}  # fmt: skip
_ELSEWHERE: Final = swap_wire.NUMBERS | passing_wire.NUMBERS
"""Types whose bodies other modules make."""
_NAMES: Final = {number: kind.__name__.upper() for kind, number in _TYPES.items()}
_BODY_BYTES: Final = {
    1: _HELLO.size, 3: _LEASE.size, 4: _LEASED.size, 5: _AMOUNT.size, 6: _AMOUNT.size, 7: _USAGE.size, 8: _ERROR.size,
    9: _CONTEXT.size, 10: _MEASURED.size, 11: _GPU_ONLY.size, 13: _CHANNELS.size, 14: _ACTIVITY.size,
    15: _SHARED.size, 16: _SHARED.size, 17: _REPORT.size,
}  # fmt: skip


def encode(seq: int, message: Message) -> bytes:
    """The packet of a message."""
    body = _body(message)
    return _HEADER.pack(MAGIC, VERSION, _TYPES[type(message)], seq, len(body)) + body


def _body(message: Message) -> bytes:
    match message:
        case Hello(pid, flags, version):
            return _HELLO.pack(pid, flags, _fitting(version, LIBRARY_VERSION_BYTES))
        case Welcome(gpus, promised_mib):
            return _WELCOME.pack(len(gpus), promised_mib) + b"".join(
                _GPU.pack(gpu.uuid, gpu.limit_bytes, gpu.core_percent, gpu.service_class) for gpu in gpus
            )
        case Lease(gpu, need, want, kind, waited_ms):
            return _LEASE.pack(gpu, kind | min(waited_ms, WAITED_MOST_MS) << WAITED_SHIFT, need, want)
        case Leased(gpu, refused, granted, unleased):
            return _LEASED.pack(gpu, refused, granted, unleased)
        case Return(gpu, amount, kind):
            return _AMOUNT.pack(gpu, kind, amount)
        case Recall(gpu, amount):
            return _AMOUNT.pack(gpu, 0, amount)
        case Usage(gpu, used, leased, managed_mib):
            return _USAGE.pack(gpu, managed_mib, used, leased)
        case Error(code, text):
            return _ERROR.pack(code, _fitting(text, ERROR_TEXT_BYTES))
        case Context(gpu, step, estimate):
            return _CONTEXT.pack(gpu, step, estimate)
        case Measured(gpu, known, context, unleased):
            return _MEASURED.pack(gpu, int(known), context, unleased)
        case Processes(gpu):
            return _GPU_ONLY.pack(gpu, 0)
        case Channels(gpu, client, subdevice, compute, copy, unlisted, fresh, away):
            counts = len(compute), len(copy), UNLISTED * unlisted | FRESH * fresh | AWAY * away
            return _CHANNELS.pack(gpu, client, subdevice, *counts, *_list(compute), *_list(copy))
        case Activity(what, value):
            return _ACTIVITY.pack(what, 0, value)
        case Hold(gpu, held, space, amount, key) | Drop(gpu, held, space, amount, key):
            return _SHARED.pack(gpu, held, space, 0, amount, key)
        case Report(reason, active):
            return _REPORT.pack(reason, int(active))
        case ProcessList(gpu, processes):
            return _GPU_ONLY.pack(gpu, len(processes)) + b"".join(
                _PROCESS.pack(process.pid, 0, process.used_bytes) for process in processes
            )
        case Convert() | Open() | Export() | Exported():
            return passing_wire.body(message)
        case _:
            return swap_wire.body(message)


def decode(packet: bytes) -> tuple[int, Message]:
    """The seq and the message of a packet.

    Raises BadDocument with the found and the allowed value; NewerVersion if the peer uses a later protocol.
    """
    if not _HEADER.size <= len(packet) <= PACKET_LIMIT:
        raise BadDocument(f"packet of {len(packet)} bytes: it must be {_HEADER.size} to {PACKET_LIMIT}")
    magic, version, number, seq, body_bytes = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise BadDocument(f"packet begins with {magic:#010x}: it must be {MAGIC:#010x}")
    if version != VERSION:
        kind = NewerVersion if version > VERSION else BadDocument
        raise kind(f"packet is of protocol version {version}: this Tangram speaks version {VERSION}")
    body = packet[_HEADER.size :]
    if body_bytes != len(body):
        raise BadDocument(f"packet announces a body of {body_bytes} bytes and carries {len(body)}")
    if number == _TYPES[Activity] and len(body) == _ACTIVITY.size:
        return seq, _activity(body)
    if number == _TYPES[Welcome]:
        return seq, _welcome(body)
    if number == _TYPES[ProcessList]:
        return seq, _process_list(body)
    if number not in _NAMES:
        raise BadDocument(f"packet is of type {number}: types are 1 to {max(_NAMES)}")
    if len(body) != (needed := _size_bytes(number, body)):
        raise BadDocument(f"packet {_NAMES[number]} has a body of {len(body)} bytes: it must be {needed}")
    if number not in _ELSEWHERE:
        return seq, _message(number, body)
    decoded = swap_wire.message(number, body) if number in swap_wire.NUMBERS else passing_wire.message(number, body)
    if not isinstance(decoded, Open | Export):
        _gpu(decoded.gpu)
    return seq, decoded


def _size_bytes(number: int, body: bytes) -> int:
    if number in swap_wire.NUMBERS:
        return swap_wire.size_bytes(number, body)
    return passing_wire.size_bytes(number) if number in passing_wire.NUMBERS else _BODY_BYTES[number]


def _message(number: int, body: bytes) -> Message:
    match number:
        case 1:
            pid, flags, version = _HELLO.unpack(body)
            return Hello(pid, _hello_flags(flags), _text(version))
        case 3:
            gpu, kind, need, want = _LEASE.unpack(body)
            waited_ms, kind = divmod(kind, 1 << WAITED_SHIFT)
            return Lease(_gpu(gpu), need, want, _lease_kind(kind), waited_ms)
        case 4:
            gpu, refused, granted, unleased = _LEASED.unpack(body)
            return Leased(_gpu(gpu), refused, granted, unleased)
        case 5:
            gpu, kind, amount = _AMOUNT.unpack(body)
            return Return(_gpu(gpu), amount, _lease_kind(kind))
        case 6:
            gpu, _, amount = _AMOUNT.unpack(body)
            return Recall(_gpu(gpu), amount)
        case 7:
            gpu, managed_mib, used, leased = _USAGE.unpack(body)
            return Usage(_gpu(gpu), used, leased, managed_mib)
        case 9:
            gpu, step, estimate = _CONTEXT.unpack(body)
            return Context(_gpu(gpu), _step(step), estimate)
        case 10:
            gpu, known, context, unleased = _MEASURED.unpack(body)
            return Measured(_gpu(gpu), bool(known), context, unleased)
        case 11:
            return Processes(_gpu(_GPU_ONLY.unpack(body)[0]))
        case 13:
            return _channels(*_CHANNELS.unpack(body))
        case 15 | 16:
            gpu, held, space, _, amount, key = _SHARED.unpack(body)
            kind = Hold if number == 15 else Drop
            return kind(_gpu(gpu), _held(held), _space(space), amount, key)
        case 17:
            return _report(*_REPORT.unpack(body))
        case _:
            code, text = _ERROR.unpack(body)
            return Error(code, _text(text))


@lru_cache(64)
def _activity(body: bytes) -> Activity:
    """Cached: a request waits for this message, and few different ones exist."""
    what, _, value = _ACTIVITY.unpack(body)
    return Activity(_what(what), value)


def _welcome(body: bytes) -> Welcome:
    if len(body) < _WELCOME.size:
        raise BadDocument(f"WELCOME has a body of {len(body)} bytes: it must be at least {_WELCOME.size}")
    count, promised_mib = _WELCOME.unpack_from(body)
    needed = _WELCOME.size + count * _GPU.size
    if count > GPUS_LIMIT or len(body) != needed:
        raise BadDocument(
            f"WELCOME of {count} GPUs has a body of {len(body)} bytes: at most {GPUS_LIMIT} GPUs of {_GPU.size}"
        )
    gpus = (WelcomeGpu(*_GPU.unpack_from(body, _WELCOME.size + i * _GPU.size)) for i in range(count))
    return Welcome(tuple(gpus), promised_mib)


def _process_list(body: bytes) -> ProcessList:
    if len(body) < _GPU_ONLY.size:
        raise BadDocument(f"packet PROCESS_LIST has a body of {len(body)} bytes: it must be at least {_GPU_ONLY.size}")
    gpu, count = _GPU_ONLY.unpack_from(body)
    if count > PROCESSES_LIMIT or len(body) != _GPU_ONLY.size + count * _PROCESS.size:
        raise BadDocument(
            f"packet PROCESS_LIST of {count} processes has a body of {len(body)} bytes: at most {PROCESSES_LIMIT} of {_PROCESS.size}"
        )
    listed = (_PROCESS.unpack_from(body, _GPU_ONLY.size + i * _PROCESS.size) for i in range(count))
    return ProcessList(_gpu(gpu), tuple(ListedProcess(pid, used) for pid, _, used in listed))


def _hello_flags(flags: int) -> int:
    if flags not in (0, FOR_GPU_TIME, FOR_CONTEXT, FOR_BURST):
        raise BadDocument(
            f"packet HELLO has flags {flags:#x}: they must be 0, {FOR_GPU_TIME} for GPU time, {FOR_CONTEXT} before a context, or {FOR_BURST} for bursts"
        )
    return flags


def _lease_kind(kind: int) -> LeaseKind:
    if kind not in (LeaseKind.RESIDENT, LeaseKind.ELASTIC):
        raise BadDocument(
            f"packet LEASE or RETURN is of kind {kind}: {LeaseKind.RESIDENT} resident or {LeaseKind.ELASTIC} elastic"
        )
    return LeaseKind(kind)


def _list(channels: tuple[int, ...]) -> list[int]:
    return [*channels, *[0] * (CHANNELS_LIMIT - len(channels))]


def _channels(
    gpu: int, client: int, subdevice: int, computes: int, copies: int, flags: int, *channels: int
) -> Channels:
    if computes > CHANNELS_LIMIT or copies > CHANNELS_LIMIT:
        raise BadDocument(f"packet CHANNELS of {computes} and {copies} channels: at most {CHANNELS_LIMIT} of a kind")
    compute, copy = channels[:computes], channels[CHANNELS_LIMIT : CHANNELS_LIMIT + copies]
    return Channels(
        _gpu(gpu), client, subdevice, compute, copy, bool(flags & UNLISTED), bool(flags & FRESH), bool(flags & AWAY)
    )


def _what(what: int) -> ActivityKind:
    if not ActivityKind.WORK <= what <= ActivityKind.RESUMED:
        raise BadDocument(f"packet ACTIVITY has state {what}: it must be {ActivityKind.WORK} to {ActivityKind.RESUMED}")
    return ActivityKind(what)


def _held(held: int) -> HoldState:
    if not HoldState.MADE <= held <= HoldState.STILL_OPEN:
        raise BadDocument(
            f"packet HOLD or DROP has state {held}: it must be {HoldState.MADE} to {HoldState.STILL_OPEN}"
        )
    return HoldState(held)


def _space(space: int) -> Space:
    if not Space.IPC <= space <= Space.POOL:
        raise BadDocument(f"packet HOLD or DROP has a key of kind {space}: kinds are {Space.IPC} to {Space.POOL}")
    return Space(space)


def _report(reason: int, active: int) -> Report:
    if not 1 <= reason <= REASONS_LIMIT or active > 1:
        raise BadDocument(f"packet REPORT of reason {reason}, active {active}: 1 to {REASONS_LIMIT}, and 0 or 1")
    return Report(reason, bool(active))


def _step(step: int) -> Step:
    if not Step.BEGIN <= step <= Step.GROWN:
        raise BadDocument(f"packet CONTEXT has step {step}: steps are {Step.BEGIN} to {Step.GROWN}")
    return Step(step)


def _gpu(gpu: int) -> int:
    if gpu >= GPUS_LIMIT:
        raise BadDocument(f"packet names GPU {gpu}: GPUs are 0 to {GPUS_LIMIT - 1}")
    return gpu


def _fitting(text: str, size_bytes: int) -> bytes:
    """The longest prefix of a text that fits before a closing zero byte, in whole characters."""
    return text.encode(errors="replace")[: size_bytes - 1].decode(errors="ignore").encode()


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
