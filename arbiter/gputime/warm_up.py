"""Keeps the code that reads a request in the processor's cache.

After a sleep, the code and the values with which a thread reads a message are no longer in the processor's cache, and reading
takes longer: at the p50 1.7 times as long in one run on the H200's machine, and no longer in another (part wakes of
bench/gpu_time/gpu-time.csv and wakes-before.csv). So while the thread naps it sends itself a message from time to time, and reads it
like a request's.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

from arbiter.budget import MessageBudget
from arbiter.connection import Connection, PeerGone
from arbiter.gputime.timer import now_s
from vgpu.protocol import wire

EVERY_S: Final = 0.001
"""Guessed: ten naps."""
_PACKET: Final = wire.encode(0, wire.Activity(wire.ActivityKind.WORK))


class WarmUp:
    """The warm-up of one thread. Its messages have no effect."""

    def __init__(self) -> None:
        self._us, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._connection = Connection(sock, number=0, pid=0, hello_until_s=0.0)
        self._budget = MessageBudget(now_s())
        self._again_s = 0.0

    def play(self, at_s: float) -> None:
        """Send and read one, unless that was done a moment ago."""
        if at_s < self._again_s:
            return
        self._again_s = at_s + EVERY_S
        with suppress(
            OSError, PeerGone
        ):  # the kernel is short of memory: that may slow one request, but must not end the arbiter
            self._us.send(_PACKET)
            self._budget.may(at_s)
            self._connection.receive_with_fd()
            self._budget.spend(1.0)

    def close(self) -> None:
        """Close its descriptors."""
        self._us.close()
        self._connection.sock.close()
