"""Connect to a unix socket whose server may be behind with accepting."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Final

FULL_S: Final = 0.02
"""Between two tries while the socket's queue is full: the kernel sends no notice when it is not. Guessed."""


async def connect(sock: socket.socket, path: Path) -> None:
    """Of a socket that does not block; again while the queue is full, which asyncio's own way takes for a connection. Raises OSError."""
    while True:
        try:
            sock.connect(str(path))
        except BlockingIOError:
            await asyncio.sleep(FULL_S)
        else:
            return
