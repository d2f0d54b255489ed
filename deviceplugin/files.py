"""Files that others read while we write them: written beside and renamed, so that nobody ever sees half of one.

What stands beside has one fixed name, so a writer that was killed leaves at most that, and the next one takes it over.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_FOLDER_MODE: Final = 0o755
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_whole(path: Path, content: bytes, mode: int, *, durable: bool = False) -> None:
    """`path` holds `content` with these permission bits, or what it held before.

    `durable`: also after a loss of power, as soon as this returns. That waits for the disk.
    """
    beside = path.with_name(_begun(path.name))
    try:
        descriptor = os.open(beside, _NEW, mode)
    except FileExistsError:
        beside.unlink()
        descriptor = os.open(beside, _NEW, mode)
    try:
        try:
            _write_all(descriptor, content)
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def sync(path: Path) -> None:
    """What a file holds, or what was created, renamed or removed in a folder, outlives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_leftover(path: Path) -> Path:
    """Remove what a writer of `path` left that was killed. Answers where it would be."""
    beside = path.with_name(_begun(path.name))
    beside.unlink(missing_ok=True)
    return beside


def make_folder(path: Path) -> bool:
    """A folder that everybody may read, whatever the umask. Answers whether it is new."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0
    new = not stat.S_ISDIR(mode)
    if new:
        path.mkdir(parents=True, exist_ok=True)
    if new or stat.S_IMODE(mode) != _FOLDER_MODE:
        path.chmod(_FOLDER_MODE)
    return new


def content_of(path: Path) -> bytes | None:
    """None when there is no such file. Raises OSError when it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def size_of(path: Path) -> int:
    """0 when there is no such file; and one is empty that a machine lost power over."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def resolve_inside(root: Path, path: Path) -> Path:
    """`path` (below `root`) with its links followed as if `root` were `/`, as they are on the machine that the root came from."""
    for _ in range(40):
        if not path.is_symlink():
            return path
        target = path.readlink()
        path = root / target.relative_to("/") if target.is_absolute() else path.parent / target
    return path


def _begun(name: str) -> str:
    """The name under which a writer of a file of this name begins it."""
    return f".{name}.new"
