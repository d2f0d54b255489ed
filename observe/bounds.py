"""What an HTTP server of Tangram accepts, and which connections it closes when clients exceed that (invariant I9).

Values and decisions only: `protocol` counts bytes and reports phases, `acceptor` closes what this module names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from observe.refusals import Refused, not_counted

KIB: Final = 2**10
MIB: Final = 2**20

YOUNG_S: Final = 1.0
"""A connection without a whole request is closed for another's sake only when it is older, as long as there is any other choice. A request of
the API server takes milliseconds."""

ANSWERED_WELL_S: Final = 60.0
"""So long after a request that was answered 200 the connections of its address count a tenth: an API server with a hundred calls under way has fewer than
one client of a flood. Guessed."""
ORDINARY: Final = 10
"""Connections of an API server that count as one of another client."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one listener. Times are in seconds; a connection that exceeds one is closed."""

    body_bytes: int
    """Of one request; more is answered 413."""
    header_bytes: int = 32 * KIB
    """Request line and headers of one request, trailers too; more is answered 431."""
    request_s: float = 10
    """From the connection, or the first byte of a further request, to the last byte of the request. The TLS handshake is part of it."""
    answer_s: float = 20
    """From the answer until the client has read it."""
    idle_s: float = 120
    """Between two requests. Go's HTTP client (kube-scheduler, API server) drops an idle connection after 90 s, so that the end never comes from us."""
    connections: int = 1024
    per_address: int = 512
    """The API server opens a connection for each request in flight, often from an address that it shares."""
    held_bytes: int = 16 * MIB
    """Requests that are being received or answered, of all connections together."""

    read_bytes: int = 32 * KIB
    """From one connection before others have their turn; asyncio's own 256 KiB are also what TLS has in memory for each. 0 = as the event loop does."""
    long_bytes: int = 128 * KIB
    """What a request has beyond that is read at `long_bytes_per_s`, all connections together."""
    long_bytes_per_s: float = 16 * MIB
    small_bytes: int = 1 * KIB
    """A piece of a request that is smaller and not its last. After `small_pieces` of one request its connection is read at most twice a second."""
    small_pieces: int = 4
    handshakes_per_s: float = inf
    """New connections that are begun, all addresses together; the one that had least of late comes first."""
    handshakes_at_once: float = inf


ADMISSION: Final = Bounds(
    body_bytes=10 * MIB, connections=768, read_bytes=16 * KIB, handshakes_per_s=200, handshakes_at_once=600
)
"""A connection with TLS takes 44 KiB, a handshake 1 to 2 ms of a processor (measured). The API server reviews objects of up to 1.5 MiB (etcd's limit for a request), and Go writes '<', '>' and '&' in JSON as six bytes: 9 MiB, and the
frame around it."""

VERBS: Final = Bounds(body_bytes=64 * MIB, held_bytes=256 * MIB, read_bytes=0, long_bytes=64 * MIB)
"""kube-scheduler's calls on 127.0.0.1, where nobody else is, which carry a pod and the names of up to 10,000 nodes, or for preemption the victims on each."""

OPERATIONS: Final = Bounds(
    body_bytes=0,
    header_bytes=16 * KIB,
    connections=256,
    per_address=128,
    held_bytes=4 * MIB,
    handshakes_per_s=100,
    handshakes_at_once=256,
)
"""Probes and scrapes."""


class Phase(Enum):
    """Where a connection is."""

    REQUEST = "a request is awaited, or arrives"
    WORK = "the program makes the answer"
    ANSWER = "the client reads the answer"
    IDLE = "it was served and may send another request"


@dataclass(eq=False, slots=True)
class Connection:
    """One client's connection."""

    address: str
    since_s: float
    """When the phase began; monotonic."""
    phase: Phase = Phase.REQUEST
    served: bool = False
    """Was a whole request answered on it?"""
    held_bytes: int = 0
    fd: int = -1
    close: Callable[[], object] = lambda: None
    """Ends it at once, wherever it is: accepted, in its handshake, or served."""


