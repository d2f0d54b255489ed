"""Which driver is there, and which GPUs it is bound to, without a call of it: a child that opened another one must be replaced.

NVML lists the GPUs that there are when it is opened, so a child that was started before a GPU came or went must be replaced, too. An upgrade puts another library under the same path while the old one stays mapped, and another module into the kernel.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Final

from nvml.driver_root import VERSION, locate

MODULE: Final = Path("/sys/module/nvidia")
BUS: Final = Path("sys/bus/pci/drivers/nvidia")
"""Has a link for each GPU that the driver is bound to, by its PCI address. Under the driver root, else under /."""
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """Of a driver. Parts that cannot be read are empty."""

    library: tuple[int, ...]
    """Device, inode, size and time of change of the file."""
    version: str
    """As the kernel module reports."""
    module: int
    """A number that the kernel gives a module each time it is loaded."""
    gpus: tuple[tuple[str, int, str], ...] = ()
    """PCI address, inode and target of the link of each GPU that the driver is bound to: they differ after a GPU was taken out and put in again."""

    @property
    def on_bus(self) -> frozenset[str] | None:
        """PCI addresses of those; None where they cannot be read."""
        return frozenset(address for address, _, _ in self.gpus) or None

    def changed_from(self, before: DriverIdentity) -> str:
        """What is another than before, in words."""
        if replace(self, gpus=()) != replace(before, gpus=()):
            return "the driver was replaced"
        had, has = {gpu[0] for gpu in before.gpus}, {gpu[0] for gpu in self.gpus}
        named = [f"{', '.join(sorted(has - had))} came"] if has - had else []
        named += [f"{', '.join(sorted(had - has))} went"] if had - has else []
        again = {gpu[0] for gpu in self.gpus if gpu not in before.gpus} & had
        named += [f"{', '.join(sorted(again))} went and came"] if again else []
        return f"the GPUs of the machine changed: {'; '.join(named)}"


def identity(driver_root: Path, mapped: str, version: Path = VERSION, module: Path = MODULE) -> DriverIdentity:
    """Of the driver under this root. `mapped`: the library in use, where none is under the root; empty = not known yet."""
    place = locate(driver_root)
    library = place.library if place is not None else Path(mapped) if mapped else None
    under_root = driver_root / BUS
    bus = under_root if under_root.is_dir() else Path("/") / BUS
    return DriverIdentity(_file(library) if library is not None else (), _text(version), _inode(module), _bound(bus))


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

    @property
    def change(self) -> str:
        """What `changed` saw last, in words."""
        return self._there.changed_from(self.opened)

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


def _bound(bus: Path) -> tuple[tuple[str, int, str], ...]:
    """By address. A link that goes meanwhile is left out."""
    found = []
    try:
        with os.scandir(bus) as entries:
            for entry in entries:
                if _ADDRESS.match(entry.name):
                    with suppress(OSError):
                        found.append((entry.name, entry.inode(), str(Path(entry.path).readlink())))
    except OSError:
        return ()
    return tuple(sorted(found))
