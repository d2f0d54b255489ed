"""The pages of a program come from a process of its own, whatever clients and that process do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, Counter

from observe import address_filter
from observe.operations import Operations
from observe.operations_server import BURST_S, PER_S
from observe.page import Page, text
from observe.pages import Pages
from observe.refusals import Refusals

PROGRAM = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from observe.operations import Operations
from observe.page import Page, text
from observe.pages import Pages
from observe.refusals import Refusals
operations = Operations(Pages(CollectorRegistry()), "127.0.0.1", int(sys.argv[1]))
print(operations.port, flush=True)
asyncio.run(operations.run())
"""


class Reported:
    """A program whose readiness a test decides."""

    def __init__(self) -> None:
        self.missing = ""
        self.looks = 0

    def not_ready(self) -> str:
        self.looks += 1
        return self.missing


@contextlib.asynccontextmanager
async def running(reported: Reported) -> AsyncIterator[tuple[Operations, httpx.AsyncClient]]:
    registry = CollectorRegistry()
    Counter("tangram_example_things", "Things.", registry=registry).inc()
    operations = Operations(Pages(registry, reported.not_ready), "127.0.0.1", 0)
    task = asyncio.create_task(operations.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{operations.port}", timeout=20) as client:
        try:
            yield operations, client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_the_pages_come_over_http_and_there_is_no_process_before_the_first_request() -> None:
    async with running(Reported()) as (operations, client):
        await asyncio.sleep(0)
        assert operations.pid is None
        page = await client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert "tangram_example_things_total 1.0\n" in page.text
        assert operations.pid is not None
        assert [(await client.get(path)).status_code for path in ("/healthz", "/readyz", "/nothing")] == [200, 200, 404]
        assert (await client.post("/metrics")).status_code == 405


async def test_metrics_are_for_those_whose_token_is_accepted_and_probes_need_none() -> None:
    reviews: list[str] = []

    async def review(token: str) -> Page:
        reviews.append(token)
        return text({"good": 200, "poor": 403}.get(token, 401), "as the cluster answers")

    refusals = Refusals("example")
    operations = Operations(Pages(CollectorRegistry()), "127.0.0.1", 0, review=review, refused=refusals.of("metrics"))
    task = asyncio.create_task(operations.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{operations.port}", timeout=20) as client:
        none = await client.get("/metrics")
        assert (none.status_code, none.headers["www-authenticate"]) == (401, "Bearer")
        for token, status in (("good", 200), ("good", 200), ("poor", 403), ("made-up", 401)):
            answer = await client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == status
        assert [(await client.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
    assert reviews == ["good", "poor", "made-up"]
    assert refusals.counts == {("metrics", "no-token"): 1, ("metrics", "forbidden"): 1, ("metrics", "unauthorized"): 1}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_review_that_takes_long_delays_no_probe() -> None:
    hold = asyncio.Event()

    async def review(_: str) -> Page:
        await hold.wait()
        return text(200, "ok")

    operations = Operations(Pages(CollectorRegistry()), "127.0.0.1", 0, review=review)
    task = asyncio.create_task(operations.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{operations.port}", timeout=20) as client:
        scrape = asyncio.create_task(client.get("/metrics", headers={"Authorization": "Bearer good"}))
        assert (await client.get("/healthz")).status_code == 200
        assert not scrape.done()
        hold.set()
        assert (await scrape).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_refusals_of_the_server_are_counted_by_the_program() -> None:
    refusals = Refusals("example")
    operations = Operations(Pages(CollectorRegistry()), "127.0.0.1", 0, refused=refusals.of("metrics"))
    task = asyncio.create_task(operations.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{operations.port}", timeout=20) as client:
        assert (await client.get("/metrics", headers={"x": "y" * 20_000})).status_code == 431
        assert (await client.post("/metrics", content=b"body")).status_code == 413
        await client.get("/healthz")
    assert refusals.counts == {("metrics", "header"): 1, ("metrics", "body"): 1}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_page_has_the_programs_current_state() -> None:
    reported = Reported()
    async with running(reported) as (_, client):
        for missing, status in (("", 200), ("no certificate", 503), ("", 200)):
            reported.missing = missing
            assert (await client.get("/readyz")).status_code == status


async def test_a_flood_makes_the_program_answer_a_few_times_a_second() -> None:
    reported = Reported()
    began_s = asyncio.get_running_loop().time()
    async with running(reported) as (_, client):
        burst = int(BURST_S * PER_S["/readyz"])
        for _ in range(2 * burst):
            assert (await client.get("/readyz")).status_code == 200
        passed_s = asyncio.get_running_loop().time() - began_s
        assert burst <= reported.looks <= burst + 1 + passed_s * PER_S["/readyz"]
        reported.missing = "no certificate"
        until_s = asyncio.get_running_loop().time() + 10
        while (await client.get("/readyz")).status_code == 200:
            assert asyncio.get_running_loop().time() < until_s


async def test_twenty_readiness_probes_a_second_get_no_old_page() -> None:
    reported = Reported()
    async with running(reported) as (_, client):
        for number in range(60):
            reported.missing = f"reason {number}"
            assert (await client.get("/readyz")).text == f"reason {number}\n"
            await asyncio.sleep(0.05)


async def test_a_server_that_is_killed_is_started_again() -> None:
    async with running(Reported()) as (operations, client):
        assert (await client.get("/healthz")).status_code == 200
        before = operations.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=20) as other:
            assert (await other.get("/healthz")).status_code == 200
        assert operations.pid not in (None, before)


async def test_what_a_killed_server_had_the_kernel_drop_is_served_again() -> None:
    async with running(Reported()) as (operations, client):
        assert (await client.get("/healthz")).status_code == 200
        before = operations.pid
        assert before is not None
        address_filter.attach(operations._listener, ["127.0.0.1"])
        os.kill(before, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=20) as other:
            assert (await other.get("/healthz")).status_code == 200


@contextlib.contextmanager
def started(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program of its own and its port; killed in the end."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(port)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with program.stdout as lines:
        yield program, int(lines.readline())
    program.kill()
    program.wait()


def test_a_program_that_does_not_answer_is_answered_for_until_it_does() -> None:
    with started() as (program, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        assert client.get("/healthz").status_code == 200
        program.send_signal(signal.SIGSTOP)
        silent = client.get("/readyz")
        assert (silent.status_code, silent.text) == (503, "the program does not answer\n")
        program.send_signal(signal.SIGCONT)
        assert client.get("/readyz").status_code == 200


def test_a_program_that_is_killed_leaves_no_server_and_no_port() -> None:
    port = 0
    for _ in range(3):
        with started(port) as (program, port):
            assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=20).status_code == 200
            children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
            assert len(children) == 1
