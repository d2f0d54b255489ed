"""Long work a little at a time: what runs in between, and when it ends before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from extender.preemption import background
from extender.preemption.background import REST_S, BackgroundWork


def work(count: int, done: list[int]) -> Iterator[None]:
    for at in range(count):
        done.append(at)
        yield


async def test_other_tasks_run_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "WORK_S", -1.0)
    done, seen = list[int](), list[int]()

    async def other() -> None:
        while len(done) < 5:
            seen.append(len(done))
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    assert await BackgroundWork(lambda: 0.0).run(work(5, done), until_s=1.0)
    await beside
    assert seen == [1, 2, 3, 4]


async def test_it_ends_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "WORK_S", -1.0)
    done = list[int]()
    assert not await BackgroundWork(lambda: float(len(done))).run(work(9, done), until_s=3.0)
    assert done == [0, 1, 2]
    assert await BackgroundWork(lambda: 9.0).run(work(0, done), until_s=3.0), "there was nothing to do"


@pytest.mark.parametrize("waits", [True, False])
async def test_it_rests_while_a_call_waits_for_the_api_server(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    rests = list[float]()

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(background, "WORK_S", -1.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    some = BackgroundWork(lambda: 0.0)
    if waits:
        with some.waiting():
            await some.run(work(2, []), until_s=1.0)
    await some.run(work(1, []), until_s=1.0)
    assert rests == ([REST_S, REST_S, 0] if waits else [0])
