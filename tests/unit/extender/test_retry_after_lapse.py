"""A reservation that lapses frees capacity without an event: kube-scheduler is made to retry pending pods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from extender.retry_after_lapse import PERIOD_S, SETTLE_S, Retrier
from kube.errors import ApiError
from kube.objects import Pod
from tests.builders import PodBuilder, gpu, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts
from tests.unit.extender.preemption.test_coordinator import turned_down
from vgpu.scheduling.reservations import STAGES

Written = list[tuple[str, str | None]]


class Retrying:
    """A retrier beside a node with two GPUs, and what it writes: (pod, node to which it is nominated now)."""

    def __init__(self) -> None:
        self.parts = ExtenderParts(n1=2)
        self.written: Written = []
        self.slept_s: list[float] = []
        self.faults: list[ApiError | None] = []
        self.parts.server.answer = self._answer
        self.retrier = Retrier(self.parts.server, self._waiting, sleep=self._sleep)
        self.parts.state.on_lapse = self.retrier.capacity_freed

    def _waiting(self) -> list[Pod]:
        return [one for one in self.parts.preemption.waiting() if one.uid not in self.parts.state.reservations]

    def _answer(self, _: str, path: str, body: Any) -> bytes:
        if self.faults and (fault := self.faults.pop(0)):
            raise fault
        node = msgspec.json.decode(msgspec.json.encode(body))["status"]["nominatedNodeName"]
        self.written.append((path.split("/")[-2], node))
        return b"{}"

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)

    async def until(self, true: Callable[[], bool]) -> None:
        """Runs it until this is true."""
        task = asyncio.create_task(self.retrier.run())
        try:
            async with asyncio.timeout(10):
                while not true():
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def lapse(self) -> None:
        """Filter finds a place for a pod that is never bound."""
        self.parts.report(pod("never-bound").asking(mib=FULL_MIB))
        assert self.parts.filter(pod("never-bound").asking(mib=FULL_MIB), "n1").node_names == ["n1"]
        self.parts.now_s += STAGES["reserved"].life_s
        self.parts.state.expire()

    def waits(self, name: str, priority: int = 0, **of: str) -> PodBuilder:
        built = pod(name).asking(mib=FULL_MIB).of_priority(priority)
        self.parts.report(turned_down(built.nominated_to("n9") if of else built))
        return built


@pytest.fixture
def retrying() -> Retrying:
    return Retrying()


async def test_a_pod_of_the_highest_priority_is_nominated_and_not_any_more(retrying: Retrying) -> None:
    retrying.waits("low")
    retrying.waits("high", 10)
    retrying.waits("evicted-for", 1000, nominated="elsewhere")
    retrying.parts.report(turned_down(pod("gated").asking(mib=FULL_MIB).of_priority(99), "SchedulingGated"))
    retrying.lapse()
    await retrying.until(lambda: retrying.retrier.retries == 1)
    assert retrying.written == [("high", "n1"), ("high", None)]


async def test_a_pod_with_a_preemption_reservation_is_not_nominated(retrying: Retrying) -> None:
    parts = retrying.parts
    for row in (0, 1):
        parts.report(pod(f"v{row}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(row), HALF_MIB)))
    urgent = retrying.waits("urgent", 1000)
    assert list(parts.preempt(urgent, n1=["v0"]).nodes) == ["n1"]
    retrying.waits("low")
    retrying.retrier.capacity_freed("n1")
    await retrying.until(lambda: retrying.retrier.retries == 1)
    assert retrying.written == [("low", "n1"), ("low", None)]


async def test_what_lapses_together_is_one_retry_and_retries_are_apart(retrying: Retrying) -> None:
    retrying.waits("low")
    retrying.lapse()
    retrying.lapse()
    await retrying.until(lambda: PERIOD_S in retrying.slept_s)
    assert retrying.retrier.retries == 1
    assert retrying.slept_s == [SETTLE_S, PERIOD_S]


async def test_where_no_pod_waits_nothing_is_written(retrying: Retrying) -> None:
    retrying.lapse()
    await retrying.until(lambda: PERIOD_S in retrying.slept_s)
    assert retrying.written == []


async def test_a_nomination_is_withdrawn_however_long_it_takes(retrying: Retrying) -> None:
    retrying.waits("low")
    retrying.faults = [None, ApiError(503, "Busy", "later"), ApiError(0, "Timeout", "later")]
    retrying.lapse()
    await retrying.until(lambda: retrying.retrier.retries == 1)
    assert retrying.written == [("low", "n1"), ("low", None)]
    assert retrying.slept_s[:3] == [SETTLE_S, PERIOD_S, PERIOD_S]


@pytest.mark.parametrize(("status", "again"), [(503, True), (409, True), (403, False)])
async def test_a_nomination_that_is_refused_is_tried_again_where_that_may_help(
    retrying: Retrying, status: int, again: bool
) -> None:
    retrying.waits("low")
    retrying.faults = [ApiError(status, "Reason", "no")]
    retrying.lapse()
    await retrying.until(lambda: retrying.retrier.retries == 1 if again else PERIOD_S in retrying.slept_s)
    assert (retrying.retrier.retries == 1) is again


@pytest.mark.parametrize("kind", ["kept", "planned"])
async def test_a_reservation_of_every_kind_that_lapses_is_reported(retrying: Retrying, kind: str) -> None:
    parts = retrying.parts
    retrying.waits("low")
    if kind == "planned":
        built = pod("p").asking(mib=FULL_MIB)
        parts.report(built)
        parts.plan(built, "n1")
    else:
        for row in (0, 1):
            parts.report(pod(f"v{row}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(row), HALF_MIB)))
        urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
        parts.report(urgent)
        assert parts.preempt(urgent, n1=["v0"]).nodes
    parts.now_s += STAGES["kept"].life_s
    parts.preemption.expire()
    parts.nominator.expire()
    await retrying.until(lambda: retrying.retrier.retries == 1)
    assert len(parts.state.reservations) == 0
