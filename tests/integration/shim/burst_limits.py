"""Limits of bursts from an arbiter that does not serve them itself: imported by a test's arbiter before it starts.

Its page shows that it serves bursts, and a connection for bursts gets WELCOME and one BURST for each GPU, whose limit in all is the grant's. It orders nothing.
"""

from __future__ import annotations

import socket
import threading

import arbiter.page
from arbiter.connection import Connection
from arbiter.memory.container import ServedContainer
from vgpu.protocol import wire

MIB = 2**20
GUARANTEE_LESS_MIB = 1
"""So much less than the limit in all is guaranteed: memory is elastic only above a guarantee."""
_greeted, _closed = ServedContainer._hello, Connection.close
_shared: set[int] = set()
"""Connections whose socket another thread reads."""


def _hello(self: ServedContainer, connection: Connection, hello: wire.Hello) -> None:
    if not hello.flags & wire.FOR_BURST or self.grant is None:
        _greeted(self, connection, hello)
        return
    limits = [gpu.mib * MIB for gpu in self.grant.gpus]
    gpus = tuple(wire.WelcomeGpu(u, limit, 0, 1) for u, limit in zip(self._uuids, limits, strict=True))
    connection.send(0, wire.Welcome(gpus))
    for number, limit in enumerate(limits):
        connection.send(0, wire.Burst(number, limit - GUARANTEE_LESS_MIB * MIB, limit))
    threading.Thread(target=_read, args=(connection.sock.dup(),), daemon=True).start()
    _shared.add(connection.number)
    self.connections.drop(connection)


def _close(self: Connection) -> None:
    """Without the shutdown that would end the other descriptor of a shared socket."""
    if self.number in _shared:
        self.sock.close()
    else:
        _closed(self)


def _read(sock: socket.socket) -> None:
    sock.setblocking(True)
    with sock:
        while sock.recv(wire.PACKET_LIMIT):
            pass


arbiter.page.FEATURES |= wire.UNDERSTANDS_BURST  # type: ignore[misc]
ServedContainer._hello = _hello  # type: ignore[method-assign]
Connection.close = _close  # type: ignore[method-assign]
