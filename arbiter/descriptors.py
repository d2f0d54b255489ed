"""Descriptors that processes of containers pass to the arbiter: which are the driver's, and how the others are closed.

A close or a request about a descriptor can wait for its maker: a FUSE file for its daemon (`fstat`, `statfs`, `ioctl`, and `close`, which flushes it), a TCP socket
with SO_LINGER for its peer. The last close of plain memory frees it, which takes 0.14 s a GiB (measured). So nothing but the driver's devices is closed in the
arbiter's other threads, and these and plain memory alone are kept. What a descriptor is, is found without a request to
its file system: `statx` with AT_STATX_DONT_SYNC answers from the inode that the kernel has (FUSE since Linux 4.20), and F_GET_SEALS is known to shared memory only. The
text of /proc/self/fd is no proof: a file of any file system can have the path `/memfd:` in it.

Everything else is closed by a thread of its own (`close`). If that thread waits, the rest stays open until it goes on. A socket first gets its linger time set to 0.
What stays open is counted by container: one that has too much of it is served no more (`is_full`) until all of it is closed.

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
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto
from math import inf
from typing import Final

import structlog

from arbiter.open_files import MOST_PASSED, unclosed_of
from vgpu.api.errors import BadDocument

NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidiactl and /dev/nvidia<n>. Specified: Documentation/admin-guide/devices.txt of the kernel."""
MODESET_MINOR: Final = 254
"""The one device of that major with other requests."""
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
LOGGED_LIMIT: Final = 4096
"""Containers whose last line is stored for that. Guessed."""
_libc = ctypes.CDLL(None, use_errno=True)
_log = structlog.get_logger()


class Kind(Enum):
    """What a descriptor is, as far as the arbiter needs to know it."""

    DEVICE = auto()
    """A device of the driver that takes its requests: memory that it exports is one, and so is what a client was made through."""
    MEMORY = auto()
    """Plain memory (memfd, tmpfs): the fake driver's. Nobody is waited for, but its last close frees it."""
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


def receive(sock: socket.socket, most_bytes: int, container: str) -> tuple[bytes, list[int], bool]:
    """One message, the descriptors that came with it, which are the caller's, and whether some were lost because the arbiter had too many files open. Only the
    driver's and plain memory. Raises OSError; BadDocument for any other, and if the container's earlier ones are not closed yet: it ends the connection."""
    if is_full(container):
        raise BadDocument(f"the container passed {_closer.unclosed_of(container)} descriptors that are not closed yet")
    packet, control, flags, _ = sock.recvmsg(most_bytes, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _fds(control) if control else []
    if any(kind_of(fd) is Kind.FOREIGN for fd in fds):
        discard(fds, container)
        raise BadDocument("a packet comes with a descriptor that is neither of the NVIDIA driver nor plain memory")
    return packet, fds, bool(flags & socket.MSG_CTRUNC)


def is_full(container: str) -> bool:
    """Whether so much of what it passed waits for its close that nothing more of it is read or accepted. From any thread."""
    return _closer.is_full(container)


def end(sock: socket.socket, container: str) -> None:
    """Close a socket of a container's process. Nothing that it has sent, and sends until then, is closed here without a look."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    if not is_full(container) and _is_empty(sock, container):
        sock.close()
    else:
        _closer.close([sock.detach()], container)


def end_listener(sock: socket.socket, container: str) -> None:
    """Close a listening socket. What was sent on connections that nobody has accepted is closed with it: by the thread."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # nobody connects from now on
    _closer.close([sock.detach()], container)


def _is_empty(sock: socket.socket, container: str) -> bool:
    """Whether nothing is left in it that came before its end."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # a message without content then differs from the end
        found = 0
        for _ in range(UNREAD_MOST):
            _, control, _, _ = sock.recvmsg(0, _ROOM_WITH_SENDER, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
            if not control:
                return True
            fds = _fds(control)
            discard(fds, container)
            found += len(fds)
            if found >= UNREAD_DESCRIPTORS or is_full(container):
                break
        return False
    return True


def close(fd: int, container: str) -> None:
    """Close a descriptor of any kind that a container passed, without waiting."""
    discard([fd], container)


def discard(fds: Iterable[int], container: str) -> None:
    """The same for several."""
    left: list[int] = []
    foreign = 0
    for fd in fds:
        kind = kind_of(fd)
        foreign += kind is Kind.FOREIGN
        if kind is Kind.DEVICE:
            os.close(fd)
        else:
            left.append(fd)
    if left:
        _closer.close(left, container)
    if foreign:
        _closer.report(foreign, container)


class Closer:
    """A thread that closes what may wait. Without it, what was to be closed stays open."""

    def __init__(self) -> None:
        self._left: deque[tuple[int, str]] = deque()
        self._count: Counter[str] = Counter()
        """Of each container."""
        self._full: set[str] = set()
        self._there = threading.Condition()
        self._thread: threading.Thread | None = None
        self._logged_s = -inf
        self._full_logged_s: dict[str, float] = {}

    @property
    def unclosed(self) -> int:
        """Descriptors that are to be closed, with the present one."""
        return len(self._left)

    def unclosed_of(self, container: str) -> int:
        """Those of one container."""
        return self._count[container]

    def is_full(self, container: str) -> bool:
        """Whether it had more than its part of them, and they are not all closed yet."""
        return container in self._full

    def close(self, fds: Iterable[int], container: str) -> None:
        """Close these, soon."""
        fds = list(fds)
        for fd in fds:
            _stop_lingering(fd)
        with self._there:
            self._left.extend((fd, container) for fd in fds)
            self._count[container] += len(fds)
            filled = container not in self._full and self._count[container] > unclosed_of()
            if filled:
                self._full.add(container)
            self._there.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._start()
        if filled:
            self._report_full(container)

    def report(self, count: int, container: str) -> None:
        """So many were none of the driver's. Not each time."""
        if time.monotonic() >= self._logged_s + LOG_S:
            self._logged_s = time.monotonic()
            _log.warning(
                "a container passed descriptors that are not the driver's",
                grant=container, count=count, unclosed=self.unclosed,
            )  # fmt: skip

    def _report_full(self, container: str) -> None:
        now_s = time.monotonic()
        if now_s < self._full_logged_s.get(container, -inf) + LOG_S:
            return
        if len(self._full_logged_s) >= LOGGED_LIMIT:
            self._full_logged_s.clear()
        self._full_logged_s[container] = now_s
        _log.error(
            "a container's processes are refused until the descriptors that it passed are closed",
            grant=container, unclosed=self.unclosed_of(container),
        )  # fmt: skip

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
                fd, container = self._left[0]
            with suppress(OSError):
                os.close(fd)
            with self._there:
                self._left.popleft()
                self._count[container] -= 1
                if self._count[container] == 0:
                    del self._count[container]
                    self._full.discard(container)
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
