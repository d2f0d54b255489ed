"""The connections of one container: which there are, which wait for the grant, and which ended.

What one connection does wrong ends that connection and touches no other. Whoever ends, for whatever reason, is announced once to
`ended`, and stays among `gone` with its socket open until the poller has forgotten it.
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

from arbiter.connection import BAD_PACKET, Connection, Gone, peer_pid
from vgpu.api.enforcement import TABLE, Reason
from vgpu.api.errors import BadDocument

QUIET_S: Final = 1.0
"""A container that sends garbage fills its own metric and not the log."""
LOGGED_AGAIN_S: Final = 60.0
"""A reason of a container is logged this often, however often its processes report it."""
LOGGED_LIMIT: Final = 4096
"""Containers and reasons that are remembered for that. Guessed."""
_log = structlog.get_logger()
_logged_s: dict[tuple[str, Reason], float] = {}
"""When each was logged last."""


class Connections(Mapping[int, Connection]):
    """By number. `grant`: the name of the grant directory, for the log."""

    def __init__(self, grant: str, clock: Callable[[], float], ended: Callable[[Connection], None]) -> None:
        self.bad_packets = 0
        self.refused: Counter[str] = Counter()
        """Those that were refused or hung up on, by reason."""
        self._grant, self._clock, self._ended = grant, clock, ended
        self._open: dict[int, Connection] = {}
        self._numbers = 0
        self._silent: dict[int, float] = {}
        """Numbers of those that did not say HELLO yet, and until when they may, oldest first."""
        self._waiting: set[int] = set()
        """Numbers of those that said HELLO and wait for the grant."""
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
        """A process connected. Until when it has to say HELLO, and may then wait for the grant."""
        self._numbers += 1
        connection = Connection(sock, self._numbers, peer_pid(sock), hello_until_s)
        self._open[connection.number] = connection
        self._silent[connection.number] = silent_until_s
        return connection

    def greet(self, connection: Connection) -> None:
        """It said HELLO, and waits for the grant. Raises BadDocument when it did so before."""
        if connection.greeted:
            raise BadDocument("HELLO twice on one connection")
        connection.greeted = True
        self._silent.pop(connection.number, None)
        self._waiting.add(connection.number)

    def silent(self, now_s: float) -> list[Connection]:
        """Those that should have said HELLO by now."""
        return [self._open[number] for number, until_s in self._silent.items() if now_s >= until_s]

    def silent_until_s(self) -> list[float]:
        """When the first of those that say nothing has to have said HELLO; empty when all have."""
        return list(itertools.islice(self._silent.values(), 1))

    def waiting(self) -> list[Connection]:
        """Those that said HELLO and were not answered yet."""
        return [self._open[number] for number in self._waiting]

    def welcome(self, connection: Connection) -> None:
        """It is answered."""
        connection.welcomed = True
        self._waiting.discard(connection.number)

    def welcomed(self) -> list[Connection]:
        """Asked anew after each packet sent, since a process that cannot be sent one is dropped."""
        return [connection for connection in self._open.values() if connection.welcomed]

    def hand_over(self, connection: Connection) -> None:
        """It is for GPU time, and another's from here on."""
        del self._open[connection.number]
        self._handed_over.append(connection)

    def handed_over(self) -> list[Connection]:
        """Those that were handed over since this was called last."""
        handed_over, self._handed_over = self._handed_over, []
        return handed_over

    def gone(self) -> list[Connection]:
        """Those that ended since this was called last. Their sockets are still open, for the poller to forget."""
        gone, self._gone = self._gone, []
        return gone

    def attempt(self, connection: Connection, step: Callable[[], None]) -> None:
        """A step whose failure ends this connection and touches no other."""
        try:
            step()
        except Gone:
            self.drop(connection)
        except BadDocument as error:
            self.bad_packets += 1
            if self._clock() >= self._quiet_until_s:
                self._quiet_until_s = self._clock() + QUIET_S
                count = self.bad_packets
                _log.warning("bad packet", grant=self._grant, pid=connection.pid, reason=str(error), count=count)
            self.refuse(connection, BAD_PACKET, str(error), "bad-packet")

    def refuse(self, connection: Connection, code: int, text: str, reason: str) -> None:
        """Send ERROR and hang up. `reason`: for the metric."""
        self.refused[reason] += 1
        connection.refuse(code, text)
        self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Hang up; nothing when that was done before."""
        if self._open.pop(connection.number, None) is None:
            return
        self._gone.append(connection)
        self._silent.pop(connection.number, None)
        self._waiting.discard(connection.number)
        self._ended(connection)

    def close(self) -> None:
        """Hang up on every process."""
        for connection in list(self._open.values()):
            self.drop(connection)


def log_report(grant: str, pid: int, reason: Reason, *, active: bool) -> None:
    """A library reports a limit that it cannot enforce, or that it can again. A process that reports without end fills the debug log only."""
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
