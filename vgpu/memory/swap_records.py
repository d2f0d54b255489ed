"""The records of one GPU's host pool: which slot has the content of which block of which process.

A record is there from before its block is unmapped until its process has shown that it has the content back. So whoever reads the records after a sudden end knows
of every block that may be away. A record too many is harmless: the process knows which of its blocks are away.
`pool` names the file that has the content (`vgpu.protocol.copier.PoolFile`): what another file has at the same offset is worth nothing.

    {"v": 1, "sha256": "<of the bytes of body>", "body": {"boot_id": "...", "gpu": "GPU-...", "pool": "...", "records": [...]}}

Pure; what is written where is `arbiter.swap.records_file`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.memory.swap_slots import GRAIN_BYTES

VERSION: Final = 1
LARGEST_BYTES: Final = 64 * 2**20
"""Of a file. Guessed: half a million blocks, which of the smallest size are 1 TiB."""


Stage = Literal["away", "made", "filled"]
"""made: the process was ordered to make the block again, so it may take memory of the GPU. filled: its content is back on the GPU, and the process may not know yet; it
must be told, and nothing may be copied to the block again."""


class SwapRecord(msgspec.Struct, frozen=True, array_like=True):
    """One block of a process, and its slot. Sizes and offsets in bytes."""

    name: str
    """Of the container: its grant directory."""
    pid: int
    started: int
    """The process's start in clock ticks since boot: a pid alone may be used again."""
    block: int
    """The process's own number of it."""
    bytes: int
    offset: int
    """Of the slot in the pool."""
    stage: Stage = "away"

    def __post_init__(self) -> None:
        if self.pid <= 0 or self.started <= 0 or self.block < 0:
            raise BadDocument(f"record of block {self.block} of process {self.pid}, started at {self.started}")
        if self.bytes <= 0 or self.offset < 0 or self.bytes % GRAIN_BYTES or self.offset % GRAIN_BYTES:
            raise BadDocument(
                f"record of {self.bytes} bytes at {self.offset}: both must be multiples of {GRAIN_BYTES} bytes"
            )


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    boot_id: str
    gpu: str
    pool: str
    records: list[SwapRecord]


@dataclass(frozen=True, slots=True)
class PoolRecords:
    """The records of a pool. `pool`: the identity of its file; empty only if there is no record."""

    pool: str = ""
    records: tuple[SwapRecord, ...] = ()


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    sha256: str
    body: msgspec.Raw


class _Version(msgspec.Struct):
    v: int


_sealed = msgspec.json.Decoder(_Sealed)
_versions = msgspec.json.Decoder(_Version)
_bodies = msgspec.json.Decoder(_Body)


def to_bytes(records: Iterable[SwapRecord], *, gpu: str, boot_id: str, pool: str) -> bytes:
    """The file of these records. One of another boot is worth nothing: the GPU's memory and the pool are gone."""
    body = msgspec.json.encode(_Body(boot_id, gpu, pool, list(records)))
    return msgspec.json.encode(_Sealed(VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def from_bytes(content: bytes, *, gpu: str, boot_id: str) -> PoolRecords:
    """The records of a file; empty if it is of another boot. Raises BadDocument, also if two records name one block or part of one slot; NewerVersion."""
    try:
        version = _versions.decode(content).v
        if version != VERSION:
            kind = NewerVersion if version > VERSION else BadDocument
            raise kind(f"records of version {version}: this arbiter reads version {VERSION}")
        sealed = _sealed.decode(content)
        found = hashlib.sha256(sealed.body).hexdigest()
        if found != sealed.sha256:
            raise BadDocument(f"records are damaged: their checksum is {found[:12]}, it must be {sealed.sha256[:12]!r}")
        body = _bodies.decode(sealed.body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"{len(content)} bytes that are no records: {str(error)[:300]}") from None
    if not boot_id or body.boot_id != boot_id:
        return PoolRecords()
    if body.gpu != gpu:
        raise BadDocument(f"records of GPU {body.gpu[:100]!r}: they must be of {gpu}")
    if body.records and not body.pool:
        raise BadDocument(f"{len(body.records)} records of no pool: they must name its file")
    _check(body.records)
    return PoolRecords(body.pool, tuple(body.records))


def _check(records: list[SwapRecord]) -> None:
    if len({(one.pid, one.started, one.block) for one in records}) < len(records):
        raise BadDocument("records name one block of a process twice")
    end = 0
    for one in sorted(records, key=lambda one: one.offset):
        if one.offset < end:
            raise BadDocument(f"the slot at {one.offset} of block {one.block} of process {one.pid} is used twice")
        end = one.offset + one.bytes
