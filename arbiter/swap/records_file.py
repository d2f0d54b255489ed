"""The records of one GPU's host pool on the node. A write appends what changed, as one line. If the file has become long, or it may not be as it was left, all
records are written beside it and put in its place.

A write does not wait for the disk: records outlive the arbiter, and are worth nothing after a reboot.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from errno import EFBIG, ENOSPC
from pathlib import Path
from typing import Final

import msgspec
import structlog

from vgpu.api.errors import BadDocument
from vgpu.memory import swap_records
from vgpu.memory.swap_records import Key, PoolRecords, SwapRecord

SUFFIX: Final = ".swap.json"
SPARE_BYTES: Final = 64 * 2**10
"""A file may become twice as long as its first line, and so much longer. Guessed: a thousand records, so that few records are not written whole each time."""
_log = structlog.get_logger()


def gpus_with_records(folder: Path) -> list[str]:
    """The GPUs of which there is a file."""
    try:
        return sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
    except OSError as error:
        _log.error("the folder of swap records cannot be read", folder=str(folder), reason=str(error))
        return []


class RecordsFile:
    """The file of one GPU."""

    def __init__(self, folder: Path, gpu: str, boot_id: str) -> None:
        self._path, self._gpu, self._boot_id = folder / f"{gpu}{SUFFIX}", gpu, boot_id
        self._failed = self._pool = ""
        self._encoded: dict[Key, bytes] = {}
        """What the file has, or is to have: each record in JSON."""
        self._inode = self._bytes = self._first_bytes = 0
        """Of the file, as it was left, and of its first line; 0 bytes = it was not written yet, or a write failed."""

    def read(self) -> PoolRecords:
        """The records of this boot, to which `write` adds. None of a file that cannot be read: what it named cannot come back, and that is logged."""
        try:
            with self._path.open("rb") as file:
                content = file.read(swap_records.LARGEST_BYTES + 1)
            if len(content) > swap_records.LARGEST_BYTES:
                raise BadDocument(f"records of more than {swap_records.LARGEST_BYTES} bytes")
            found = swap_records.from_bytes(content, gpu=self._gpu, boot_id=self._boot_id)
            self._encoded = {one.key: msgspec.json.encode(one) for one in found.records}
            return found
        except FileNotFoundError:
            return PoolRecords()
        except (OSError, BadDocument) as error:
            _log.error("swap records cannot be read: memory that is away is lost", path=str(self._path), reason=str(error))  # fmt: skip
            return PoolRecords()

    def write(self, drop: Iterable[Key], put: Iterable[SwapRecord], pool: str) -> bool:
        """Remove records, and then add or replace others, of the pool's file `pool`. False: what the file has is as before. A failure is logged once."""
        drop, put = list(drop), list(put)
        for key in drop:
            self._encoded.pop(key, None)
        for record in put:
            self._encoded[record.key] = msgspec.json.encode(record)
        try:
            if pool != self._pool or not self._append(swap_records.change_to_bytes(drop, put)):
                self._replace(pool)
        except OSError as error:
            self._bytes = 0
            if str(error) != self._failed:
                _log.error("swap records cannot be written: nothing is swapped out", path=str(self._path), reason=str(error))  # fmt: skip
            self._failed = str(error)
            return False
        self._failed = ""
        return True

    def _append(self, line: bytes) -> bool:
        """Whether the file has the line now. Not if the file is not the one that was written last, is long, or cannot take the line as a whole."""
        most_bytes = min(2 * self._first_bytes + SPARE_BYTES, swap_records.LARGEST_BYTES)
        if not self._bytes or self._bytes + len(line) > most_bytes:
            return False
        try:
            with open(self._path, "ab", buffering=0, opener=_existing) as file:
                found = os.fstat(file.fileno())
                if (found.st_ino, found.st_size) != (self._inode, self._bytes):
                    return False
                self._bytes += len(line)
                return os.write(file.fileno(), line) == len(line)
        except OSError:
            return False

    def _replace(self, pool: str) -> None:
        """Raises OSError."""
        beside = self._path.with_name(f".{self._path.name}.new")
        content = swap_records.joined(self._encoded.values(), gpu=self._gpu, boot_id=self._boot_id, pool=pool)
        if len(content) > swap_records.LARGEST_BYTES:
            raise OSError(
                EFBIG, f"the records have more than {swap_records.LARGEST_BYTES} bytes, and could not be read again"
            )
        try:
            with beside.open("wb", buffering=0) as file:
                self._bytes = 0
                if file.write(content) != len(content):
                    raise OSError(ENOSPC, "the records were not written as a whole")
                inode = os.fstat(file.fileno()).st_ino
            beside.replace(self._path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        self._pool, self._inode = pool, inode
        self._bytes = self._first_bytes = len(content)


def _existing(path: str, flags: int) -> int:
    """A new file would not have the records of before."""
    return os.open(path, (flags & ~os.O_CREAT) | os.O_CLOEXEC)
