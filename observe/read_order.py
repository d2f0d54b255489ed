"""In which order clients' sockets are read: what an event loop offers to the connections of a listener."""

from __future__ import annotations

from typing import Protocol


class ReadOrder(Protocol):
    """In which order clients' sockets are read."""

    def add_client(self, fd: int, address: str, /) -> None: ...

    def remove_client(self, fd: int, /) -> None: ...

    def refund(self, fd: int, /) -> None: ...


class ReadAsReady:
    """All that have something to read in each round, as other event loops do."""

    def add_client(self, _fd: int, _address: str, /) -> None:
        """Nothing to do."""

    def remove_client(self, _fd: int, /) -> None:
        """Nothing to do."""

    def refund(self, _fd: int, /) -> None:
        """Nothing to do."""
