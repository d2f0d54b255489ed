"""The page that every process of a container may read: each GPU's limit that is in effect, and the part of it that no process has leased.

It saves a round trip for each query of the free memory. Only the arbiter can write it: the memory is sealed against
any later writer, so the kernel rejects a container that opens the descriptor again for writing. On a kernel without that seal
(before 5.1, gVisor) only the file's mode protects the page. A container that is root there can show wrong figures to its own processes
only: the ledger decides what may be leased.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

from vgpu.protocol.wire import (
    GPU_TIME_AT,
    LIMITS_AT,
    PAGE_BYTES,
    SHOWS_LIMITS,
    UNDERSTANDS_BURST,
    UNDERSTANDS_DISCARD,
    UNDERSTANDS_DRAINED,
    UNDERSTANDS_GROW,
    UNDERSTANDS_OPEN,
    UNDERSTANDS_REPORT,
    UNDERSTANDS_RESUMED,
    UNDERSTANDS_STILL,
    UNDERSTANDS_WAITED,
    WORDS_AT,
)

FEATURES: Final = (
    UNDERSTANDS_REPORT
    | UNDERSTANDS_GROW
    | UNDERSTANDS_STILL
    | UNDERSTANDS_DRAINED
    | UNDERSTANDS_RESUMED
    | UNDERSTANDS_OPEN
    | SHOWS_LIMITS
    | UNDERSTANDS_DISCARD
    | UNDERSTANDS_WAITED
)
_SEAL_FUTURE_WRITE: Final = 0x0010
"""F_SEAL_FUTURE_WRITE of Linux 5.1; Python's fcntl has no name for it."""


class ContainerPage:
    """Two u64 for each GPU, the container's state, and the arbiter's features, in an anonymous file.

    `wait_ms`: how long a process waits for an arbiter that restarts; 0 = the library's default. `bursts`: the arbiter serves connections for bursts.
    """

    def __init__(self, wait_ms: int = 0, *, bursts: bool = False) -> None:
        writable = os.memfd_create("tangram-unleased", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, PAGE_BYTES)
            self._map = mmap.mmap(writable, PAGE_BYTES, mmap.MAP_SHARED)
            self._numbers = memoryview(self._map).cast("Q")
            self._numbers[WORDS_AT // 8] = FEATURES | UNDERSTANDS_BURST * bursts | wait_ms << 32
            os.fchmod(writable, 0o444)
            _seal(writable)
            self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)

    def show(self, gpu: int, limit_bytes: int, unleased_bytes: int) -> None:
        """Publish one GPU's numbers. Eight aligned bytes are stored atomically; a process may read one number before and one after a change."""
        self._numbers[LIMITS_AT // 8 + gpu] = limit_bytes
        self._numbers[gpu] = unleased_bytes

    def beat(self, at_ms: int) -> None:
        """Publish the arbiter's heartbeat, in milliseconds of CLOCK_MONOTONIC."""
        self._numbers[GPU_TIME_AT // 8] = at_ms

    def show_state(self, *, off: bool, gate: bool = False, alive_ms: int = 0) -> None:
        """Publish whether the container is suspended, and whether its new work waits. With `alive_ms` a waiting process has a heartbeat from the start."""
        if off or gate:
            self.beat(alive_ms)
        self._numbers[GPU_TIME_AT // 8 + 1] = int(off) | int(gate) << 32

    @property
    def waits(self) -> bool:
        """Whether the container is suspended, or its new work waits. Then its processes check the heartbeat."""
        return self._numbers[GPU_TIME_AT // 8 + 1] != 0

    def close(self) -> None:
        """Close the page. It remains for a process that has mapped it."""
        self._numbers.release()
        self._map.close()
        os.close(self.fd)


def _seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
