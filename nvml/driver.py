"""Which driver is there, without a call of it: a child that opened another one is of no use any more.

An upgrade puts another library under the same path while the old one stays mapped, and another module into the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvml.library import LIBRARY, library_folder

VERSION: Final = Path("/proc/driver/nvidia/version")
MODULE: Final = Path("/sys/module/nvidia")


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a driver. Parts that cannot be read are empty."""

    library: tuple[int, ...]
    """Device, inode, size and time of change of the file."""
    version: str
    """As the kernel's part says."""
    module: int
    """A number that the kernel gives a module each time it is loaded."""


def identity(driver_root: Path, mapped: str, version: Path = VERSION, module: Path = MODULE) -> Identity:
    """Of the driver under this root. `mapped`: the library in use, where none is under the root; empty = not known yet."""
    folder = library_folder(driver_root)
    library = folder / LIBRARY if folder is not None else Path(mapped) if mapped else None
    return Identity(_file(library) if library is not None else (), _text(version), _inode(module))


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