@dataclass(slots=True)
class Connections:
    """The open connections of one listener, oldest phase first."""

    bounds: Bounds
    refused: Refused = not_counted
    _open: dict[Connection, None] = field(default_factory=dict)
    _addresses: Counter[str] = field(default_factory=Counter)
    _answered_well_s: dict[str, float] = field(default_factory=dict)
    """When an address was last answered 200."""
    held_bytes: int = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, one: Connection) -> bool:
        return one in self._open

    def add(self, one: Connection) -> Connection | None:
        """A client connected. Returns the connection to close for it, if there are too many."""
        found = None
        if self._addresses[one.address] >= self.bounds.per_address:
            found = self._choose((other for other in self._open if other.address == one.address), one.since_s)
        elif len(self._open) >= self.bounds.connections:
            found = self._choose(self._open, one.since_s)
        if found is not None:
            self.refused("connections")
            self.remove(found)
        self._open[one] = None
        self._addresses[one.address] += 1
        return found

    def remove(self, one: Connection) -> None:
        """It was closed; no error if that is known."""
        if one not in self._open:
            return
        del self._open[one]
        self._addresses[one.address] -= 1
        if self._addresses[one.address] == 0:
            del self._addresses[one.address]
        self.held_bytes -= one.held_bytes
        one.held_bytes = 0

    def enter(self, one: Connection, phase: Phase, at_s: float) -> None:
        """It is in another phase from now on, which begins now even if it is the same. IDLE: it was served, and what it held is free."""
        if one not in self._open:
            return
        if phase is Phase.IDLE:
            one.served = True
            self.held_bytes -= one.held_bytes
            one.held_bytes = 0
        one.phase, one.since_s = phase, at_s
        del self._open[one]
        self._open[one] = None

    def answered_well(self, one: Connection, at_s: float) -> None:
        """A request on it was answered 200."""
        self._answered_well_s.pop(one.address, None)
        self._answered_well_s[one.address] = at_s
        if len(self._answered_well_s) > self.bounds.connections:
            del self._answered_well_s[next(iter(self._answered_well_s))]

    def hold(self, one: Connection, more_bytes: int) -> Connection | None:
        """So much more of a request or an answer is in memory for it. Returns the connection to close, if all together hold too much."""
        if one not in self._open:
            return None
        one.held_bytes += more_bytes
        self.held_bytes += more_bytes
        if self.held_bytes <= self.bounds.held_bytes:
            return None
        holders = [other for other in self._open if other.held_bytes > 0 and other.phase is not Phase.WORK]
        found = self._choose([other for other in holders if other is not one], one.since_s) or one
        self.refused("memory")
        self.remove(found)
        return found

    def expired(self, at_s: float) -> list[Connection]:
        """Those that stayed in their phase for longer than its limit. They are removed."""
        limit_s = {
            Phase.REQUEST: self.bounds.request_s,
            Phase.ANSWER: self.bounds.answer_s,
            Phase.IDLE: self.bounds.idle_s,
        }
        late = [one for one in self._open if at_s - one.since_s > limit_s.get(one.phase, inf)]
        for one in late:
            if one.phase is not Phase.IDLE:
                self.refused("late" if one.phase is Phase.REQUEST else "unread")
            self.remove(one)
        self._answered_well_s = {
            address: well_s for address, well_s in self._answered_well_s.items() if at_s - well_s <= ANSWERED_WELL_S
        }
        return late

    def _choose(self, among: Iterable[Connection], at_s: float) -> Connection | None:
        """Whom to close for another: the oldest without a whole request, if it is older than a second and its address has its part of all connections; one
        of an address that has less has all the time that a request has. Where there is none, the client with the most connections loses one: without a
        whole request, else idle, else with a request under way."""
        weight = {address: self._weight(address) for address in self._addresses}
        part = sum(weight.values()) / max(1, len(weight))
        candidates = list(among)
        most = max((weight[address] for address in {one.address for one in candidates}), default=0)
        waiting = idle = rest = None
        for one in candidates:
            if one.phase is Phase.REQUEST and not one.served:
                age_s = at_s - one.since_s
                if age_s > YOUNG_S and (weight[one.address] >= part or age_s > self.bounds.request_s):
                    return one
                waiting = waiting or (one if weight[one.address] == most else None)
            elif weight[one.address] == most:
                if one.phase is Phase.IDLE:
                    idle = idle or one
                else:
                    rest = rest or one
        return waiting or idle or rest

    def _weight(self, address: str) -> int:
        """How many connections an address has, for comparison with others."""
        return self._addresses[address] * (1 if address in self._answered_well_s else ORDINARY)
