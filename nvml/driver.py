"""Which driver is there, without a call of it: a child that opened another one must be replaced.

An upgrade puts another library under the same path while the old one stays mapped, and another module into the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from nvml.library import LIBRARY, library_folder

VERSION: Final = Path("/proc/driver/nvidia/version")
MODULE: Final = Path("/sys/module/nvidia")


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """Of a driver. Parts that cannot be read are empty."""

    library: tuple[int, ...]
    """Device, inode, size and time of change of the file."""
    version: str
    """As the kernel module reports."""
    module: int
    """A number that the kernel gives a module each time it is loaded."""


def identity(driver_root: Path, mapped: str, version: Path = VERSION, module: Path = MODULE) -> DriverIdentity:
    """Of the driver under this root. `mapped`: the library in use, where none is under the root; empty = not known yet."""
    folder = library_folder(driver_root)
    library = folder / LIBRARY if folder is not None else Path(mapped) if mapped else None
    return DriverIdentity(_file(library) if library is not None else (), _text(version), _inode(module))


class DriverWatch:
    """Whether the driver that a child opened is still the one that is there; checked once in `every_s`."""

    def __init__(
        self, driver_root: Path, every_s: float, identify: Callable[[Path, str], DriverIdentity] = identity
    ) -> None:
        self._driver_root, self._every_s, self._identify = driver_root, every_s, identify
        self.opened = self._there = DriverIdentity((), "", 0)
        """The one that the last child opened."""
        self._path = ""
        self._checked_at_s = -inf

    def opens(self) -> None:
        """A child opens the one that is there now."""
        self.opened = self._check_now()

    def has_opened(self, path: str) -> bool:
        """The child found the library there. Returns whether the driver was still the same."""
        self._path = path
        before, self.opened = self.opened, self._check_now()
        return not before.library or before == self.opened

    def changed(self) -> bool:
        """Is another one there than the last child opened?"""
        if time.monotonic() - self._checked_at_s >= self._every_s:
            self._check_now()
        return self._there != self.opened

    def _check_now(self) -> DriverIdentity:
        self._checked_at_s = time.monotonic()
        self._there = self._identify(self._driver_root, self._path)
        return self._there


def _file(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
