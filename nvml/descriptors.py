"""Does a process have a GPU's device file open? By /proc/<pid>/fd, which only who may trace the process can read.

Whoever uses a GPU has its device file open, with memory there or without: a program that asks NVML for a temperature has it open, and so has a child of a CUDA
program. So an open file is no proof of memory. It is looked for by the device's number: a container may call the file what it likes. None = nobody knows,
as for maps (`nvml.mapped`).

To ask for the number of a file can wait for whoever serves its file system. `nvml.mapped.Looks` bounds that wait.
"""

from __future__ import annotations

import os
import stat
from itertools import islice
from pathlib import Path
from typing import Final

from nvml.mapped import in_any_thread

MAJOR: Final = 195
"""Of NVIDIA's devices. Source: NV_MAJOR_DEVICE_NUMBER of the open kernel modules."""
NO_GPU: Final = 254
"""Minor numbers from there on are the modeset and the control device. Source: the same."""
MOST: Final = 4096
"""Descriptors of one process. Guessed: of one that has more and no GPU among these, nobody knows."""


def gpu_open(pid: int, proc: Path = Path("/proc"), major: int = MAJOR) -> bool | None:
    """Has any of its first `MOST` descriptors a GPU open? Where the first thread has ended and others run, they have the descriptors."""
    return in_any_thread(proc / str(pid), lambda folder: _open_in(folder / "fd", major))


def _open_in(folder: Path, major: int) -> bool | None:
    """None also where there is no descriptor at all: of a thread that has ended the kernel shows none."""
    try:
        with os.scandir(folder) as entries:
            paths = [entry.path for entry in islice(entries, MOST + 1)]
    except OSError:
        return None
    if any(_is_gpu(path, major) for path in paths[:MOST]):
        return True
    return False if 0 < len(paths) <= MOST else None


def _is_gpu(path: str, major: int) -> bool:
    try:
        of = os.stat(path)  # noqa: PTH116 - a Path for each descriptor costs more than the call
    except OSError:  # closed meanwhile
        return False
    return stat.S_ISCHR(of.st_mode) and os.major(of.st_rdev) == major and os.minor(of.st_rdev) < NO_GPU
