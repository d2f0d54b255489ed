"""What an HTTP server of Tangram accepts: the limits of each listener (invariant I9).

Values only: `connections` decides which connections exceed them, `protocol` counts bytes, `acceptor` closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20


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
    """From one connection before others are read; asyncio's own 256 KiB are also what TLS has in memory for each. 0 = as the event loop does."""
    long_bytes: int = 128 * KIB
    """What a request has beyond that is read at `long_bytes_per_s`, all connections together."""
    long_bytes_per_s: float = 16 * MIB
    small_bytes: int = 1 * KIB
    """A piece of a request that is smaller and not its last. After `small_pieces` of one request its connection is read at most twice a second."""
    small_pieces: int = 4
    accepted_at_once: int = 32
    """Connections that are accepted before other work of the event loop continues. The kernel hands them out in the order of their arrival, so a client waits
    for those of a flood that came before: to accept one takes 0.05 ms, and to close one for it 0.1 ms, which is done later."""
    handshakes_per_s: float = inf
    """New connections that are begun, all addresses together; the one that had least of late comes first."""
    handshakes_at_once: float = inf
    address_new_per_s: float = inf
    """New connections of one address, after `address_new_at_once`. A faster address is blocked for a while (`connection_rates`), unless `well_exempt` says otherwise."""
    address_new_at_once: float = inf
    well_exempt: bool = False
    """An address that had an answer with status 200 in the last minute is not blocked: for listeners where others have none."""
    requests_per_s: float = inf
    """Requests that are begun, all addresses together, after `requests_at_once`; the address that had the fewest of late comes first."""
    requests_at_once: float = inf
    trusted: bool = False
    """For a listener that only one program calls: a connection whose last request was answered well is read at once, has memory before others, and does not count
    among new ones. Where others can have answers too, an API server's new connection must not come after theirs."""

    @property
    def unproven_bytes(self) -> int:
        """Of `held_bytes`, the most for all connections that were not answered well, on a listener that trusts others: beside them fits one
        request of any size, whatever answers to unknown clients are being made."""
        return max(self.body_bytes, self.held_bytes - self.body_bytes)

    @property
    def answer_bytes(self) -> int:
        """One answer counts this much at most: a larger one would never fit."""
        return self.held_bytes // 2


ADMISSION: Final = Bounds(
    body_bytes=10 * MIB,
    connections=640,
    read_bytes=16 * KIB,
    handshakes_per_s=100,
    handshakes_at_once=300,
    address_new_per_s=2,
    address_new_at_once=512,
    well_exempt=True,
)
"""A connection with TLS takes 44 to 80 KiB, a handshake 1 to 2 ms of a processor (measured). The API server reviews objects of up to 1.5 MiB (etcd's limit for a request), and Go writes '<', '>' and '&' in JSON as six bytes: 9 MiB, and the
frame around it."""

VERBS: Final = Bounds(
    body_bytes=16 * MIB,
    held_bytes=32 * MIB,
    read_bytes=0,
    accepted_at_once=8,
    handshakes_per_s=100,
    handshakes_at_once=256,
    trusted=True,
)
"""kube-scheduler's calls on 127.0.0.1 (`nodeCacheCapable`). A pod is at most 9 MiB, as for `ADMISSION`. /filter adds the name of each node, 256 bytes at most with quotes
and comma: 2.5 MiB for 10,000 nodes. /preempt adds 48 bytes for each victim on the nodes that kube-scheduler tries, a tenth of them or 100: 5.3 MiB for 1,000 nodes
with 110 pods each, and 0.3 MiB for their names. That is 14.6 MiB at most; calls of 10,000 nodes with names of 44 bytes were 0.5 MiB (measured).
Go keeps two idle connections to an extender, so kube-scheduler makes new ones for some hundred bindings a second. The filter comes over one that it keeps, and
then waits for each round of the event loop."""

OPERATIONS: Final = Bounds(
    body_bytes=0,
    header_bytes=16 * KIB,
    connections=256,
    per_address=128,
    held_bytes=4 * MIB,
    handshakes_per_s=100,
    handshakes_at_once=256,
    address_new_per_s=10,
    address_new_at_once=256,
    requests_per_s=200,
    requests_at_once=200,
)
"""Probes and scrapes. 50 clients that requested without a pause had 5,000 a second, which took a processor from the program (p99 of the filter 2.5 times the
control, measured). A probe of another address waits at most 5 ms."""
