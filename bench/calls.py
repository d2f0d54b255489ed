"""HTTP calls as Go's clients make them, over connections that are kept: for benches, which time them from the first byte sent to the last byte read."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final

WAIT_S: Final = 240.0
"""For an answer, of a program that is measured and may be flooded. Benches have limits of their own where an answer is too late."""


def posted(path: str, body: bytes) -> bytes:
    """A request."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    return head.encode() + body


def read_answer(recv: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """Head and body. Raises AssertionError when the connection ends before."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = recv(1 << 20)
        assert more
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < size:
        more = recv(1 << 20)
        assert more
        body += more
    return head, body


def connect(port: int, wait_s: float = WAIT_S) -> socket.socket:
    """To a program on this machine."""
    sock = socket.create_connection(("127.0.0.1", port), wait_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as Go does
    return sock


def wait_for(port: int) -> None:
    """Return when a program listens there. Raises SystemExit after 20 s."""
    for _ in range(200):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"no program opened port {port} within 20 s")


class Kept:
    """One connection to a program on this machine, made at the first call; another one after a call that failed."""

    def __init__(self, port: int, wait_s: float = WAIT_S) -> None:
        self._port, self._wait_s = port, wait_s
        self._sock: socket.socket | None = None

    def open(self) -> socket.socket:
        """Connect, so that the first call need not."""
        if self._sock is None:
            self._sock = connect(self._port, self._wait_s)
        return self._sock

    def send(self, request: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer. Raises OSError, AssertionError when it ends before."""
        sock = self.open()
        try:
            sock.sendall(request)
            return read_answer(sock.recv)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hang up."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
