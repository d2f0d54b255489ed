"""Files that others read during a write: written beside and renamed, so that no reader ever sees half of one.

What stands beside has one fixed name, so a writer that was killed leaves at most that, and the next one takes it over. It may also be
made long before (`create_temporary`): a new file costs the file system more than a rename, and a start of a container needs several.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_FOLDER_MODE: Final = 0o755
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_BEGUN: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

AnyPath = str | os.PathLike[str]


class FileVersion(NamedTuple):
    """Of a file: another one has other content. A writer in place, with as many bytes and within one tick of the kernel's
    clock (some milliseconds) of the check before, is not seen; what this module writes is a new file each time."""

    inode: int
    size: int
    changed_ns: int


def version_of(path: AnyPath) -> FileVersion | None:
    """None when there is no such file. Raises OSError when that cannot be determined."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return FileVersion(found.st_ino, found.st_size, found.st_mtime_ns)


def write_atomically(
    path: AnyPath, content: bytes, mode: int, *, durable: bool = False, temporary: AnyPath | None = None
) -> None:
    """`path` has `content` with these permission bits, or what it had before.

    `durable`: also after a loss of power, as soon as this returns. That waits for the disk. `temporary`: where it is begun, if not under
    the name of its own that a file has for that; in the same folder, and of one writer at a time.
    """
    temporary = temporary_path(path) if temporary is None else temporary
    descriptor, size = _open_begun(temporary, mode)
    try:
        try:
            _write_all(descriptor, content)
            if size > len(content):  # not before: ext4 waits for the disk when a file that was emptied is closed
                os.ftruncate(descriptor, len(content))
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync(os.path.dirname(path))


def create_temporary(temporary: AnyPath) -> None:
    """An empty file for the next `write_atomically` that begins there, unless there is one. Raises OSError."""
    with suppress(FileExistsError):
        os.close(os.open(temporary, _NEW, 0o600))


def _open_begun(temporary: AnyPath, mode: int) -> tuple[int, int]:
    """A file that was begun, with its size, where it has no other name; else a new one."""
    try:
        descriptor = os.open(temporary, _BEGUN)
    except FileNotFoundError:
        return os.open(temporary, _NEW, mode), 0
    except OSError:
        pass  # a link, a folder, or not ours to write: it goes
    else:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return descriptor, found.st_size
        os.close(descriptor)
    os.unlink(temporary)
    return os.open(temporary, _NEW, mode), 0


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def sync(path: AnyPath) -> None:
    """The content of a file, or what was created, renamed or removed in a folder, outlives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_temporary(path: AnyPath) -> Path:
    """Remove what a writer of `path` left that was killed. Returns where it would be."""
    temporary = Path(temporary_path(path))
    temporary.unlink(missing_ok=True)
    return temporary


def make_folder(path: AnyPath) -> bool:
    """A folder that all users may read, whatever the umask. Returns whether it is new."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = 0
    new = not stat.S_ISDIR(mode)
    if new:
        os.makedirs(path, exist_ok=True)
    if new or stat.S_IMODE(mode) != _FOLDER_MODE:
        os.chmod(path, _FOLDER_MODE)
    return new


def content_of(path: AnyPath) -> bytes | None:
    """None when there is no such file. Raises OSError when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError:
        return None


def size_of(path: AnyPath) -> int:
    """0 when there is no such file; and one is empty that a machine lost power over."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def temporary_path(path: AnyPath) -> str:
    """Where a writer of this file begins it."""
    folder, name = os.path.split(os.fspath(path))
    return f"{folder}/.{name}.new"
