"""Connections that were not read for a while are read again one after the other."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from observe.fairness import FairQueue
from observe.resting import RestingFlow


class Transport:
    """Counts reads."""

    def __init__(self) -> None:
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False


async def test_rests_that_end_together_are_followed_by_one_read_in_each_round() -> None:
    queue, transports = FairQueue(), [Transport() for _ in range(8)]
    loop = asyncio.get_running_loop()
    flows = [RestingFlow(cast(Any, one), loop, queue, str(at)) for at, one in enumerate(transports)]
    for flow in flows:
        flow.rest(0)
    reading = [sum(one.reading for one in transports)]
    async with asyncio.timeout(10):
        while reading[-1] < len(transports):
            await asyncio.sleep(0)
            reading.append(sum(one.reading for one in transports))
    assert reading[0] == 0
    assert max(after - before for before, after in itertools.pairwise(reading)) == 1


async def test_a_connection_that_ends_while_it_waits_to_be_read_again_leaves_the_queue() -> None:
    queue, transport = FairQueue(), Transport()
    flow = RestingFlow(cast(Any, transport), asyncio.get_running_loop(), queue, "a")
    flow.rest(0)
    async with asyncio.timeout(10):
        while len(queue) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
    flow.end()
    assert len(queue) == 0
    assert not transport.reading
