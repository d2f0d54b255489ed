"""GET /snapshot is written in chunks, one snapshot at a time, and as fast as it is read."""

from __future__ import annotations

import asyncio
import gc
import gzip
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
import uvloop

from extender import snapshot_writer as snapshots
from extender.server import scheduler_app
from extender.snapshot_writer import BUSY, CHUNK_S, WAITING, SnapshotWriter, accepts_gzip
from extender.verbs import Verbs
from observe.bounds import VERBS
from observe.connections import ClientConnections, Phase
from observe.ports import listen
from observe.serving import Server
from vgpu.scheduling.snapshot import NodeRecord, SnapshotRecords, _Document, snapshot_from_json, snapshot_to_json

NAME = "n" * 200


class CountedNodes:
    """So many nodes, whose records are counted as they are made."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.made, self.taken = nodes, 0, 0

    def snapshot(self) -> SnapshotRecords:
        self.taken += 1
        return SnapshotRecords("tangram.sh", 1024, self._records(), (), (), orphans=False)

    def _records(self) -> Iterator[NodeRecord]:
        for at in range(self.nodes):
            self.made += 1
            yield NodeRecord(f"{NAME}-{at}", None)


@asynccontextmanager
async def serving(cluster: CountedNodes, answer_s: float = 20) -> AsyncIterator[tuple[str, list[str]]]:
    """Its address, and how each call ended."""
    ended = list[str]()
    metrics: Any = SimpleNamespace(count=lambda _verb, outcome, _seconds: ended.append(outcome))
    preemption: Any = SimpleNamespace(verb=SimpleNamespace(deadline=lambda: 0.0))
    verbs = Verbs(
        cast(Any, None),
        cast(Any, None),
        preemption,
        cast(Any, None),
        metrics,
        SnapshotWriter(cluster.snapshot),
        lambda: None,
    )
    sock = listen("127.0.0.1", 0)
    server = Server(scheduler_app(verbs), replace(VERBS, answer_s=answer_s))
    task = asyncio.create_task(server.serve([sock]))
    await server.up.wait()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/snapshot", ended
    finally:
        server.should_exit = True
        await task


async def open_reader(url: str) -> asyncio.StreamWriter:
    """A client that requests a snapshot and never reads it."""
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port, limit=1)
    writer.write(b"GET /snapshot HTTP/1.1\r\nhost: x\r\n\r\n")
    return writer


async def until(reservations: Any) -> None:
    async with asyncio.timeout(20):
        while not reservations():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("encoding", ["gzip", "identity", "gzip;q=0"])
async def test_the_document_is_complete_and_compressed_for_a_client_that_requests_that(encoding: str) -> None:
    async with serving(CountedNodes(3000)) as (url, ended), httpx.AsyncClient() as http:
        async with http.stream("GET", url, headers={"accept-encoding": encoding}) as answer:
            raw = b"".join([chunk async for chunk in answer.aiter_raw()])
        assert (answer.headers.get("content-encoding") == "gzip") == (encoding == "gzip")
        body = gzip.decompress(raw) if encoding == "gzip" else raw
        assert body == snapshot_to_json(CountedNodes(3000).snapshot().whole())
        assert len(snapshot_from_json(body).nodes) == 3000
        assert ended == ["taken"]


def test_the_chunks_are_what_the_documents_own_writer_makes() -> None:
    body = snapshot_to_json(CountedNodes(3).snapshot().whole())
    assert body == msgspec.json.encode(msgspec.json.decode(body, type=_Document))


async def test_others_have_the_event_loop_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, clock = CountedNodes(1000), iter(range(10**9))
    monkeypatch.setattr(
        snapshots,
        "time",
        SimpleNamespace(
            perf_counter=lambda: next(clock) * CHUNK_S / 10, monotonic=lambda: 0.0, thread_time=lambda: 0.0
        ),
    )
    most, before = 0, 0

    async def other() -> None:
        nonlocal most, before
        while True:
            most, before = max(most, cluster.made - before), cluster.made
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    assert b"".join([chunk async for chunk in SnapshotWriter(cluster.snapshot).chunks(compressed=False)])
    task.cancel()
    assert 0 < most <= 12


async def test_a_reader_that_never_reads_pins_little_and_is_disconnected() -> None:
    cluster = CountedNodes(200_000)
    async with serving(cluster, answer_s=1) as (url, ended):
        writer = await open_reader(url)
        await until(lambda: ended)
        assert ended == ["unread"]
        assert cluster.made < 100_000, "the kernel's buffers, and no more"
        cluster.nodes = 10
        async with httpx.AsyncClient() as http:
            assert len(snapshot_from_json((await http.get(url)).content).nodes) == 10
        writer.close()


async def test_one_is_written_at_a_time_and_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = CountedNodes(200_000)
    async with serving(cluster) as (url, ended), httpx.AsyncClient(timeout=20) as http:
        reading = await open_reader(url)
        await until(lambda: cluster.made > 1000)
        waiting = [await open_reader(url) for _ in range(WAITING)]
        await asyncio.sleep(0.1)
        refused = await http.get(url)
        assert (refused.status_code, refused.text) == (429, f"{BUSY}\n")
        assert cluster.taken == 1
        cluster.nodes = 10
        for one in (reading, *waiting):
            one.transport.abort()
        await until(lambda: len(ended) >= 2)
        assert len(snapshot_from_json((await http.get(url)).content).nodes) == 10


async def test_a_client_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WAIT_S", 0.05)
    one = SnapshotWriter(CountedNodes(1).snapshot)
    async with one.slot(never()) as first:
        assert first
        async with one.slot(never()) as second:
            assert not second
    async with one.slot(never()) as third:
        assert third


async def test_a_client_that_hangs_up_or_is_cancelled_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WAIT_S", 1000.0)
    one = SnapshotWriter(CountedNodes(1).snapshot)

    async def wait(gone: asyncio.Future[object]) -> bool:
        async with one.slot(gone) as mine:
            return mine

    async with one.slot(never()):
        gone = never()
        calls = [asyncio.create_task(wait(gone if at == 0 else never())) for at in range(WAITING)]
        await asyncio.sleep(0)
        gone.set_result(None)
        assert not await calls[0]
        for call in calls[1:]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        later = [asyncio.create_task(wait(never())) for _ in range(WAITING)]
        await asyncio.sleep(0)
        assert not any(call.done() for call in later), "as many more may wait"
    assert await asyncio.gather(*later) == [True] * WAITING


async def test_a_client_that_is_cancelled_when_it_is_admitted_admits_the_next() -> None:
    one = SnapshotWriter(CountedNodes(1).snapshot)

    async def wait() -> None:
        async with one.slot(never()):
            raise AssertionError("it was cancelled")

    call = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it may write now, and does not know it yet
    call.cancel()
    assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)
    async with one.slot(never()) as mine:
        assert mine


def never() -> asyncio.Future[object]:
    """A client that stays."""
    return asyncio.get_running_loop().create_future()


async def test_a_reader_of_snapshots_is_not_taken_for_the_scheduler() -> None:
    async with serving(CountedNodes(10)) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"/snapshot\n")
        (connections,) = [one for one in gc.get_objects() if isinstance(one, ClientConnections) and len(one) == 1]

        writer.write(b"GET /snapshot HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b"\r\n0\r\n\r\n")
        await until(lambda: [one.phase for one in connections] == [Phase.IDLE])
        assert [one.well for one in connections] == [False]
        assert connections._answered_well_s == {}
        writer.close()


@pytest.mark.parametrize("took_s", [0.01, 1.0])
async def test_beginnings_take_a_small_part_of_the_event_loops_time_and_the_next_is_soon(
    monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    clock_s, rests_s, sleep = 0.0, list[float](), asyncio.sleep

    def take() -> SnapshotRecords:
        nonlocal clock_s
        clock_s += took_s
        return CountedNodes(1).snapshot()

    async def rest(seconds: float) -> None:
        rests_s.append(seconds)
        await sleep(0)

    times = SimpleNamespace(perf_counter=lambda: clock_s, monotonic=lambda: clock_s, thread_time=lambda: clock_s)
    monkeypatch.setattr(snapshots, "time", times)
    monkeypatch.setattr(snapshots, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": rest}))
    one = SnapshotWriter(take)
    for _ in range(2):
        async with one.slot(never()) as mine:
            assert mine
            assert [chunk async for chunk in one.chunks(compressed=False)]
    assert max(rests_s) == pytest.approx(min(took_s / snapshots.BEGUN_PART, snapshots.REST_AT_MOST_S))


def test_a_reader_that_takes_longer_than_a_snapshot_may_take_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.server.MOST_S", 0.2)

    async def run() -> None:
        async with serving(CountedNodes(200_000)) as (url, ended):
            writer = await open_reader(url)
            await until(lambda: ended)
            assert ended == ["unread"]
            writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    ("value", "accepts"),
    [(b"gzip", True), (b"deflate, GZIP;q=0.5", True), (b"gzip; q=0.0", False), (b"br", False), (b"", False)],
)
def test_gzip_is_sent_to_a_client_that_accepts_it(value: bytes, *, accepts: bool) -> None:
    assert accepts_gzip([(b"host", b"x"), (b"accept-encoding", value)]) == accepts
