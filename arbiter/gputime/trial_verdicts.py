"""The verdicts of this boot's trials, as the device plugin wrote them: may the channels on these GPUs be suspended?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import structlog

from vgpu.api.errors import BadDocument
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.trial import Suspending, Trials, suspending, trials_from_text

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
MODULE_VERSION: Final = Path("/sys/module/nvidia/version")
_log = structlog.get_logger()


class Verdicts:
    """Reads the file when it has changed. One that is missing or cannot be read is no verdict: nothing is taken to work for its sake.

    `version` has the driver's version. Where it cannot be read, the verdicts' own counts, which is NVML's; where nobody says one, the
    driver is not known. It is read each time, as a driver may come later than the arbiter, or another in its place.
    """

    def __init__(self, path: Path, *, boot_id: str, version: Path = MODULE_VERSION) -> None:
        self._path, self._boot_id, self._version = path, boot_id, version
        self._read: tuple[int, int, int] | None = None
        self._trials: Trials | None = None

    def of(self, uuids: Iterable[str]) -> Suspending:
        """As things stand now, on these GPUs together."""
        self._look()
        named = self._trials.driver if self._trials is not None and self._trials.boot_id == self._boot_id else ""
        driver = text_of(self._version) or named
        return suspending(self._trials, uuids, boot_id=self._boot_id, driver=driver, known=rm.is_known(driver))

    def _look(self) -> None:
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._read:
                return
            self._read = seen
            self._trials = trials_from_text(self._path.read_bytes())
        except FileNotFoundError:
            self._read = self._trials = None
        except (OSError, BadDocument) as error:
            self._trials = None
            _log.error("the verdicts on this driver cannot be read", path=str(self._path), error=str(error))


def text_of(path: Path) -> str:
    """Of a file of the kernel; empty = it is not there."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
