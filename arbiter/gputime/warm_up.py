"""Keeps warm what a request waits for.

A thread that has slept finds the code and the values with which it reads a message gone from the processor's cache, and takes
longer for it: at the p50 1.7 times as long in one run on the H200's machine, and no longer in another (part wakes of
bench/gpu_time/gpu-time.csv and wakes-before.csv). So while it naps it sends itself a message now and then, and reads it as it
reads a request's.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

from arbiter.budget import Budget
from arbiter.connection import Connection, Gone
from arbiter.gputime.timer import now_s
from vgpu.protocol import wire

EVERY_S: Final = 0.001
"""Guessed: ten naps."""
_PACKET: Final = wire.encode(0, wire.Activity(wire.What.WORK))


class WarmUp:
    """Of one thread. Nothing that it reads goes anywhere."""

    def __init__(self) -> None:
        self._us, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._connection = Connection(sock, number=0, pid=0, hello_until_s=0.0)
        self._budget = Budget(now_s())
        self._again_s = 0.0

    def play(self, at_s: float) -> None:
        """Send and read one, unless that was done a moment ago."""
        if at_s < self._again_s:
            return
        self._again_s = at_s + EVERY_S
        with suppress(OSError, Gone):  # a kernel short of memory: it costs a slow request, and may not cost the arbiter
            self._us.send(_PACKET)
            self._budget.may(at_s)
            self._connection.receive_with_fd()
            self._budget.spend(1.0)

    def close(self) -> None:
        """Give it up."""
        self._us.close()
        self._connection.sock.close()
