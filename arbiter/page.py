"""The page that every process of a container may read: what of each GPU's limit no process has leased.

It saves a round trip for each question how much memory is free. The arbiter alone can write it: the memory is sealed against
any later writer, so a descriptor that a container opens again for writing is refused by the kernel. A kernel without that seal
(before 5.1, gVisor) leaves the file's mode to keep containers out; a container that is root there can lie to its own processes
about what is free, and to nobody else: what may be taken is decided in the ledger.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

from vgpu.protocol.wire import (
    PAGE_BYTES,
    TURN_AT,
    UNDERSTANDS_DRAINED,
    UNDERSTANDS_GROW,
    UNDERSTANDS_REPORT,
    UNDERSTANDS_RESUMED,
    UNDERSTANDS_STILL,
    WORDS_AT,
)

FEATURES: Final = UNDERSTANDS_REPORT | UNDERSTANDS_GROW | UNDERSTANDS_STILL | UNDERSTANDS_DRAINED | UNDERSTANDS_RESUMED
_SEAL_FUTURE_WRITE: Final = 0x0010
"""F_SEAL_FUTURE_WRITE of Linux 5.1; Python's fcntl has no name for it."""


class Page:
    """One u64 for each GPU, the container's state, and what the arbiter understands, in an anonymous file.

    `wait_ms`: how long a process waits for an arbiter that restarts; 0 = as its library does by itself.
    """

    def __init__(self, wait_ms: int = 0) -> None:
        writable = os.memfd_create("tangram-unleased", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, PAGE_BYTES)
            self._map = mmap.mmap(writable, PAGE_BYTES, mmap.MAP_SHARED)
            self._numbers = memoryview(self._map).cast("Q")
            self._numbers[WORDS_AT // 8] = FEATURES | wait_ms << 32
            os.fchmod(writable, 0o444)
            _seal(writable)
            self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)

    def show(self, gpu: int, unleased_bytes: int) -> None:
        """Publish one GPU's number. Eight aligned bytes are stored at once."""
        self._numbers[gpu] = unleased_bytes

    def beat(self, at_ms: int) -> None:
        """The arbiter lives, said in milliseconds of CLOCK_MONOTONIC."""
        self._numbers[TURN_AT // 8] = at_ms

    def show_state(self, *, off: bool, gate: bool = False, alive_ms: int = 0) -> None:
        """Is the container suspended, and is its new work to wait? Who waits can tell from the first when we lived."""
        if off or gate:
            self.beat(alive_ms)
        self._numbers[TURN_AT // 8 + 1] = int(off) | int(gate) << 32

    @property
    def waits(self) -> bool:
        """Is the container suspended, or its new work to wait? Then it looks whether the arbiter lives."""
        return self._numbers[TURN_AT // 8 + 1] != 0

    def close(self) -> None:
        """Give the page up. Who has mapped it keeps it."""
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
