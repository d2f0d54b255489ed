"""Files that others read while we write them: written beside and renamed, so that nobody ever sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """`path` holds `content` with these permission bits, or what it held before."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """A folder that everybody may read, whatever the umask."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)


def resolve_inside(root: Path, path: Path) -> Path:
    """`path` (below `root`) with its links followed as if `root` were `/`, as they are on the machine that the root came from."""
    for _ in range(40):
        if not path.is_symlink():
            return path
        target = path.readlink()
        path = root / target.relative_to("/") if target.is_absolute() else path.parent / target
    return path
