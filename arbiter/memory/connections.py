"""The connections of one container: which are open, which wait for the grant, and which ended.

An error on one connection ends that connection and affects no other. A connection that ends, for any reason, is passed once to
`ended`, and stays in `gone` with its socket open until the poller has removed it.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Final

import structlog

from arbiter.connection import BAD_PACKET, Connection, PeerGone, peer_pid
from vgpu.api.enforcement import TABLE, Reason
from vgpu.api.errors import BadDocument

QUIET_S: Final = 1.0
"""A container that sends garbage fills its own metric and not the log."""
LOGGED_AGAIN_S: Final = 60.0
"""A reason of a container is logged at most this often, however often its processes report it."""
LOGGED_LIMIT: Final = 4096
"""Containers and reasons stored for that. Guessed."""
_log = structlog.get_logger()
_logged_s: dict[tuple[str, Reason], float] = {}
"""The last time that each was logged."""


class Connections(Mapping[int, Connection]):
    """By number. `grant`: the name of the grant directory, for the log."""

    def __init__(self, grant: str, clock: Callable[[], float], ended: Callable[[Connection], None]) -> None:
        self.bad_packets = 0
        self.refused: Counter[str] = Counter()
        """Number of connections that the arbiter rejected or closed, by reason."""
        self._grant, self._clock, self._ended = grant, clock, ended
        self._open: dict[int, Connection] = {}
        self._numbers = 0
        self._silent: dict[int, float] = {}
        """Numbers of the connections without a HELLO so far, and the deadline for it, oldest first."""
        self._waiting: set[int] = set()
        """Numbers of the connections that sent HELLO and wait for the grant."""
        self._gone: list[Connection] = []
        self._handed_over: list[Connection] = []
        self._quiet_until_s = 0.0

    def __getitem__(self, number: int) -> Connection:
        return self._open[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, sock: socket.socket, silent_until_s: float, hello_until_s: float) -> Connection:
        """A process connected. The two times are its deadline for HELLO, and the end of its wait for the grant after that."""
        self._numbers += 1
        connection = Connection(sock, self._numbers, peer_pid(sock), hello_until_s, self._grant)
        self._open[connection.number] = connection
        self._silent[connection.number] = silent_until_s
        return connection

    def greet(self, connection: Connection) -> None:
        """It sent HELLO, and waits for the grant. Raises BadDocument for a second HELLO."""
        if connection.greeted:
            raise BadDocument("HELLO twice on one connection")
        connection.greeted = True
        self._silent.pop(connection.number, None)
        self._waiting.add(connection.number)

    def silent(self, now_s: float) -> list[Connection]:
        """The connections whose deadline for HELLO has passed."""
        return [self._open[number] for number, until_s in self._silent.items() if now_s >= until_s]

    def silent_until_s(self) -> list[float]:
        """The earliest deadline for HELLO; empty if all have sent it."""
        return list(itertools.islice(self._silent.values(), 1))

    def waiting(self) -> list[Connection]:
        """The connections that sent HELLO and have no answer yet."""
        return [self._open[number] for number in self._waiting]

    def welcome(self, connection: Connection) -> None:
        """Its HELLO is answered."""
        connection.welcomed = True
        self._waiting.discard(connection.number)

    def welcomed(self) -> list[Connection]:
        """The answered connections. Read again after each sent packet, because a failed send drops the connection."""
        return [connection for connection in self._open.values() if connection.welcomed]

    def hand_over(self, connection: Connection) -> None:
        """The connection is for GPU time: its ownership passes to the GPU-time scheduler."""
        del self._open[connection.number]
        self._handed_over.append(connection)

    def handed_over(self) -> list[Connection]:
        """The connections handed over since the last call."""
        handed_over, self._handed_over = self._handed_over, []
        return handed_over

    def gone(self) -> list[Connection]:
        """The connections that ended since the last call. Their sockets are still open until the poller has removed them."""
        gone, self._gone = self._gone, []
        return gone

    def attempt(self, connection: Connection, step: Callable[[], None]) -> None:
        """Run a step whose failure ends this connection and affects no other."""
        try:
            step()
        except PeerGone:
            self.drop(connection)
        except BadDocument as error:
            self.bad_packets += 1
            if self._clock() >= self._quiet_until_s:
                self._quiet_until_s = self._clock() + QUIET_S
                count = self.bad_packets
                _log.warning("bad packet", grant=self._grant, pid=connection.pid, reason=str(error), count=count)
            self.refuse(connection, BAD_PACKET, str(error), "bad-packet")

    def refuse(self, connection: Connection, code: int, text: str, reason: str) -> None:
        """Send ERROR and close the connection. `reason`: for the metric."""
        self.refused[reason] += 1
        connection.refuse(code, text)
        self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close the connection; no effect if it is closed already."""
        if self._open.pop(connection.number, None) is None:
            return
        connection.close_passed()
        self._gone.append(connection)
        self._silent.pop(connection.number, None)
        self._waiting.discard(connection.number)
        self._ended(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open.values()):
            self.drop(connection)


def log_report(grant: str, pid: int, reason: Reason, *, active: bool) -> None:
    """A library reports a limit that it cannot enforce, or can enforce again. Endless reports of a process fill the debug log only."""
    if not active:
        _log.debug("a process reports the end of a reason", grant=grant, pid=pid, reason=reason)
        return
    at_s = time.monotonic()
    if at_s - _logged_s.get((grant, reason), -inf) < LOGGED_AGAIN_S:
        _log.debug("a limit is not enforced", grant=grant, pid=pid, reason=reason)
        return
    if len(_logged_s) >= LOGGED_LIMIT:
        _logged_s.clear()
    _logged_s[grant, reason] = at_s
    _log.warning("a limit is not enforced", grant=grant, pid=pid, reason=reason, means=TABLE[reason].means)
