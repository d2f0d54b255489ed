"""Two HTTP servers in one event loop: one for the program's work, one for what operators look at.

Over uvicorn with httptools. The second is a bare ASGI callable: probes and scrapes need no router.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

import uvicorn

from observe.pages import Pages

KEEP_ALIVE_S: Final = 120
"""Longer than the 90 s after which Go's HTTP client (kube-scheduler, API server) drops an idle connection, so that the end never comes from us."""

OPTIONS: Final[dict[str, Any]] = {
    "log_config": None, "access_log": False, "lifespan": "off", "server_header": False, "date_header": False,
    "timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": 10, "http": "httptools", "ws": "none",
    "proxy_headers": False,
}  # fmt: skip

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Server(uvicorn.Server):
    """Signals are the program's own, for two servers share them; `up` is set once the port is open."""

    def __init__(self, app: App, **options: Any) -> None:
        super().__init__(uvicorn.Config(app, **(OPTIONS | options)))
        self.up = asyncio.Event()

    def drain(self) -> None:
        """From now on each answer ends its connection, so that a client with kept connections goes elsewhere before we close.

        A client reads `Connection: close` with the answer and sends nothing more there. Without it, what it had just written to a
        connection that stood idle is lost when we close: Go's client does not send a POST again.
        """
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)  # what uvicorn makes the headers of all answers from, once a second
        self.server_state.default_headers.append(close)  # what it made last, which answers under way have too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes any free one. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
    return sock


def operations_app(pages: Pages) -> App:
    """GET /metrics, /healthz and /readyz, as ASGI."""

    async def app(scope: Message, _receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
        page = pages.get(scope["path"])
        headers = [(b"content-type", page.content_type.encode()), (b"content-length", b"%d" % len(page.body))]
        await send({"type": "http.response.start", "status": page.status, "headers": headers})
        await send({"type": "http.response.body", "body": page.body})

    return app
