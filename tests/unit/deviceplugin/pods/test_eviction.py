"""A pod is evicted once, by its UID; a disruption budget that refuses is waited for as long as the pod is to leave, and the pod is never deleted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from deviceplugin.pods.eviction import REFUSED_BACKOFF_S, Evictor
from deviceplugin.pods.removal import ATTEMPTS, BACKOFF_S
from kube.objects import Pod
from tests.builders import pod
from tests.unit.deviceplugin.pods.test_removal import FakeServer, refusal

PATH = "/api/v1/namespaces/default/pods/a/eviction"
BUDGET = refusal(429)


@dataclass
class Evicting:
    """`wanted_for`: attempts for which the pod is still to leave."""

    server: FakeServer
    wanted_for: int = 1000
    ends: list[tuple[str, bool]] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)
    reported: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = lambda reason, done: self.ends.append((reason, done))  # noqa: E731
        self.evictor = Evictor(self.server, self, count, sleep=self._sleep)

    def still_wanted(self, pod: Pod) -> bool:
        return pod.uid == "uid-default-a" and len(self.server.calls) < self.wanted_for

    def eviction_refused(self, pod: Pod, message: str, *, again: bool) -> None:
        assert pod.uid == "uid-default-a"
        self.reported.append((message, again))

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)

    async def run(self) -> None:
        assert self.evictor.evict(pod("a").build(), "stranded")
        await self.evictor.settled()


async def test_a_pod_is_evicted_by_name_and_uid_and_only_once() -> None:
    made = Evicting(FakeServer())
    await made.run()
    assert not made.evictor.evict(pod("a").build(), "stranded")
    ((method, path, body),) = made.server.calls
    assert (method, path) == ("POST", PATH)
    assert body == {
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a", "namespace": "default"},
        "deleteOptions": {"preconditions": {"uid": "uid-default-a"}},
    }  # fmt: skip
    assert (made.ends, made.reported) == ([("stranded", True)], [])


async def test_a_budget_that_refuses_is_waited_for_without_end_and_reported_each_time() -> None:
    refusals = 3 * ATTEMPTS
    made = Evicting(FakeServer([BUDGET] * refusals))
    await made.run()
    assert made.ends == [("stranded", True)]
    assert made.reported == [("a message", True)] * refusals
    first_s, longest_s = REFUSED_BACKOFF_S
    assert made.slept_s[:3] == [first_s, 2 * first_s, 4 * first_s]
    assert max(made.slept_s) == made.slept_s[-1] == longest_s
    assert {method for method, _, _ in made.server.calls} == {"POST"}, "it is never deleted"


async def test_what_the_server_wants_to_be_waited_for_is() -> None:
    made = Evicting(FakeServer([refusal(429, 300.0)]))
    await made.run()
    assert made.slept_s == [300.0]


async def test_an_eviction_ends_when_the_memory_has_come_back_and_may_begin_again() -> None:
    made = Evicting(FakeServer([BUDGET] * 5), wanted_for=2)
    await made.run()
    assert (len(made.server.calls), made.ends) == (2, [])
    made.server.answers.clear()
    made.wanted_for = 1000
    await made.run()
    assert made.ends == [("stranded", True)]


@pytest.mark.parametrize("status", [0, 500, 503, 401])
async def test_an_api_server_that_is_away_is_waited_for_without_end_and_counted_now_and_then(status: int) -> None:
    made = Evicting(FakeServer([refusal(status)] * (3 * ATTEMPTS + 1)))
    await made.run()
    assert made.ends == [("stranded", False)] * 3 + [("stranded", True)]
    assert made.reported == [("a message", True)] * 3
    assert made.slept_s[0] == BACKOFF_S[0]
    assert max(made.slept_s) == made.slept_s[-1] == BACKOFF_S[1]


async def test_the_answer_of_a_budget_ends_a_row_of_failures() -> None:
    away = [refusal(0)] * (ATTEMPTS - 1)
    made = Evicting(FakeServer([*away, BUDGET, *away]))
    await made.run()
    assert made.ends == [("stranded", True)]
    assert made.reported == [("a message", True)], "the budget's"


async def test_waiting_for_an_api_server_ends_when_the_memory_has_come_back() -> None:
    made = Evicting(FakeServer([refusal(0)] * 100), wanted_for=ATTEMPTS + 2)
    await made.run()
    assert (len(made.server.calls), made.ends) == (ATTEMPTS + 2, [("stranded", False)])


@pytest.mark.parametrize(("status", "done"), [(403, False), (422, False), (404, True), (409, True)])
async def test_a_refusal_for_good_ends_it_and_a_pod_that_is_gone_is_gone(status: int, *, done: bool) -> None:
    made = Evicting(FakeServer([refusal(status)]))
    await made.run()
    assert (made.ends, len(made.server.calls)) == ([("stranded", done)], 1)
    assert made.reported == ([] if done else [("a message", False)])
    assert not made.evictor.evict(pod("a").build(), "stranded"), "it would be refused again and again"


async def test_an_error_of_our_own_is_reported_and_may_be_tried_again() -> None:
    made = Evicting(FakeServer([FileNotFoundError("token")]))
    await made.run()
    assert (made.ends, made.reported) == ([("stranded", False)], [("token", False)])
    await made.run()
    assert made.ends[-1] == ("stranded", True)


async def test_pods_that_are_gone_are_forgotten_and_closing_ends_what_waits() -> None:
    made = Evicting(FakeServer())
    await made.run()
    made.evictor.forget_the_gone(("uid-default-a",))
    assert not made.evictor.evict(pod("a").build(), "stranded")
    made.evictor.forget_the_gone(())
    made.server.answers.append(BUDGET)
    made.evictor._sleep = lambda _: asyncio.Event().wait()  # type: ignore[assignment,return-value]
    assert made.evictor.evict(pod("a").build(), "stranded")
    await asyncio.sleep(0)
    await made.evictor.close()
    assert made.ends == [("stranded", True)]
