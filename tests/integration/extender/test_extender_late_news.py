"""The scheduler has a watch of its own, which may be ahead: what the extender answers when a change reaches it during a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tests.builders import PodBuilder
from tests.fake_api import FakeApi
from tests.integration.extender.preempting import FULL_MIB, HALF_MIB, bound, preempt, two_nodes, uids, urgent
from tests.integration.extender.scheduler import Scheduler, running

Reported = Callable[..., Coroutine[Any, Any, dict[str, Any]]]


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with two_nodes() as server:
        yield server


@pytest.fixture
def victims(api: FakeApi) -> list[PodBuilder]:
    """A pod for each GPU of n1, which it fills."""
    made = [bound(name, "n1", row, FULL_MIB) for name, row in (("a", 0), ("b", 1))]
    for one in made:
        api.put(one.plain())
    return made


@pytest.fixture
def reported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> Reported:
    """The answer to a call when `news` happens once the extender has begun to wait for its watch, in this method."""

    async def reported(
        scheduler: Scheduler, method: str, call: Coroutine[Any, Any, dict[str, Any]], news: Callable[[], object]
    ) -> dict[str, Any]:
        preemption = scheduler.extender.preemption
        part = preemption.verb if hasattr(preemption.verb, method) else preemption
        begun, wait = asyncio.Event(), getattr(part, method)

        async def waiting(*args: object) -> object:
            begun.set()
            return await wait(*args)

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(part, method, waiting)
            answer = asyncio.create_task(call)
            await begun.wait()
            news()
            return await answer

    return reported


async def test_a_preemptor_that_the_scheduler_saw_first_is_waited_for(
    api: FakeApi, reported_meanwhile: Reported
) -> None:
    """After an answer without victims kube-scheduler would not call again for minutes."""
    for name, row in (("a", 0), ("b", 1)):
        api.put(bound(name, "n1", row, HALF_MIB).plain())
    async with running(api) as scheduler:
        call = preempt(scheduler, urgent(), n1=uids("a"))
        answer = await reported_meanwhile(scheduler, "wait_for_preemptor", call, lambda: api.put(urgent().plain()))
        assert answer == {"n1": {"Pods": uids("a"), "NumPDBViolations": 0}}


async def test_a_preemptor_that_comes_back_before_its_victim_is_known_to_be_gone_finds_its_capacity(
    api: FakeApi, victims: list[PodBuilder], reported_meanwhile: Reported
) -> None:
    """The scheduler would evict for it once more."""
    api.put(urgent().plain())
    async with running(api) as scheduler:
        assert list(await preempt(scheduler, urgent(), n1=uids("a"))) == ["n1"]
        call = scheduler.filter(urgent(), "n1")
        answer = await reported_meanwhile(scheduler, "has_news", call, lambda: api.remove(victims[0].plain()))
        assert answer["NodeNames"] == ["n1"]


async def test_a_preemptor_that_requests_again_before_its_victim_is_known_to_leave_gets_no_second_one(
    api: FakeApi, victims: list[PodBuilder], reported_meanwhile: Reported
) -> None:
    api.put(urgent().plain())
    leaving = victims[0].terminating().plain()
    async with running(api) as scheduler:
        assert await preempt(scheduler, urgent(), n1=uids("a")) == {"n1": {"Pods": uids("a"), "NumPDBViolations": 0}}
        for news in (lambda: api.put(leaving), lambda: api.remove(leaving)):
            assert (
                await reported_meanwhile(
                    scheduler, "wait_for_preemptor", preempt(scheduler, urgent(), n1=uids("b")), news
                )
                == {}
            )


async def test_what_comes_free_while_a_pod_is_being_turned_away_is_found(
    api: FakeApi, victims: list[PodBuilder], reported_meanwhile: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.preemption.coordinator.NEWS_S", 0.5)
    async with running(api) as scheduler:
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        call = scheduler.filter(urgent(), "n1")
        answer = await reported_meanwhile(scheduler, "has_news", call, lambda: api.remove(victims[0].plain()))
        assert answer["NodeNames"] == ["n1"]


async def test_no_pod_is_evicted_for_a_preemptor_that_is_not_there(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.preemption.verb.PREEMPTOR_S", 0.01)
    api.put(bound("a", "n1", 0, FULL_MIB).plain())
    async with running(api) as scheduler:
        assert await preempt(scheduler, urgent(), n1=uids("a")) == {}
