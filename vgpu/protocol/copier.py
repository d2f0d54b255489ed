"""The protocol between the arbiter and the copier, version 1: messages to packets and back.

A copier copies blocks of GPU memory between one GPU and its pool of host memory. One packet of a SOCK_SEQPACKET socket is one message: a header of 16
bytes and a body whose size its type fixes. Everything is little-endian. docs/reference/copier.md specifies which side sends which message and when;
shim/copier/protocol.h is the same in C. This module handles bytes only: no socket, no pool.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

from vgpu.api.errors import BadDocument, NewerVersion

MAGIC: Final = 0x43474E54
"""'TNGC' in memory."""
VERSION: Final = 1
JOBS_LIMIT: Final = 128
"""Jobs that are not answered, of both directions together."""
GRAIN_BYTES: Final = 2 * 2**20
"""Slots and blocks are multiples of it."""
BLOCK_LIMIT_BYTES: Final = 2**44
PACKET_LIMIT: Final = 256
"""No packet is longer, in bytes."""
ERROR_TEXT_BYTES: Final = 124


class Result(IntEnum):
    """How a job ended. All but COPIED, FORGOTTEN and DRIVER_FAILED: nothing was begun, and nothing changed."""

    COPIED = 0
    BAD_SLOT = 1
    """Not inside the pool, or no multiple of the grain."""
    BAD_SIZE = 2
    """0, above 16 TiB, or no multiple of the grain."""
    NO_DESCRIPTOR = 3
    TOO_MANY_JOBS = 4
    NOT_READY = 5
    """The pool is not registered yet."""
    SLOT_IN_USE = 6
    """A job that is not answered has part of that slot, also one of an earlier connection."""
    FORGOTTEN = 7
    """By FORGET: what it was to fill has old or new content, or some of both."""
    DRIVER_FAILED = 8
    """Likewise."""
    ENDING = 9
    """The copier ends after the jobs that it has."""


class Reason(IntEnum):
    """Why the copier rejected a packet or a connection."""

    BAD_PACKET = 1
    """The packet changed nothing, and the connection stays."""
    OCCUPIED = 2
    """The copier serves another connection, and closes this one."""
    NOT_ALLOWED = 3
    """This process may not connect, and the copier closes the connection."""


class Pages(IntEnum):
    """What the pool consists of."""

    NO_PAGES = 0
    """It is not allocated yet."""
    PLAIN_PAGES = 1
    TRANSPARENT_PAGES = 2
    HUGETLB_PAGES = 3


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a block, whose descriptor comes along, to a slot of the pool."""

    job: int
    """Chosen by the arbiter; differs from those of all jobs that are not answered."""
    slot_offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a slot of the pool to a block, whose descriptor comes along."""

    job: int
    slot_offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Forget:
    """End a job early, if it has not ended. Its DONE comes as ever."""

    job: int


@dataclass(frozen=True, slots=True)
class Status:
    """Request a STATE."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job has ended: its block is released."""

    job: int
    result: Result
    cuda_error: int
    copied_bytes: int
    microseconds: int
    """From its import to its release."""


@dataclass(frozen=True, slots=True)
class PoolFile:
    """Which file a pool is. Two that are equal are one file: an inode number alone may be given again."""

    file_system: int
    """The identity of the mount: random for a tmpfs since Linux 5.13."""
    inode: int
    born_ns: int
    """When the inode was made; 0 = the file system does not know (hugetlbfs, and a tmpfs before Linux 6.0)."""

    def __str__(self) -> str:
        return f"{self.file_system:x}:{self.inode}:{self.born_ns}"


@dataclass(frozen=True, slots=True)
class State:
    """The copier and its pool."""

    pool_bytes: int
    allocated_bytes: int
    registered_bytes: int
    context_mib: int
    """The copier's own memory on the GPU; 0 = not known."""
    ready: bool
    """It takes jobs."""
    pages: Pages
    jobs: int
    """Not answered."""
    file: PoolFile | None = None
    """None: there is none yet, or the copier is of an earlier release (`_STATE_BEFORE`)."""


@dataclass(frozen=True, slots=True)
class Error:
    """A packet or a connection was rejected."""

    reason: Reason
    text: str


Request = Save | Restore | Forget | Status
Answer = Done | State | Error
Message = Request | Answer
Known = TypeVar("Known", bound=IntEnum)

