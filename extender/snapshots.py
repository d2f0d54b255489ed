"""Snapshots for GET /snapshot, written between the scheduler's calls: 10,000 nodes with 8 GPUs are 24 to 71 MiB and take a second of processor time.

A piece takes a third of a millisecond of the event loop, which then has others' work for three times as long. Only the piece that is being sent is in memory.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from vgpu.snapshot import Records, snapshot_pieces

PIECE_S: Final = 0.0003
"""Of one piece. A call to the filter waits for it at most once."""
REST_S: Final = 0.001
"""Between two pieces."""
SENT_BYTES: Final = 64 * 2**10
"""Of one write to the client."""
MOST_S: Final = 120.0
"""For one snapshot. A reader that needs longer is disconnected: others wait for it."""
WAIT_S: Final = 10.0
"""For the snapshot of another client."""
WAITING: Final = 4
"""Clients that wait so. One more is refused at once."""
BEGUN_PART: Final = 0.005
"""Of the event loop's time, for the beginnings of snapshots: what changes is copied then, all in one go, which takes 3 to 15 ms for 10,000 nodes."""
MOST_BETWEEN_S: Final = 5.0
"""Between two snapshots. A beginning that takes longer than 25 ms was paused, as by a bound on the container's processors: who calls next would wait in vain."""
GZIP: Final = 16 + zlib.MAX_WBITS

BUSY: Final = "another client reads a snapshot: retry in some seconds"


class Snapshots:
    """One at a time."""

    def __init__(self, take: Callable[[], Records]) -> None:
        self._take, self._lock, self._waiting = take, asyncio.Lock(), 0
        self._next_s = 0.0
        """When another one may begin; monotonic."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """Whether a snapshot may be written now: after at most `WAIT_S`."""
        if self._waiting >= WAITING:
            yield False
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._begin()
        except TimeoutError:
            yield False
            return
        finally:
            self._waiting -= 1
        try:
            yield True
        finally:
            self._lock.release()

    async def _begin(self) -> None:
        await self._lock.acquire()
        try:
            await asyncio.sleep(max(0.0, self._next_s - time.monotonic()))
        except asyncio.CancelledError:
            self._lock.release()
            raise

    async def pieces(self, *, compressed: bool) -> AsyncGenerator[bytes]:
        """The document of this moment, as gzip or as it is. To be called in a `turn`."""
        compress = zlib.compressobj(1, zlib.DEFLATED, GZIP) if compressed else None
        began_s = time.monotonic()
        records = self._take()
        ended_s = time.monotonic()
        self._next_s = ended_s + min(MOST_BETWEEN_S, (ended_s - began_s) / BEGUN_PART)
        made = bytearray()
        await asyncio.sleep(REST_S)
        for piece in _for_a_time(snapshot_pieces(records)):
            made += compress.compress(piece) if compress else piece
            if len(made) >= SENT_BYTES:
                yield bytes(made)
                made.clear()
            await asyncio.sleep(REST_S)
        if compress:
            made += compress.flush()
        yield bytes(made)


def _for_a_time(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Together what is made in `PIECE_S`."""
    made, ends_s = bytearray(), time.perf_counter() + PIECE_S
    for piece in pieces:
        made += piece
        if time.perf_counter() >= ends_s:
            yield bytes(made)
            made, ends_s = bytearray(), time.perf_counter() + PIECE_S  # the reader's time is between
    if made:
        yield bytes(made)


def accepts_gzip(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Of a request."""
    for name, value in headers:
        if name == b"accept-encoding":
            for coding in value.lower().split(b","):
                what, _, parameters = coding.partition(b";")
                if what.strip() == b"gzip":
                    return parameters.replace(b" ", b"").rstrip(b"0") not in (b"q=", b"q=0.")
    return False
