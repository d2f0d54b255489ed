"""How many files the arbiter may have open, and who may have how many of them.

A container decides how many connections it opens, and each is a file of the arbiter. So the limit is raised to what the kernel lets,
a container gets a part of it, and the last few are reserved: the arbiter reads folders and grants with them.
"""

from __future__ import annotations

import resource
from typing import Final

SPARE: Final = 128
"""Files that no connection and no descriptor of a container gets. Guessed: a folder, a grant, readers of metrics and status, five for
the thread of each GPU."""
PART: Final = 8
"""One container has at most this part of the rest. Guessed: more containers than one then go on beside one that takes all it can."""


def raise_limit() -> int:
    """As many as the kernel lets this process have; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_of(requested: int, most_files: int) -> int:
    """Connections of one container: as many as requested, and at most its part of the files."""
    return max(1, min(requested, (most_files - SPARE) // PART))


def is_spare(fd: int) -> bool:
    """Is this one of the last few? A new descriptor has the lowest number that is free."""
    return fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE
