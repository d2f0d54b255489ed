"""Accepts connections for an HTTP server, within bounds from the first byte on: a connection counts before its TLS handshake."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from asyncio import sslproto
from contextlib import suppress
from functools import partial
from typing import Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from observe import address_filter
from observe.address_filter import source_of
from observe.bounds import Bounds
from observe.connection_rates import REFUSED_COST, ConnectionRates
from observe.connections import ClientConnection, ClientConnections, Phase
from observe.fair_loop import FairLoop
from observe.fairness import FairQueue
from observe.pace import Pace
from observe.protocol import BoundedProtocol, Listener
from observe.read_order import ReadAsReady, ReadOrder
from observe.refusals import RefusalCounter, not_counted

CLOSING: Final = 256
"""Connections that were not begun and wait to be closed. Beyond that they are closed at once."""

SWEEP_S: Final = 0.5
"""Between checks for connections that exceed a time limit."""

NO_DESCRIPTORS_S: Final = 0.1
"""So long nothing is accepted after the process ran out of descriptors or memory for one more."""

FILTER_S: Final = 0.05
"""Between changes of the kernel's filter, each of which takes 0.2 ms (measured): a flood's addresses are blocked one shortly after the other."""


class Acceptor:
    """Of one listening socket. Has the two methods of asyncio's Server that uvicorn calls."""

    def __init__(
        self,
        sock: socket.socket,
        bounds: Bounds,
        config: Config,
        state: ServerState,
        refused: RefusalCounter = not_counted,
    ) -> None:
        self.connections = ClientConnections(bounds, refused)
        self._sock, self._config, self._state = sock, config, state
        self._loop = asyncio.get_running_loop()
        requests = FairQueue(bounds.requests_per_s, bounds.requests_at_once)
        new = FairQueue(bounds.handshakes_per_s, bounds.handshakes_at_once)
        self._reading: ReadOrder = self._loop.clients if isinstance(self._loop, FairLoop) else ReadAsReady()
        self._closing = FairQueue()
        pace = Pace(bounds.long_bytes_per_s, bounds.body_bytes)
        self._rates = ConnectionRates(bounds.address_new_per_s, bounds.address_new_at_once)
        self._filtering: asyncio.TimerHandle | None = None
        self._filtered_s = -FILTER_S
        self._listener = Listener(
            self.connections, requests, new, self._closing, FairQueue(), pace, self._reading, self._charge_refusal
        )
        self._handshakes: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        with suppress(OSError):  # a socket of another family has no such option
            # for each client: else an answer's body waits 40 ms for the client's ACK of its head
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if config.ssl:  # a TLS client sends first: the kernel reports it once it has
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(bounds.request_s))
            if bounds.read_bytes:
                sslproto.SSLProtocol.max_size = bounds.read_bytes
        with suppress(OSError):  # of a server that had this socket before
            address_filter.detach(sock)
        sock.listen(config.backlog)
        self._loop.add_reader(sock, self._accept)
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)
        self._resuming: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Accept nothing more, and end handshakes and what was not begun. Connections go on."""
        self._loop.remove_reader(self._sock)
        for timer in (self._resuming, self._filtering):
            if timer is not None:
                timer.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        for one in [one for one in self.connections if one.fd < 0]:
            one.withdraw()
            one.close()

    async def wait_closed(self) -> None:
        """Until no connection is left, as the server has ended them."""
        self._sweeping.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        self._closing.begin_all()

    def _accept(self) -> None:
        for _ in range(self.connections.bounds.accepted_at_once):
            try:
                # accept() makes an object of each, which costs three times as much (18 us, measured); most of a flood's are never begun
                fd, address = self._sock._accept()  # type: ignore[attr-defined]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._loop.remove_reader(self._sock)
                self._resuming = self._loop.call_later(
                    NO_DESCRIPTORS_S, self._loop.add_reader, self._sock, self._accept
                )
                return
            one = ClientConnection(source_of(address[0]) if isinstance(address, tuple) else "", time.monotonic())
            if self._is_blocked(one):
                self.connections.refused("rate")
                os.close(fd)
                continue
            evicted = self.connections.add(one)
            if evicted is not None:
                if (
                    evicted.over_its_part
                ):  # else it is no worse than the others: in a flood of many addresses, one of its victims
                    self._charge_refusal(evicted.address)
                self._end(evicted)
            one.close = partial(_close_descriptor, one, fd)
            one.withdraw = self._listener.new.submit(one.address, partial(self._begin, fd, one))

    def _is_blocked(self, new: ClientConnection) -> bool:
        self._spend(new.address, new.since_s, 1.0)
        return self._rates.is_blocked(new.address)

    def _charge_refusal(self, address: str) -> None:
        """A client of this address was refused something."""
        self._spend(address, time.monotonic(), REFUSED_COST)

    def _spend(self, address: str, at_s: float, cost: float) -> None:
        """One connection to a Unix socket is like another, so none of them costs anything."""
        if address and not self._is_exempt(address) and self._rates.spend(address, at_s, cost):
            self._filter_soon()

    def _is_exempt(self, address: str) -> bool:
        return self.connections.bounds.well_exempt and self.connections.is_answered_well(address)

    def _filter_soon(self) -> None:
        if self._filtering is None:
            self._filtering = self._loop.call_at(max(self._loop.time(), self._filtered_s + FILTER_S), self._filter)

    def _filter(self) -> None:
        """Where the kernel has no memory for all, it gets fewer: else those of the last time would stay blocked. The others' connections are accepted and closed."""
        self._filtering, self._filtered_s = None, self._loop.time()
        blocked = self._rates.blocked[: address_filter.FILTERED_MOST]
        while blocked:
            try:
                address_filter.attach(self._sock, blocked)
            except OSError:
                blocked = blocked[: len(blocked) // 2]
            else:
                return
        with suppress(OSError):
            address_filter.detach(self._sock)

    def _end(self, one: ClientConnection) -> None:
        """Close it, soon. One that was begun has memory, and there are few of them: at once."""
        one.withdraw()  # a request without a client would delay others of its address, and in a flood of all addresses
        if one.fd < 0 and len(self._closing) < CLOSING:
            self._closing.submit(one.address, partial(_close, one))
        else:
            one.close()

    def _begin(self, fd: int, one: ClientConnection) -> None:
        client = socket.socket(fileno=fd)
        client.setblocking(False)
        task = self._loop.create_task(self._shake_hands(client, one))
        self._handshakes.add(task)
        one.close, one.withdraw = partial(self._break_off, client, one), _nothing
        task.add_done_callback(partial(self._ended, client, one))

    def _ended(self, client: socket.socket, one: ClientConnection, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        if task.cancelled():  # before its first step: none of its lines has run
            self.connections.remove(one)
            one.close = _nothing
            client.close()

    async def _shake_hands(self, client: socket.socket, one: ClientConnection) -> None:
        tls = self._config.ssl
        one.fd = client.fileno()
        self._reading.add_client(one.fd, one.address)
        protocol = BoundedProtocol(self._config, self._state, one, self._listener)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=tls,
                ssl_handshake_timeout=self.connections.bounds.request_s if tls else None,
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError) as error:
            if isinstance(error, (ssl.SSLError, ConnectionError)):
                self.connections.refused("handshake")
                self._charge_refusal(one.address)
            self._reading.remove_client(one.fd)
            self.connections.remove(one)
            one.close = _nothing
            client.close()  # as asyncio did, if it ever had it
            return
        one.close = protocol.abort
        if one not in self.connections:  # it was closed while its handshake ended
            one.close()
        elif self.connections.bounds.read_bytes and hasattr(transport, "max_size"):
            transport.max_size = self.connections.bounds.read_bytes

    def _break_off(self, client: socket.socket, one: ClientConnection) -> None:
        """End a handshake. Its socket is closed by asyncio alone, which may be about to register it: closed here, its number would be another client's by
        then, and asyncio would take the events of that one, which waited in vain."""
        self._reading.remove_client(one.fd)  # so that the end of the stream is read in the next round
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _sweep(self) -> None:
        if self._rates.release(time.monotonic(), self._is_exempt):
            self._filter_soon()
        for one in self.connections.expired(time.monotonic()):
            if one.phase is not Phase.IDLE:
                self._charge_refusal(one.address)
            one.withdraw()
            self._closing.submit(one.address, partial(_close, one))
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)


def _close(one: ClientConnection) -> None:
    """Wherever it is by then."""
    one.close()


def _close_descriptor(one: ClientConnection, fd: int) -> None:
    """Once."""
    one.close = _nothing
    os.close(fd)


def _nothing() -> None:
    """It waits in no queue, or has ended: its descriptor may be another client's by now."""