_HEADER: Final = struct.Struct("<IHHII")
_JOB: Final = struct.Struct("<QQQ")
_FORGET: Final = struct.Struct("<Q")
_STATUS: Final = struct.Struct("<")
_DONE: Final = struct.Struct("<QIIQQ")
_STATE_BEFORE: Final = struct.Struct("<QQQIIII")
"""STATE of a copier of an earlier release, which does not state its file."""
_STATE: Final = struct.Struct("<QQQIIIIQQQ")
_ERROR: Final = struct.Struct(f"<I{ERROR_TEXT_BYTES}s")

_TYPES: Final[dict[type[Message], int]] = {Save: 1, Restore: 2, Forget: 3, Status: 4, Done: 5, State: 6, Error: 7}
_REQUESTS: Final[dict[int, type[Request]]] = {1: Save, 2: Restore, 3: Forget, 4: Status}
_BODIES: Final = {1: _JOB, 2: _JOB, 3: _FORGET, 4: _STATUS, 5: _DONE, 6: _STATE, 7: _ERROR}


def encode(message: Message) -> bytes:
    """The packet of a message."""
    body = _body(message)
    return _HEADER.pack(MAGIC, VERSION, _TYPES[type(message)], len(body), 0) + body


def decode(packet: bytes) -> Message:
    """The message of a packet. Raises BadDocument, NewerVersion."""
    if len(packet) < _HEADER.size:
        raise BadDocument(f"packet of {len(packet)} bytes: the header has {_HEADER.size}")
    magic, version, kind, body_bytes, _ = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise BadDocument(f"packet begins with {magic:#x}: a copier's begins with {MAGIC:#x}")
    if version > VERSION:
        raise NewerVersion(f"packet of version {version}: this Tangram speaks version {VERSION}")
    form = _BODIES.get(kind)
    if kind == _TYPES[State] and body_bytes == _STATE_BEFORE.size:
        form = _STATE_BEFORE
    if version != VERSION or form is None:
        raise BadDocument(
            f"packet of version {version} and type {kind}: version {VERSION} has types 1 to {len(_BODIES)}"
        )
    if body_bytes != form.size or len(packet) != _HEADER.size + body_bytes:
        raise BadDocument(
            f"packet of type {kind} announces {body_bytes} bytes and carries {len(packet) - _HEADER.size}: both must be {form.size}"
        )
    return _message(kind, form.unpack_from(packet, _HEADER.size))


def _body(message: Message) -> bytes:
    match message:
        case Save() | Restore():
            return _JOB.pack(message.job, message.slot_offset, message.bytes)
        case Forget():
            return _FORGET.pack(message.job)
        case Status():
            return b""
        case Done():
            return _DONE.pack(
                message.job, message.result, message.cuda_error, message.copied_bytes, message.microseconds
            )
        case State():
            return _STATE.pack(
                message.pool_bytes, message.allocated_bytes, message.registered_bytes, message.context_mib,
                message.ready, message.pages, message.jobs, *(astuple(message.file) if message.file else (0, 0, 0)),
            )  # fmt: skip
        case Error():
            text = message.text.encode(errors="replace")[: ERROR_TEXT_BYTES - 1].decode(errors="ignore").encode()
            return _ERROR.pack(message.reason, text)


def _message(kind: int, fields: tuple[Any, ...]) -> Message:
    if kind == _TYPES[Done]:
        job, result, cuda_error, copied_bytes, microseconds = fields
        return Done(job, _known(Result, result, "DONE has result"), cuda_error, copied_bytes, microseconds)
    if kind == _TYPES[State]:
        pool_bytes, allocated_bytes, registered_bytes, context_mib, ready, pages, jobs, *file = fields
        if ready > 1:
            raise BadDocument(f"packet STATE has ready {ready}: it must be 0 or 1")
        consists_of = _known(Pages, pages, "STATE has pages")
        known = PoolFile(*file) if any(file) else None
        return State(pool_bytes, allocated_bytes, registered_bytes, context_mib, bool(ready), consists_of, jobs, known)
    if kind == _TYPES[Error]:
        reason, text = fields
        return Error(_known(Reason, reason, "ERROR has reason"), text.split(b"\0", 1)[0].decode(errors="replace"))
    return _REQUESTS[kind](*fields)


def _known(kind: type[Known], value: int, what: str) -> Known:
    try:
        return kind(value)
    except ValueError:
        raise BadDocument(f"packet {what} {value}: it must be {min(kind)} to {max(kind)}") from None
