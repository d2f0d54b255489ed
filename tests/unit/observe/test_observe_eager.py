"""Beginning a coroutine from a callback of the event loop."""

from __future__ import annotations

import asyncio
import sys

import pytest

from observe.eager import begin


async def in_a_callback(
    done: asyncio.Event, steps: list[str], tasks: set[asyncio.Task[None]], waits: asyncio.Event
) -> None:
    async def coroutine() -> None:
        async with asyncio.timeout(10):  # as a task only
            steps.append("begun")
            await waits.wait()
        steps.append("ended")
        done.set()

    def callback() -> None:
        begin(coroutine(), loop, tasks)
        steps.append("returned")

    loop = asyncio.get_running_loop()
    loop.call_soon(callback)


async def test_what_waits_goes_on_as_a_task_that_is_kept_until_its_end() -> None:
    done, waits, tasks, steps = asyncio.Event(), asyncio.Event(), set[asyncio.Task[None]](), list[str]()
    await in_a_callback(done, steps, tasks, waits)
    while "begun" not in steps or "returned" not in steps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert len(tasks) == 1
    waits.set()
    await done.wait()
    await asyncio.sleep(0)
    assert (sorted(steps), tasks) == (["begun", "ended", "returned"], set())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks begin in the next round of the event loop")
async def test_what_does_not_wait_has_ended_at_once() -> None:
    done, waits, tasks, steps = asyncio.Event(), asyncio.Event(), set[asyncio.Task[None]](), list[str]()
    waits.set()
    await in_a_callback(done, steps, tasks, waits)
    await done.wait()
    assert (steps, tasks) == (["begun", "ended", "returned"], set())
