"""A copier that hangs is killed and started again, also after it was ready. The copiers here are shell scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from hostpool.copier_process import CopierProcess

READY = "echo 'tangram-copier: ready' >&2; "
ALIVE = "echo 'tangram-copier: alive' >&2; "
PATIENCE_S = 60.0


class Stand:
    """One copier, and the states that were seen at each change: (ready, reason)."""

    def __init__(self, script: str, silent_s: float) -> None:
        self.seen: list[tuple[bool, str]] = []
        self.news = asyncio.Event()
        self.copier = CopierProcess(
            "GPU", lambda: ["sh", "-c", script], stall_s=PATIENCE_S, end_s=1.0, changed=self._changed, silent_s=silent_s
        )

    def _changed(self) -> None:
        self.seen.append((self.copier.ready, self.copier.reason))
        self.news.set()

    async def until(self, judge: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not judge():
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def running(script: str, silent_s: float = PATIENCE_S) -> AsyncIterator[Stand]:
    stand = Stand(script, silent_s)
    task = asyncio.create_task(stand.copier.run())
    try:
        yield stand
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_copier_that_hangs_after_it_was_ready_is_killed_and_started_again() -> None:
    async with running(READY + ALIVE + "exec sleep 1000", silent_s=0.1) as stand:
        await stand.until(lambda: stand.copier.restarts == 2)
        first = stand.seen.index((True, ""))
        why = "its copier hangs: it has not stated for 0.1 s that it is alive"
        assert stand.seen[first + 1] == (False, why), "it is reported ready to nobody while it is killed"
        await stand.until(lambda: stand.copier.ready)


async def test_a_copier_that_states_that_it_is_alive_stays() -> None:
    lines = "for _ in 1 2 3 4 5; do sleep 0.05; " + ALIVE + "done; echo 'tangram-copier: ends' >&2; exec sleep 1000"
    async with running(READY + ALIVE + lines) as stand:
        await stand.until(lambda: stand.copier.progress.last == "ends")
        assert stand.copier.ready
        assert stand.copier.restarts == 0


async def test_one_that_ends_by_itself_is_named_by_its_last_line_of_content() -> None:
    async with running(READY + "echo 'tangram-copier: the driver failed' >&2; " + ALIVE + "exit 1") as stand:
        await stand.until(lambda: stand.copier.restarts == 1)
        assert stand.copier.reason == "its copier ended: the driver failed (status 1)"


async def test_a_copier_of_an_earlier_release_that_states_nothing_stays() -> None:
    script = READY + "sleep 0.5; echo 'tangram-copier: ends' >&2; exec sleep 1000"
    async with running(script, silent_s=0.05) as stand:
        await stand.until(lambda: stand.copier.progress.last == "ends")
        assert stand.copier.restarts == 0
