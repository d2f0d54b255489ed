"""One process on the other end of a socket: packets in, packets out, never waiting for it."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from arbiter.files import is_spare
from vgpu.protocol import wire

BAD_PACKET, NO_GRANT, TOO_MANY = 1, 2, 3
"""Codes of ERROR, as docs/reference/protocol.md lists them."""
SEND_BUFFER_BYTES: Final = 32 * 2**10
"""Of one connection; the kernel makes twice that of it. Smaller, a library that the kernel does not run for a while would be hung up on."""
UNREAD_BYTES: Final = 20 * 2**10
"""What a peer has not read, as the kernel counts it, from which on it is not read either: some 24 answers. More than a quarter of the buffer,
at which the kernel says that there is room again."""
_log = structlog.get_logger()

_CREDENTIALS = struct.Struct("3i")
_SO_MEMINFO: Final = 55
_MEMINFO = struct.Struct("=8xI")
"""<linux/sock_diag.h>: the third number is what was sent and not read yet."""
_ROOM_FOR_FDS = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class Gone(Exception):
    """The peer hung up, or does not read what it is sent."""


@dataclass(slots=True)
class Connection:
    """A process of a container, as the kernel names it."""

    sock: socket.socket
    number: int
    """Names the process in its ledger; never used twice."""
    pid: int
    """On the host, as this arbiter's pid namespace sees it; 0 when it does not."""
    hello_until_s: float
    """When a process that still waits for its grant is refused."""
    pid_in_container: int = 0
    """As it says itself: shown and never trusted."""
    greeted: bool = False
    """It said HELLO."""
    welcomed: bool = False
    for_gpu_time: bool = False
    """It reports channels and work, and leases nothing."""
    for_context: bool = False
    """It may make a context soon."""
    reported: set[int] = field(default_factory=set)
    """Numbers of what its library cannot enforce now."""
    contexts_s: dict[int, float] = field(default_factory=dict)
    """GPU -> when it said that it has a context there."""
    full: bool = False
    """It has not read much of what it was sent, and is not read meanwhile."""
    unheld: set[int] = field(default_factory=set)
    """GPUs on which it makes a context for which nothing is held, because nobody knows yet what one takes."""

    def has_room(self) -> bool:
        """Has the peer read most of what it was sent?"""
        try:
            memory = self.sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        except OSError:  # before Linux 4.12 the send buffer alone is the limit
            return True
        unread_bytes: int = _MEMINFO.unpack(memory)[0]
        return unread_bytes <= UNREAD_BYTES

    def receive(self) -> tuple[int, wire.Message] | None:
        """The next message; None when there is none now. Raises Gone, BadDocument."""
        try:
            packet = self.sock.recv(wire.REQUEST_LIMIT + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Gone(str(error)) from None
        if not packet:
            raise Gone("hung up")
        return wire.decode(packet)

    def receive_with_fd(self) -> tuple[int | None, wire.Message] | None:
        """The next message with the descriptor that came along, which is the caller's then; none when there are too few left.

        Raises Gone, BadDocument.
        """
        try:
            packet, passed, _, _ = self.sock.recvmsg(wire.REQUEST_LIMIT + 1, _ROOM_FOR_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Gone(str(error)) from None
        if packet and not passed:
            return None, wire.decode(packet)[1]
        fds = [
            fd
            for level, kind, data in passed
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for fd in _fds(data)
        ]
        try:
            if not packet:
                raise Gone("hung up")
            _, message = wire.decode(packet)
            return (fds.pop(0) if fds and not is_spare(fds[0]) else None), message
        finally:
            for fd in fds:
                os.close(fd)

    def send(self, seq: int, message: wire.Message, fd: int | None = None) -> None:
        """Raises Gone: one who does not read for a whole socket buffer is gone."""
        passed = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self.sock.sendmsg([wire.encode(seq, message)], passed, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as error:
            raise Gone(f"cannot be sent a packet: {error}") from None

    def refuse(self, code: int, text: str) -> None:
        """Send ERROR, to one who may be gone. To hang up is the caller's."""
        try:
            self.send(0, wire.Error(code, text))
        except Gone as gone:
            _log.debug("peer gone before its error", pid=self.pid, reason=str(gone))


def _fds(data: bytes) -> array.array[int]:
    fds = array.array("i")
    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds


def peer_pid(sock: socket.socket) -> int:
    """The pid that the kernel vouches for."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def bound_socket(path: Path, kind: int, mode: int) -> socket.socket:
    """A listening socket with the permissions `mode`. One left by an earlier arbiter is replaced."""
    sock = socket.socket(socket.AF_UNIX, kind)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        sock.bind(str(fresh))
        fresh.chmod(mode)
        sock.listen(256)
        fresh.rename(path)
    except OSError as error:
        sock.close()
        if error.errno is None:
            raise OSError(errno.ENAMETOOLONG, f"socket path {path} is longer than 107 characters") from None
        raise
    return sock


def socket_folder(folder: Path, sockets: Path | None) -> Path:
    """Made before the directory by the device plugin; here for a directory of an earlier plugin."""
    if sockets is None:
        return folder
    own = sockets / folder.name
    with suppress(FileExistsError):
        own.mkdir(0o755)
        own.chmod(0o755)
    return own
