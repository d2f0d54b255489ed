"""A process that floods a unix socket, for tests: `python -m tests.flooder PATH KIND [stream]`. It floods until it is killed, and prints a line once it has begun.

silent      keeps connections and sends nothing
unread      sends requests and reads no answer
reconnect   connects and hangs up
requests    sends one request after the other and reads each answer
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CLIENTS = 50


@contextlib.contextmanager
def flooded(path: Path, kind: str, request: bytes = b"") -> Iterator[None]:
    """50 clients of another process flood the socket meanwhile. `request`: a packet; without one the socket is a stream."""
    command = [sys.executable, "-m", "tests.flooder", str(path), kind, request.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "floods\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


def descriptors() -> int:
    """That this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> None:
    path, kind, request = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
    for _ in range(CLIENTS):
        threading.Thread(target=flood, args=(path, kind, request), daemon=True).start()
    time.sleep(0.5)
    print("floods", flush=True)
    threading.Event().wait()


def flood(path: str, kind: str, request: bytes) -> None:
    while True:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if request else socket.SOCK_STREAM) as sock,
        ):
            sock.connect(path)
            act(sock, kind, request)
        time.sleep(0.01)


def act(sock: socket.socket, kind: str, request: bytes) -> None:
    """Until it is hung up on."""
    if kind == "silent":
        sock.recv(1)
    elif kind == "unread" and request:
        while True:
            sock.send(request, socket.MSG_NOSIGNAL)
    elif kind == "unread":
        while sock.send(b"a", socket.MSG_NOSIGNAL):
            time.sleep(0.1)
    elif kind == "requests":
        while sock.send(request, socket.MSG_NOSIGNAL) and sock.recv(1 << 20):
            pass


if __name__ == "__main__":
    main()
