"""Files that others read while we write them: written beside and renamed, so that nobody ever sees half of one.

What stands beside has one fixed name, so a writer that was killed leaves at most that, and the next one takes it over.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int, *, durable: bool = False) -> None:
    """`path` holds `content` with these permission bits, or what it held before.

    `durable`: also after a loss of power, as soon as this returns. That waits for the disk.
    """
    beside = discard_leftover(path)
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
        if durable:
            sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """What a file holds, or what was created, renamed or removed in a folder, outlives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_leftover(path: Path) -> Path:
    """Remove what a writer of `path` left that was killed. Answers where it would be."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    return beside


def make_folder(path: Path) -> bool:
    """A folder that everybody may read, whatever the umask. Answers whether it is new."""
    new = not path.is_dir()
    if new:
        path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
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
