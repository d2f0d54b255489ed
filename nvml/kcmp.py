"""Have two threads one table of descriptors? By kcmp(2), in one call of the kernel instead of a read of each table."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

KCMP_FILES: Final = 2
"""Source: linux/kcmp.h."""
_NUMBERS: Final = {"x86_64": 312, "aarch64": 272}
"""Of the system call. Source: syscall_64.tbl, and unistd.h of asm-generic."""
_NUMBER: Final = _NUMBERS.get(os.uname().machine) if sys.maxsize > 2**32 else None
_syscall = ctypes.CDLL(None, use_errno=True).syscall


def share_files(thread: int, other: int) -> bool | None:
    """By the IDs that they have in our own process namespace. None: the kernel does not tell (no such call, not allowed, a thread has ended)."""
    if _NUMBER is None:
        return None
    words = (_NUMBER, thread, other, KCMP_FILES, 0, 0)
    order: int = _syscall(*map(ctypes.c_long, words))
    return None if order < 0 else order == 0


@lru_cache(16)
def is_ours(proc: Path) -> bool:
    """Does this procfs count processes as our own process namespace does? Only then IDs in it mean the same threads to a system call."""
    try:
        lines = (proc / "self/status").read_bytes().splitlines()
    except OSError:
        return False
    return any(line.split()[1:] == [str(os.getpid()).encode()] for line in lines if line.startswith(b"NSpid:"))
