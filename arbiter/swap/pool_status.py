"""Why a GPU has no host pool, as the host pool's program on the node states it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.api.host_pool import STATUS, PoolStatus, from_text, missing_on_gpu

LARGEST_BYTES: Final = 1 << 20
"""Of the status. Guessed: a GPU takes some hundred bytes."""


def missing_pool(folder: Path, gpu: str, boot_id: str) -> str:
    """Empty if there is no status that can be read, or if it says that the pool is ready. `folder`: of the copiers' sockets."""
    try:
        with open(folder / STATUS, "rb", opener=_opener) as file:
            status = from_text(PoolStatus, file.read(LARGEST_BYTES))
    except (OSError, BadDocument):
        return ""
    return missing_on_gpu(status, gpu, boot_id=boot_id, now_s=time.clock_gettime(time.CLOCK_BOOTTIME))


def _opener(path: str, flags: int) -> int:
    """A FIFO in its place would block the arbiter."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
