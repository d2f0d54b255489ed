"""Serve other programs of the node: the arbiter queries the supervisor's child through a socket in the state folder.

Only processes of our own user are admitted. Each connection has a thread; there are few, their messages are bounded. Requests that are there
together are carried to the child together. A peer that does not read or sends garbage is disconnected, one that floods is slowed down. None of it
reaches the child. What needs the rights of this program and no NVML is answered here (`nvml.local`).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from nvml.errors import NvmlError
from nvml.local import LocalAnswers
from nvml.messages import (
    MALFORMED,
    REQUEST_BYTES,
    TOGETHER,
    AnyReply,
    AnyRequest,
    ErrorReply,
    HealthReply,
    ReplyPacket,
    decode_served,
    encode,
)

CONNECTIONS: Final = 10
"""The arbiter has five; one that restarts has five more until its old ones are seen to end. Guessed."""
SILENT_S: Final = 30.0
"""A connection that has sent nothing for this long is closed when another one needs its place. The arbiter's each send something every few seconds where they have queries, and connect anew. Guessed."""
THREADS: Final = 2 * CONNECTIONS
"""Of connections, including closed ones that still wait for the child."""
SEND_S: Final = 2.0
"""The connection of a peer that does not read for this long is closed. Guessed."""
WAIT_S: Final = 4.0
"""For one answer. The arbiter waits 3 s for its own."""
A_SECOND: Final = 200.0
AT_ONCE: Final = 200.0
"""Requests of one connection: the arbiter makes two a second for each GPU, and one more for each context. Guessed."""
CHECK_S: Final = 1.0
"""While no client connects, the socket is checked this often."""
AGAIN_S: Final = 1.0
"""After an accept that failed, as it does when too many files are open. Guessed."""
_CREDENTIALS: Final = struct.Struct("3i")


class NvmlCaller(Protocol):
    """The supervisor."""

    def call_all(self, requests: Sequence[AnyRequest], wait_s: float | None = None) -> Sequence[AnyReply]: ...


@dataclass(slots=True)
class _Peer:
    pid: int
    """0 for a process of a PID namespace that we do not see into: all these count as one."""
    active_s: float
    """When it connected or was answered last."""


class NvmlServer:
    """Open until `close`. `user`: whose processes may connect. `health`: as of `LocalAnswers`. Raises OSError when the socket cannot be made."""

    def __init__(
        self,
        path: Path,
        supervisor: NvmlCaller,
        *,
        user: int | None = None,
        report: Callable[[str], None] = lambda _: None,
        health: Callable[[str], HealthReply] | None = None,
    ) -> None:
        self.refused = 0
        """Connections that were rejected or closed."""
        self._path, self._supervisor, self._report, self._local = path, supervisor, report, LocalAnswers(health=health)
        self._user = os.geteuid() if user is None else user
        self._bind()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Peer] = {}
        self._threads = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="nvml-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and remove the socket unless another program has put its own there."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind(self) -> None:
        """Raises OSError."""
        self._listener = _listening(self._path)
        self._listener.settimeout(CHECK_S)
        self._inode = self._path.stat().st_ino

    def _put_back(self) -> None:
        """Make the socket again if it was removed: an arbiter that restarts would have no NVML. Raises OSError."""
        if not self._path.exists():
            lost = self._listener
            self._bind()
            lost.close()
            self._report(f"the socket {self._path} was missing and is put back")

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    self._put_back()
                    continue
            except OSError as error:
                if self._closing.wait(AGAIN_S):
                    return
                self._report(f"no connection can be accepted now: {error}")
                continue
            if why := self._admit(sock):
                self._reject(why)
                sock.close()

    def _admit(self, sock: socket.socket) -> str:
        """Start its thread. Returns why the connection is rejected; empty if it is not."""
        pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != self._user:
            return f"process {pid} is of user {user}: must be of {self._user}"
        with self._lock:
            if self._threads >= THREADS or (len(self._connections) >= CONNECTIONS and not self._evict_for(pid)):
                return f"process {pid} has no free connection: there are at most {CONNECTIONS}"
            self._connections[sock] = peer = _Peer(pid, time.monotonic())
            self._threads += 1
        try:
            threading.Thread(target=self._serve, args=(sock, peer), name=f"nvml-{pid}", daemon=True).start()
        except RuntimeError as error:
            self._forget(sock)
            return f"process {pid}: {error}"
        return ""

    def _evict_for(self, pid: int) -> bool:
        """For another connection of this process: of the process that has most, if that has more than this one would, else of any, if silent."""
        of = Counter(peer.pid for peer in self._connections.values())
        most = max(of, key=of.__getitem__)
        silent_s = time.monotonic() - SILENT_S
        if of[pid] + 1 < of[most]:
            found = [sock for sock, peer in self._connections.items() if peer.pid == most]
        else:
            found = [sock for sock, peer in self._connections.items() if peer.active_s < silent_s]
        if not found:
            return False
        sock = min(found, key=lambda one: self._connections[one].active_s)
        del self._connections[sock]
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        return True

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections.pop(sock, None)
            self._threads -= 1

    def _reject(self, why: str) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th: a peer does not fill the log
            self._report(f"{why} ({self.refused} so far)")

    def _serve(self, sock: socket.socket, peer: _Peer) -> None:
        try:
            with sock:
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time_of(SEND_S))
                self._answer_all(sock, peer)
        except (*MALFORMED, OSError) as error:
            if not self._closing.is_set():
                self._reject(f"process {peer.pid}: {str(error)[:200]}")
        finally:
            self._forget(sock)

    def _answer_all(self, sock: socket.socket, peer: _Peer) -> None:
        """Until the peer closes the connection. Raises OSError, MALFORMED."""
        left, at_s = AT_ONCE, time.monotonic()
        while packets := _packets(sock):
            received = [decode_served(packet) for packet in packets]
            replies = self._local.answer_all([one.request for one in received], self._call_child)
            for one, reply in zip(received, replies, strict=True):
                sock.send(encode(ReplyPacket(one.number, reply)), socket.MSG_NOSIGNAL)
            peer.active_s = now_s = time.monotonic()
            left, at_s = min(AT_ONCE, left - len(received) + (now_s - at_s) * A_SECOND), now_s
            if left < 0 and self._closing.wait(-left / A_SECOND):
                return

    def _call_child(self, requests: Sequence[AnyRequest]) -> Sequence[AnyReply]:
        try:
            return self._supervisor.call_all(requests, WAIT_S)
        except NvmlError as error:
            return [ErrorReply.of(error)] * len(requests)


def _packets(sock: socket.socket) -> list[bytes]:
    """The next one, and those behind it that are there; none when the peer closed the connection. Raises OSError."""
    packets: list[bytes] = []
    packet = sock.recv(REQUEST_BYTES + 1)
    while packet:
        packets.append(packet)
        if len(packets) == TOGETHER:
            break
        try:
            packet = sock.recv(REQUEST_BYTES + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    return packets


def _time_of(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))


def _listening(path: Path) -> socket.socket:
    """In place of one that an earlier program left."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        sock.bind(str(fresh))
        fresh.chmod(0o600)
        sock.listen(CONNECTIONS)
        fresh.rename(path)
    except OSError:
        sock.close()
        raise
    return sock
