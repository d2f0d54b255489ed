"""The verdicts of this boot's trials, from the device plugin's file: whether the channels on these GPUs may be suspended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import structlog

from vgpu.api.errors import BadDocument
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.trial_verdict import Suspendability, Trials, suspendability, trials_from_text

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
MODULE_VERSION: Final = Path("/sys/module/nvidia/version")
_log = structlog.get_logger()


class TrialsFile:
    """Reads the file when it has changed. A missing or unreadable file is no verdict: it is no evidence that suspends work.

    `version` has the driver's version. If it cannot be read, the verdicts' own version counts, which is NVML's; without one, the
    driver is unknown. It is read each time, because a driver may be loaded after the arbiter's start, or be replaced.
    """

    def __init__(self, path: Path, *, boot_id: str, version: Path = MODULE_VERSION) -> None:
        self._path, self._boot_id, self._version = path, boot_id, version
        self._read: tuple[int, int, int] | None = None
        self._trials: Trials | None = None

    def of(self, uuids: Iterable[str]) -> Suspendability:
        """The present verdict for these GPUs together."""
        self._refresh()
        named = self._trials.driver if self._trials is not None and self._trials.boot_id == self._boot_id else ""
        driver = text_of(self._version) or named
        return suspendability(self._trials, uuids, boot_id=self._boot_id, driver=driver, known=rm.is_known(driver))

    def _refresh(self) -> None:
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
    """The text of a kernel file; empty = the file does not exist."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
