"""The connection of one process: reads and sends packets, and never blocks on the peer."""

from __future__ import annotations

import array
import errno
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from arbiter import descriptors
from arbiter.open_files import is_spare
from vgpu.protocol import wire

BAD_PACKET, NO_GRANT, TOO_MANY = 1, 2, 3
"""Codes of ERROR, as docs/reference/protocol.md lists them."""
SEND_BUFFER_BYTES: Final = 32 * 2**10
"""Send buffer of one connection; the kernel doubles it. With a smaller one, the arbiter would disconnect a library that the kernel does not run for a while."""
UNREAD_BYTES: Final = 20 * 2**10
"""Unread bytes, as the kernel counts them, at which the arbiter stops reading the peer: some 24 answers. More than a quarter of the buffer,
at which the kernel reports that the socket is writable again."""
_log = structlog.get_logger()

_CREDENTIALS = struct.Struct("3i")
_SO_MEMINFO: Final = 55
_MEMINFO = struct.Struct("=8xI")
"""<linux/sock_diag.h>: the third number is the bytes that were sent and not read yet."""


class PeerGone(Exception):
    """The peer closed the connection, or does not read its messages."""


@dataclass(slots=True)
class Connection:
    """The connection of a container's process, identified by the kernel."""

    sock: socket.socket
    number: int
    """Identifies the process in its ledger; never used twice."""
    pid: int
    """In this arbiter's pid namespace; 0 if the process is not visible there."""
    hello_until_s: float
    """When the arbiter rejects the process if it still waits for its grant."""
    container: str = ""
    """Name of its grant: what it passes is counted there until it is closed."""
    pid_in_container: int = 0
    """Stated by the process: shown and never trusted."""
    started: int = 0
    """When the process of `pid` started, as /proc has it; read at its WELCOME. 0 = unknown."""
    greeted: bool = False
    """It sent HELLO."""
    welcomed: bool = False
    for_gpu_time: bool = False
    """It reports channels and work, and leases nothing."""
    for_burst: bool = False
    """The arbiter swaps its memory over this connection, and it leases nothing here."""
    for_context: bool = False
    """It may make a context soon."""
    reported: set[int] = field(default_factory=set)
    """Numbers of the reasons for which its library cannot enforce a limit now."""
    contexts_s: dict[int, float] = field(default_factory=dict)
    """GPU -> when the process reported a context there."""
    full: bool = False
    """The peer has many unread messages, and the arbiter does not read it meanwhile."""
    exports: int = 0
    """Unanswered EXPORTs. Only while there are any, descriptors of the process are kept for its message."""
    passed: list[int] = field(default_factory=list)
    """Descriptors that came with the message that is being handled. They are closed after it."""
    unheld: set[int] = field(default_factory=set)
    """GPUs on which it makes a context without a reservation, because the size of a context is still unknown."""

    def has_room(self) -> bool:
        """Whether the peer has read most of its messages."""
        return self._unread_bytes() <= UNREAD_BYTES

    def has_read_all(self) -> bool:
        """Whether the peer has read all of its messages."""
        return self._unread_bytes() == 0

    def _unread_bytes(self) -> int:
        try:
            memory = self.sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        except OSError:  # before Linux 4.12 the send buffer alone is the limit
            return 0
        unread_bytes: int = _MEMINFO.unpack(memory)[0]
        return unread_bytes

    def receive(self) -> tuple[int, wire.Message] | None:
        """The next message; None if there is none now. Its descriptors are in `passed`. Raises PeerGone, BadDocument."""
        self.close_passed()
        try:
            packet, self.passed, _ = descriptors.receive(self.sock, wire.REQUEST_LIMIT + 1, self.container)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerGone(str(error)) from None
        if not self.exports:
            self.close_passed()
        if not packet:
            raise PeerGone("closed the connection")
        return wire.decode(packet)

    def close(self) -> None:
        """Close the socket, without waiting for anything that the process has passed."""
        descriptors.end(self.sock, self.container)

    def close_passed(self) -> None:
        """Close the descriptors of the message, without waiting."""
        passed, self.passed = self.passed, []
        descriptors.discard(passed, self.container)

    def receive_with_fd(self) -> tuple[int | None, wire.Message] | None:
        """The next message and its descriptor, which the caller must close; without one if too few descriptors are free.

        Raises PeerGone, BadDocument.
        """
        try:
            packet, fds, _ = descriptors.receive(self.sock, wire.REQUEST_LIMIT + 1, self.container)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerGone(str(error)) from None
        if packet and not fds:
            return None, wire.decode(packet)[1]
        try:
            if not packet:
                raise PeerGone("closed the connection")
            _, message = wire.decode(packet)
            return (fds.pop(0) if fds and not is_spare(fds[0]) else None), message
        finally:
            descriptors.discard(fds, self.container)

    def send(self, seq: int, message: wire.Message, fd: int | None = None) -> None:
        """Raises PeerGone, also if the peer has not read a whole socket buffer."""
        self.send_with_fds(seq, message, [] if fd is None else [fd])

    def send_with_fds(self, seq: int, message: wire.Message, fds: list[int]) -> None:
        """The same with any number of descriptors, which stay open here."""
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([wire.encode(seq, message)], passed, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as error:
            raise PeerGone(f"cannot be sent a packet: {error}") from None

    def refuse(self, code: int, text: str) -> None:
        """Send ERROR to a peer that may be gone. The caller closes the connection."""
        try:
            self.send(0, wire.Error(code, text))
        except PeerGone as gone:
            _log.debug("peer gone before its error", pid=self.pid, reason=str(gone))


def peer_pid(sock: socket.socket) -> int:
    """The pid from the kernel (SO_PEERCRED)."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def bound_socket(path: Path, kind: int, mode: int) -> socket.socket:
    """A listening socket with the permissions `mode`. Replaces a socket left by an earlier arbiter."""
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
    """The device plugin makes it before the directory; this call makes it for a directory of an earlier plugin."""
    if sockets is None:
        return folder
    own = sockets / folder.name
    with suppress(FileExistsError):
        own.mkdir(0o755)
        own.chmod(0o755)
    return own
