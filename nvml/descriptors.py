"""Does a process have a GPU's device file open? By /proc/<pid>/fd, which only a process that may trace it can read.

A process that uses a GPU has its device file open, with memory there or without: a program that reads by NVML a temperature has it open, and so has a child of a CUDA
program. So an open file is no proof of memory. It is found by the device's number: a container may call the file what it likes. None = unknown,
as for maps (`nvml.mapped`).

A thread may have descriptors of its own (`unshare(CLONE_FILES)`), and the first thread may have ended: so each thread counts. In nearly every program all share one
table, which is read once where the kernel compares tables (`nvml.kcmp`); else each thread's is read. To read the number of a file can wait for the process that serves its file system. `nvml.mapped.MapsCheck` bounds that wait.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nvml.kcmp import is_ours, share_files

MAJOR: Final = 195
"""Of NVIDIA's devices. Source: NV_MAJOR_DEVICE_NUMBER of the open kernel modules."""
NO_GPU: Final = 254
"""Minor numbers from there on are the modeset and the control device. Source: the same."""
MOST: Final = 16_384
"""Threads of one process and the descriptors that are read: some 0.1 s. Guessed: a process with more, and no GPU among these, is unknown."""


def gpu_open(pid: int, proc: Path = Path("/proc"), major: int = MAJOR) -> bool | None:
    """Has any of its threads a GPU open, among the first `MOST` descriptors? None also where no descriptor is seen: of a thread that has ended the kernel shows none."""
    any_seen = False
    try:
        for count, path in enumerate(_descriptors(proc, pid)):
            if count >= MOST:
                return None
            if path is not None:
                any_seen = True
                if _is_gpu(path, major):
                    return True
    except OSError:
        return None
    return False if any_seen else None


def opens(pid: int, minor: int, proc: Path = Path("/proc"), major: int = MAJOR) -> bool:
    """Has any of its threads the device file of this GPU open, by its minor number? A process that is gone has not. One that may not be read, or has more than
    `MOST` descriptors, may have."""
    try:
        for count, path in enumerate(_descriptors(proc, pid)):
            if count >= MOST or (path is not None and _numbers(path) == (major, minor)):
                return True
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return False


def _descriptors(proc: Path, pid: int) -> Iterator[str | None]:
    """Of each thread that does not share those of the first one that lives; None at the end of each. Raises OSError where the process is gone, or may not be read."""
    compares, first = is_ours(proc), 0
    with os.scandir(proc / str(pid) / "task") as threads:
        for thread in threads:
            same = share_files(first, int(thread.name)) if first and compares else False
            compares = compares and same is not None
            if not same:
                try:
                    with os.scandir(f"{thread.path}/fd") as entries:
                        for entry in entries:
                            first = first or int(thread.name)
                            yield entry.path
                except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    pass
            yield None


def _is_gpu(path: str, major: int) -> bool:
    numbers = _numbers(path)
    return numbers is not None and numbers[0] == major and numbers[1] < NO_GPU


def _numbers(path: str) -> tuple[int, int] | None:
    """Major and minor number of a character device; None: it is another file."""
    try:
        of = os.stat(path)  # noqa: PTH116 - a Path for each descriptor costs more than the call
    except OSError:  # closed meanwhile
        return None
    return (os.major(of.st_rdev), os.minor(of.st_rdev)) if stat.S_ISCHR(of.st_mode) else None
