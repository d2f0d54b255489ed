"""The folders of the pools' files, and what is in them. Removes nothing."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SUFFIX: Final = ".pool"
MEMINFO: Final = Path("/proc/meminfo")
_TOTAL: Final = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)


def usable(folders: Sequence[Path]) -> tuple[list[Path], str]:
    """The folders that may have a pool, and why the others may not; makes those that are not there.

    A file of the pool has GPU memory of containers: only this program's user may reach it.
    """
    good, wrong = [], []
    for folder in folders:
        why = _trouble(folder)
        if why:
            wrong.append(f"{folder}: {why}")
        else:
            good.append(folder)
    return good, "; ".join(wrong)


def pool_files(folders: Sequence[Path], gpu: str) -> list[Path]:
    """Where a GPU's pool may be, in the order of the folders."""
    return [folder / f"{gpu}{SUFFIX}" for folder in folders]


def sizes(folders: Sequence[Path]) -> Mapping[str, int]:
    """GPU -> bytes of the pool files that exist. One that cannot be read is left out: the copier says why."""
    found: dict[str, int] = {}
    for folder in folders:
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                gpu = entry.name.removesuffix(SUFFIX)
                try:
                    found[gpu] = found.get(gpu, 0) + entry.stat(follow_symlinks=False).st_size
                except OSError:
                    continue
    return found


def file_in_use(paths: Sequence[Path]) -> tuple[str, str]:
    """(path, device and inode number) of the pool file that is there; empty when there is none."""
    for path in paths:
        try:
            found = path.stat(follow_symlinks=False)
        except OSError:
            continue
        if found.st_size:
            return str(path), f"{found.st_dev}:{found.st_ino}"
    return "", ""


def memory_bytes(meminfo: Path = MEMINFO) -> int:
    """Memory of the node. Raises OSError."""
    found = _TOTAL.search(meminfo.read_text())
    if found is None:
        raise OSError(f"{meminfo} has no line MemTotal")
    return int(found[1]) * 1024


def _trouble(folder: Path) -> str:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat(follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            return "it is a link, not a folder"
        if found.st_uid != os.geteuid():
            return f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        return error.strerror or str(error)
    return ""
