"""The event loop of asynchronous tests."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet


class EndingLoop(asyncio.SelectorEventLoop):
    """Gives up the TLS connections that were closed and wait for their peer's leave, up to 30 s, when the test is over.

    aiohttp closes the connection of a request that is cancelled, and nobody can wait for its end. Left alone, it would be reported
    as unclosed wherever the garbage collector comes by, in some later test. One that nobody closed is reported still.
    """

    def __init__(self) -> None:
        super().__init__()
        self._connections: WeakSet[asyncio.Transport] = WeakSet()

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **kwargs)
        self._connections.add(transport)
        return transport, protocol

    def close(self) -> None:
        closing = [] if self.is_closed() else [transport for transport in self._connections if transport.is_closing()]
        for transport in closing:
            transport.abort()
        if closing:
            self.run_until_complete(asyncio.sleep(0))
        super().close()
