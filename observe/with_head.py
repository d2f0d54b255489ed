"""The head of an answer and its body in one write to the kernel: uvicorn makes two, and each takes 10 us and wakes the client."""

from __future__ import annotations

import asyncio
from typing import Final

JOINED_BYTES: Final = 64 * 2**10
"""A body of at most this is copied behind its head. A larger one is not, nor does a larger head wait: a client that does not read it is to be noticed."""


class WithHead:
    """What uvicorn's cycle writes an answer to: its head waits for the first of its body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""
        self._begun = False

    def write(self, data: bytes) -> None:
        """The first is the head."""
        if not self._begun and len(data) <= JOINED_BYTES:
            self._begun, self._head = True, data
        elif self._head and len(data) <= JOINED_BYTES:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._begun = True
            self.flush()
            self._transport.write(data)

    def flush(self) -> None:
        """There is no body, or it is not known when it comes."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
