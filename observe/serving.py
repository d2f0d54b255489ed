"""An HTTP server for a program's work, over uvicorn with httptools, within bounds on connections, memory and time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final, cast

import uvicorn

from observe.acceptor import Acceptor
from observe.bounds import Bounds
from observe.protocol import STATUS
from observe.refusals import RefusalCounter, not_counted

BACKLOG: Final = 4096
"""Connections that wait in the kernel to be accepted; net.core.somaxconn's default. A client beyond them tries again after 1 s, as long as the kubelet waits
for a probe. Floods of new connections overflowed uvicorn's 2,048 (ListenOverflows of /proc/net/netstat);
4,096 are accepted within 0.7 s (6,500 a second measured)."""

OPTIONS: Final[dict[str, Any]] = {
    "log_config": None, "log_level": "error", "access_log": False, "lifespan": "off", "server_header": False, "date_header": False,
    "timeout_graceful_shutdown": 10, "http": "httptools", "ws": "none",
    "proxy_headers": False, "backlog": BACKLOG,
}  # fmt: skip

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


def with_status(app: App) -> App:
    """The same, and the status of each answer is in the scope of its request."""

    async def wrapped(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
            await send(message)

        await app(scope, receive, sent)

    return wrapped


class Server(uvicorn.Server):
    """Signals are the program's own; `up` is set once the port is open. How long a connection may be idle is in `bounds`, not uvicorn's. What is
    refused is counted by `refused`."""

    def __init__(self, app: App, bounds: Bounds, refused: RefusalCounter = not_counted, **options: Any) -> None:
        super().__init__(uvicorn.Config(with_status(app), **(OPTIONS | options)))
        self.up = asyncio.Event()
        self._bounds, self._refused = bounds, refused

    def drain(self) -> None:
        """From now on each answer ends its connection, so that a client with kept connections goes elsewhere before we close.

        A client reads `Connection: close` with the answer and sends nothing more there. Without it, what it had just written to a
        connection that stood idle is lost when we close: Go's client does not send a POST again.
        """
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)  # what uvicorn makes the headers of all answers from, once a second
        self.server_state.default_headers.append(close)  # what it made last, which answers under way have too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's, which accepts without a limit."""
        self.servers = [
            cast(asyncio.Server, Acceptor(sock, self._bounds, self.config, self.server_state, self._refused))
            for sock in sockets or ()
        ]
        self.started = True
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
