"""Write snapshots for GET /snapshot between kube-scheduler's calls: 10,000 nodes with 8 GPUs are 24 to 71 MiB and take a second of CPU time.

A chunk takes a third of a millisecond of the event loop, which then does other work for three times as long. Only the chunk that is being sent is in memory.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

from vgpu.scheduling.snapshot import SnapshotRecords, snapshot_chunks

CHUNK_S: Final = 0.0003
"""Of one chunk. A call to the filter waits for it at most once."""
REST_S: Final = 0.001
"""Between two chunks."""
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
REST_AT_MOST_S: Final = 5.0
"""Before the next snapshot begins, however large the cluster: a client that waits for it is not refused for that alone."""
GZIP: Final = 16 + zlib.MAX_WBITS

BUSY: Final = "another client reads a snapshot: retry in some seconds"


class SnapshotWriter:
    """One at a time."""

    def __init__(self, records: Callable[[], SnapshotRecords]) -> None:
        self._records, self._lock, self._waiting = records, asyncio.Lock(), 0
        self._next_s = 0.0
        """When another one may begin; monotonic."""

    @asynccontextmanager
    async def slot(self, gone: asyncio.Future[Any]) -> AsyncIterator[bool]:
        """Whether a snapshot may be written now: after at most `WAIT_S`, or when the client is `gone`."""
        if self._waiting >= WAITING:
            yield False
            return
        self._waiting += 1
        begin = asyncio.ensure_future(self._begin())
        try:
            await asyncio.wait({begin, gone}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not begin.cancel():
                self._lock.release()
            raise
        finally:
            self._waiting -= 1
        if begin.cancel():
            yield False
            return
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

    async def chunks(self, *, compressed: bool) -> AsyncGenerator[bytes]:
        """The document of this moment, as gzip or as it is. To be called in a `slot`."""
        compress = zlib.compressobj(1, zlib.DEFLATED, GZIP) if compressed else None
        before_s = time.thread_time()
        records = self._records()
        took_s = time.thread_time() - before_s
        self._next_s = time.monotonic() + min(REST_AT_MOST_S, took_s / BEGUN_PART)
        made = bytearray()
        await asyncio.sleep(REST_S)
        for chunk in _for_a_time(snapshot_chunks(records)):
            made += compress.compress(chunk) if compress else chunk
            if len(made) >= SENT_BYTES:
                yield bytes(made)
                made.clear()
            await asyncio.sleep(REST_S)
        if compress:
            made += compress.flush()
        yield bytes(made)


def _for_a_time(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Together what is made in `CHUNK_S`."""
    made, ends_s = bytearray(), time.perf_counter() + CHUNK_S
    for chunk in chunks:
        made += chunk
        if time.perf_counter() >= ends_s:
            yield bytes(made)
            made, ends_s = bytearray(), time.perf_counter() + CHUNK_S  # the reader's time is between
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
