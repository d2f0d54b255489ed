"""The records of one GPU's host pool: which slot has the content of which block of which process.

A record is there from before its block is unmapped until its process has shown that it has the content back. So whoever reads the records after a sudden end knows
of every block that may be away. A record too many is harmless: the process knows which of its blocks are away.
`pool` names the file that has the content (`vgpu.protocol.copier.PoolFile`): what another file has at the same offset is worth nothing.

The file has the records of one moment in its first line, and in each further line what one write changed, both sealed (`vgpu.api.sealed`):

    {"v": 2, "sha256": "<of the bytes of body>", "body": {"boot_id": "...", "gpu": "GPU-...", "pool": "...", "records": [...]}}
    {"sha256": "...", "body": {"drop": [[pid, started, block], ...], "put": [record, ...]}}

The first line is put in place as a whole, by a rename. Any other is appended by one write, and counts once that has returned: what follows the last end of a line
is of a writer that was killed, and nothing was done yet that relied on it. In a line, `drop` comes before `put`.

Pure; what is written where is `arbiter.swap.records_file`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from vgpu.api.errors import BadDocument
from vgpu.api.sealed import UNREADABLE, seal, unseal, version_of
from vgpu.memory.swap_slots import GRAIN_BYTES

VERSION: Final = 2
LARGEST_BYTES: Final = 64 * 2**20
"""Of a file. Guessed: half a million blocks, which of the smallest size are 1 TiB."""


Stage = Literal["away", "made", "filled"]
"""made: the process was ordered to make the block again, so it may take memory of the GPU. filled: its content is back on the GPU, and the process may not know yet; it
must be sent FILLED, and nothing may be copied to the block again."""


Key = tuple[int, int, int]
"""Of a block: pid, start of the process, number."""


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

    @property
    def key(self) -> Key:
        """Of the block: no other has it, in one boot."""
        return self.pid, self.started, self.block

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


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    drop: list[Key]
    put: list[SwapRecord]


@dataclass(frozen=True, slots=True)
class PoolRecords:
    """The records of a pool. `pool`: the identity of its file; empty only if there is no record."""

    pool: str = ""
    records: tuple[SwapRecord, ...] = ()


_NAME: Final = "the file"
_bodies = msgspec.json.Decoder(_Body)
_changes = msgspec.json.Decoder(_Change)


def joined(encoded: Iterable[bytes], *, gpu: str, boot_id: str, pool: str) -> bytes:
    """The file of these records, each in JSON. One of another boot is worth nothing: the GPU's memory and the pool are gone."""
    none = msgspec.json.encode(_Body(boot_id, gpu, pool, []))
    body = b"".join((none.removesuffix(b"]}"), b",".join(encoded), b"]}"))
    return seal(body, VERSION) + b"\n"


def change_to_bytes(drop: Iterable[Key], put: Iterable[SwapRecord]) -> bytes:
    """The line of a change."""
    return seal(msgspec.json.encode(_Change(list(drop), list(put)))) + b"\n"


def from_bytes(content: bytes, *, gpu: str, boot_id: str) -> PoolRecords:
    """The records of a file; empty if it is of another boot. Raises BadDocument, also if two records name one block or part of one slot; NewerVersion."""
    first, *others = content.split(b"\n")
    try:
        version_of(first, oldest=VERSION, newest=VERSION, name=_NAME, reader="arbiter")
        body = _bodies.decode(unseal(first, name=_NAME))
        changes = [_changes.decode(unseal(line, name=_NAME)) for line in others[:-1]]
    except UNREADABLE as error:
        raise BadDocument(f"{len(content)} bytes that are no records: {str(error)[:300]}") from None
    if not boot_id or body.boot_id != boot_id:
        return PoolRecords()
    if body.gpu != gpu:
        raise BadDocument(f"records of GPU {body.gpu[:100]!r}: they must be of {gpu}")
    records = _applied(body.records, changes)
    if records and not body.pool:
        raise BadDocument(f"{len(records)} records of no pool: they must name its file")
    _check(records)
    return PoolRecords(body.pool, records)


def _applied(records: list[SwapRecord], changes: Iterable[_Change]) -> tuple[SwapRecord, ...]:
    found = {one.key: one for one in records}
    if len(found) < len(records):
        raise BadDocument("records name one block of a process twice")
    for change in changes:
        for key in change.drop:
            found.pop(key, None)
        found.update((one.key, one) for one in change.put)
    return tuple(found.values())


def _check(records: Iterable[SwapRecord]) -> None:
    end = 0
    for one in sorted(records, key=lambda one: one.offset):
        if one.offset < end:
            raise BadDocument(f"the slot at {one.offset} of block {one.block} of process {one.pid} is used twice")
        end = one.offset + one.bytes
