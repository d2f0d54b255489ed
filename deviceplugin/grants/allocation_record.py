"""The record of one allocation of gpu-mem: `allocation.json` in its grant directory. Its contents, and which directory it names.

A directory is made for one call of Allocate and never for another: its name has a random part, which the record repeats. So a
process that outlives its pod keeps its directory, whichever pod gets its device IDs next.

    <hash of the IDs, 16>-<order, 8><random, 7>    hexadecimal; the order counts the directories of the same IDs

The boot ID determines which processes and sockets may still be there: none of an earlier boot. The allocation itself outlives a boot, as
the kubelet's does: after it the kubelet may send PreStartContainer alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from deviceplugin.grants import checked_file as sealed
from vgpu.api.contract import grant_key
from vgpu.api.errors import BadDocument
from vgpu.api.sealed import UNREADABLE

RECORD: Final = "allocation.json"
WHAT: Final = "allocation"
_HASH: Final = 16
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})[0-9a-f]{7}\Z")
MOST_NAMES: Final = 4096
"""Of directories, that are not taken apart again: a start reads those of its IDs several times. Guessed."""
UNKNOWN_PLACE: Final = -1


class _Allocated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"gpus": "cards"}):
    """What every version of the record has."""

    ids: tuple[str, ...]
    uid: str
    namespace: str
    pod: str
    container: str
    gpus: tuple[str, ...]
    """UUIDs whose devices the container was given by Allocate."""
    at: float
    """Unix time."""


class Record(_Allocated, frozen=True, forbid_unknown_fields=True, rename={"gpus": "cards"}):
    """One allocation. The pod is our guess until a grant is written beside it: then it is known."""

    place: int = UNKNOWN_PLACE
    """Of the container among those of its pod that request GPUs, in the order of the pod spec, init containers first."""
    suffix: str = ""
    """The part of the directory's name that no other has. Empty: an earlier plugin named it, by the IDs alone."""
    boot: str = ""
    """Boot ID at Allocate."""

    @property
    def key(self) -> str:
        """Name of the directory."""
        return f"{hash_of(self.ids)}-{self.suffix}" if self.suffix else grant_key(self.ids)


class _Unsealed(_Allocated, frozen=True, forbid_unknown_fields=True):
    """As version 1 has it."""

    v: int


_records = msgspec.json.Decoder(Record)
_unsealed = msgspec.json.Decoder(_Unsealed)


def hash_of(ids: Iterable[str]) -> str:
    """What names of directories of these IDs begin with."""
    return grant_key(ids)[:_HASH]


def new_suffix(order: int) -> str:
    """For a directory that is newer than `order - 1` others of the same IDs."""
    return f"{order % 2**32:08x}{secrets.token_hex(4)[:7]}"


def order_of(key: str) -> int:
    """How new a directory is among those of the same IDs. One that an earlier plugin named is the oldest: 0."""
    return _order_in(key) or 0


@lru_cache(maxsize=MOST_NAMES)
def _order_in(key: str) -> int | None:
    """None: it is no name that `new_suffix` made."""
    found = _NAME.match(key)
    return int(found[2], 16) if found else None


def of_ids(keys: Iterable[str], ids: Iterable[str]) -> list[str]:
    """Those of these names that are of directories of exactly these IDs."""
    whole = grant_key(ids)
    begin = f"{whole[:_HASH]}-"
    return [key for key in keys if key == whole or (key.startswith(begin) and _order_in(key) is not None)]


def read_record(path: Path) -> Record | None:
    """The record of one allocation; None when there is none. Raises BadDocument that names file, value and range; OSError."""
    record_file = sealed.read(path, WHAT, oldest=sealed.UNSEALED)
    if record_file is None:
        return None
    try:
        if record_file.version == sealed.UNSEALED:
            old = msgspec.structs.asdict(_unsealed.decode(record_file.body))
            del old["v"]
            record = Record(**old)
        else:
            record = _records.decode(record_file.body)
    except UNREADABLE as error:
        raise BadDocument(f"{path} has {len(record_file.body)} bytes that are no {WHAT}: {str(error)[:300]}") from None
    if record.key != path.parent.name:
        raise BadDocument(f"{path} is about directory {record.key}: it must be about {path.parent.name}")
    return record
