"""The records of one GPU's host pool on the node: written whole, beside the old file, and put in its place.

A write does not wait for the disk: records outlive the arbiter, and are worth nothing after a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from vgpu.api.errors import BadDocument
from vgpu.memory import swap_records
from vgpu.memory.swap_records import PoolRecords, SwapRecord

SUFFIX: Final = ".swap.json"
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
        self._failed = ""

    def read(self) -> PoolRecords:
        """The records of this boot. None of a file that cannot be read: what it named cannot come back, and that is logged."""
        try:
            with self._path.open("rb") as file:
                content = file.read(swap_records.LARGEST_BYTES + 1)
            if len(content) > swap_records.LARGEST_BYTES:
                raise BadDocument(f"records of more than {swap_records.LARGEST_BYTES} bytes")
            return swap_records.from_bytes(content, gpu=self._gpu, boot_id=self._boot_id)
        except FileNotFoundError:
            return PoolRecords()
        except (OSError, BadDocument) as error:
            _log.error("swap records cannot be read: memory that is away is lost", path=str(self._path), reason=str(error))  # fmt: skip
            return PoolRecords()

    def write(self, records: Iterable[SwapRecord], pool: str) -> bool:
        """Replace the file. False: the old one is still there. A failure is logged once."""
        beside = self._path.with_name(f".{self._path.name}.new")
        try:
            beside.write_bytes(swap_records.to_bytes(records, gpu=self._gpu, boot_id=self._boot_id, pool=pool))
            beside.replace(self._path)
        except OSError as error:
            if str(error) != self._failed:
                _log.error("swap records cannot be written: nothing is swapped out", path=str(self._path), reason=str(error))  # fmt: skip
            self._failed = str(error)
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            return False
        self._failed = ""
        return True
