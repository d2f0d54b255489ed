"""How many files the arbiter may have open, and how many of them one container may use.

A container decides how many connections it opens, and each is a file of the arbiter. So the limit is raised to the kernel's maximum,
a container gets a part of it, and the last few are reserved: the arbiter needs them to read folders and grants.
"""

from __future__ import annotations

import resource
from typing import Final

SPARE: Final = 128
"""Files that are reserved from connections and containers' descriptors. Guessed: a folder, a grant, readers of metrics and status, five for
the thread of each GPU."""
MOST_PASSED: Final = 253
"""Descriptors of one message. Specified: SCM_MAX_FD of the kernel."""
PART: Final = 8
"""One container gets at most this part of the rest. Guessed: several containers can then continue beside one that uses all of its part."""


def raise_limit() -> int:
    """Raise the limit to the kernel's maximum for this process. Returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_of(requested: int, most_files: int) -> int:
    """Connections of one container: the requested number, and at most its part of the files."""
    return max(1, min(requested, (most_files - SPARE) // PART))


def unclosed_of(most_files: int | None = None) -> int:
    """Descriptors that one container has passed and that may wait for their close: its part of the files, and at least those of one message."""
    if most_files is None:
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(MOST_PASSED, (most_files - SPARE) // PART)


def is_spare(fd: int) -> bool:
    """Whether this is one of the reserved descriptors. A new descriptor has the lowest free number."""
    return fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE
