"""Descriptors that processes of containers pass to the arbiter: which are the driver's, and how the others are closed.

A close or a request about a descriptor can wait for its maker: a FUSE file for its daemon (`fstat`, `statfs`, `ioctl`, and `close`, which flushes it), a TCP socket
with SO_LINGER for its peer. So nothing but the driver's devices and plain memory stays in the arbiter's threads. What a descriptor is, is found without a request to
its file system: `statx` with AT_STATX_DONT_SYNC answers from the inode that the kernel has (FUSE since Linux 4.20), and F_GET_SEALS is known to shared memory only. The
text of /proc/self/fd is no proof: a file of any file system can have the path `/memfd:` in it.

Everything else is closed by a thread of its own. If that thread waits, the rest stays open until it goes on. A socket first gets its linger time set to 0.

The kernel itself closes what a receiver has no room for, and what is unread in a socket that is closed, in the thread that receives or closes: so `receive` always has
room for all, and `end` reads what is left. If that has many descriptors, the thread closes the socket with them: 278 messages of 253 fit into one, and take 0.2 s
(measured).
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto
from math import inf
from typing import Final

import structlog

from vgpu.api.errors import BadDocument

NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidiactl and /dev/nvidia<n>. Specified: Documentation/admin-guide/devices.txt of the kernel."""
MODESET_MINOR: Final = 254
"""The one device of that major with other requests."""
MOST_PASSED: Final = 253
"""Descriptors of one message. Specified: SCM_MAX_FD of the kernel."""
_ROOM: Final = socket.CMSG_SPACE(MOST_PASSED * array.array("i").itemsize)
_ROOM_WITH_SENDER: Final = _ROOM + socket.CMSG_SPACE(struct.calcsize("3i"))
_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE: Final = 0x1
_STATX: Final = struct.Struct("=28xH98xII120x")
"""<linux/stat.h>: mode, and major and minor number of a device, in 256 bytes."""
UNREAD_MOST: Final = 4096
"""Messages that `end` reads at most. Guessed: a socket's buffer has room for some hundred of the smallest."""
UNREAD_DESCRIPTORS: Final = 1024
"""And when it has found so many descriptors, it reads no further: they take 3 ms (measured)."""
LOG_S: Final = 60.0
"""Between two lines of the log. Guessed: a container sends as many as it likes."""
_libc = ctypes.CDLL(None, use_errno=True)
_log = structlog.get_logger()


class Kind(Enum):
    """What a descriptor is, as far as the arbiter needs to know it."""

    DEVICE = auto()
    """A device of the driver that takes its requests: memory that it exports is one, and so is what a client was made through."""
    MEMORY = auto()
    """Plain memory (memfd, tmpfs): the fake driver's. It is served without a request to anybody."""
    FOREIGN = auto()


def kind_of(fd: int) -> Kind:
    """Never waits, whatever `fd` is."""
    buffer = ctypes.create_string_buffer(_STATX.size)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _libc.statx(fd, b"", flags, _STATX_TYPE, buffer) != 0:
        return Kind.FOREIGN
    mode, major, minor = _STATX.unpack(buffer.raw)
    if stat.S_ISCHR(mode) and major == NVIDIA_MAJOR and minor != MODESET_MINOR:
        return Kind.DEVICE
    if stat.S_ISREG(mode):
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            return Kind.MEMORY
    return Kind.FOREIGN


def receive(sock: socket.socket, most_bytes: int) -> tuple[bytes, list[int], bool]:
    """One message, the descriptors that came with it, which are the caller's, and whether some were lost because the arbiter had too many files open. Only the
    driver's and plain memory. Raises OSError; BadDocument for any other, which ends the connection."""
    packet, control, flags, _ = sock.recvmsg(most_bytes, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _fds(control) if control else []
    if any(kind_of(fd) is Kind.FOREIGN for fd in fds):
        discard(fds)
        raise BadDocument("a packet comes with a descriptor that is neither of the NVIDIA driver nor plain memory")
    return packet, fds, bool(flags & socket.MSG_CTRUNC)


def end(sock: socket.socket) -> None:
    """Close a socket of a container's process. Nothing that it has sent, and sends until then, is closed here without a look."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    if _is_empty(sock):
        sock.close()
    else:
        _closer.close([sock.detach()])


def _is_empty(sock: socket.socket) -> bool:
    """Whether nothing is left in it that came before its end."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # a message without content then differs from the end
        found = 0
        for _ in range(UNREAD_MOST):
            _, control, _, _ = sock.recvmsg(0, _ROOM_WITH_SENDER, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
            if not control:
                return True
            fds = _fds(control)
            discard(fds)
            found += len(fds)
            if found >= UNREAD_DESCRIPTORS:
                break
        return False
    return True


def discard(fds: Iterable[int]) -> None:
    """Close descriptors of any kind, without waiting."""
    foreign: list[int] = []
    for fd in fds:
        if kind_of(fd) is Kind.FOREIGN:
            foreign.append(fd)
        else:
            os.close(fd)
    if foreign:
        _closer.close(foreign)
        _closer.report(len(foreign))


class Closer:
    """A thread that closes what may wait. Without it, what was to be closed stays open."""

    def __init__(self) -> None:
        self._left: deque[int] = deque()
        self._there = threading.Condition()
        self._thread: threading.Thread | None = None
        self._logged_s = -inf

    @property
    def unclosed(self) -> int:
        """Descriptors that are to be closed, with the present one."""
        return len(self._left)

    def close(self, fds: Iterable[int]) -> None:
        """Close these, soon."""
        fds = list(fds)
        for fd in fds:
            _stop_lingering(fd)
        with self._there:
            self._left.extend(fds)
            self._there.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._start()

    def report(self, count: int) -> None:
        """So many were none of the driver's. Not each time."""
        if time.monotonic() >= self._logged_s + LOG_S:
            self._logged_s = time.monotonic()
            _log.warning(
                "a container passed descriptors that are not the driver's", count=count, unclosed=self.unclosed
            )

    def settled(self, timeout_s: float) -> bool:
        """Whether all were closed within the time."""
        with self._there:
            return self._there.wait_for(lambda: not self._left, timeout_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="closer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            _log.warning("descriptors stay open: the thread that closes them does not start", reason=str(error))

    def _run(self) -> None:
        while True:
            with self._there:
                self._there.wait_for(lambda: self._left)
                fd = self._left[0]
            with suppress(OSError):
                os.close(fd)
            with self._there:
                self._left.popleft()
                self._there.notify_all()


_closer = Closer()


def _stop_lingering(fd: int) -> None:
    """No effect on what is no socket. Not by a socket object: that would close a second descriptor."""
    off = struct.pack("ii", 0, 0)
    _libc.setsockopt(fd, socket.SOL_SOCKET, socket.SO_LINGER, off, len(off))


def _fds(control: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds = array.array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            found += fds
    return found
