"""A pod is deleted once, by its UID, with patience for an API server that is away and none for one that refuses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from deviceplugin.pods.removal import ATTEMPTS, Remover
from kube.errors import ApiError
from tests.builders import pod

PATH = "/api/v1/namespaces/default/pods/a"


@dataclass
class FakeServer:
    """Returns these answers one after another, then success."""

    answers: list[Exception | None] = field(default_factory=list)
    calls: list[tuple[str, str, object]] = field(default_factory=list)

    async def send(self, method: str, path: str, body: object = None) -> bytes:
        self.calls.append((method, path, body))
        if self.answers and (error := self.answers.pop(0)):
            raise error
        return b"{}"


@dataclass
class Removal:
    server: FakeServer
    ends: list[tuple[str, bool]] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remover = Remover(self.server, lambda reason, done: self.ends.append((reason, done)), sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)


def refusal(status: int, retry_after_s: float = 0.0) -> ApiError:
    return ApiError(status, "Reason", "a message", retry_after_s=retry_after_s)


async def test_a_pod_is_deleted_by_name_and_uid_and_only_once() -> None:
    made = Removal(FakeServer())
    assert made.remover.remove(pod("a").build(), "swapped")
    assert not made.remover.remove(pod("a").build(), "over-limit")
    await made.remover.settled()
    assert not made.remover.remove(pod("a").build(), "over-limit")
    ((method, path, options),) = made.server.calls
    assert (method, path) == ("DELETE", PATH)
    assert options == {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "uid-default-a"}}
    assert made.ends == [("swapped", True)]


async def test_an_api_server_that_is_away_is_called_again_each_time_later() -> None:
    made = Removal(FakeServer([refusal(0), refusal(503), refusal(429, 7.0), refusal(500)]))
    made.remover.remove(pod("a").build(), "over-limit")
    await made.remover.settled()
    assert made.ends == [("over-limit", True)]
    assert made.slept_s == [0.5, 1.0, 7.0, 4.0]


async def test_a_token_that_is_not_accepted_is_one_that_is_read_again() -> None:
    made = Removal(FakeServer([refusal(401), refusal(401)]))
    made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    assert made.ends == [("swapped", True)]


async def test_a_removal_that_ends_in_any_error_may_be_tried_again() -> None:
    made = Removal(FakeServer([FileNotFoundError("token")]))
    made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    assert made.ends == [("swapped", False)]
    assert made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    assert made.ends[-1] == ("swapped", True)


async def test_attempts_are_bounded_and_a_later_occasion_may_try_again() -> None:
    made = Removal(FakeServer([refusal(0)] * ATTEMPTS))
    made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    assert made.ends == [("swapped", False)]
    assert len(made.server.calls) == ATTEMPTS
    assert sum(made.slept_s) < 70
    assert made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    assert made.ends[-1] == ("swapped", True)


@pytest.mark.parametrize(("status", "done"), [(403, False), (422, False), (404, True), (409, True)])
async def test_a_refusal_is_not_argued_with_and_a_pod_that_is_gone_is_gone(status: int, *, done: bool) -> None:
    made = Removal(FakeServer([refusal(status)]))
    made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    assert made.ends == [("swapped", done)]
    assert len(made.server.calls) == 1


async def test_pods_that_are_gone_are_forgotten_and_what_is_under_way_is_not() -> None:
    made = Removal(FakeServer())
    made.remover.remove(pod("a").build(), "swapped")
    made.remover.forget_the_gone(())
    assert not made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()
    made.remover.forget_the_gone(("uid-default-a",))
    assert not made.remover.remove(pod("a").build(), "swapped")
    made.remover.forget_the_gone(())
    assert made.remover.remove(pod("a").build(), "swapped")
    await made.remover.settled()


async def test_closing_gives_up_what_is_under_way() -> None:
    made = Removal(FakeServer())
    never = asyncio.Event()

    async def send(method: str, path: str, body: object = None) -> bytes:
        await never.wait()
        return b""

    made.server.send = send  # type: ignore[method-assign]
    made.remover.remove(pod("a").build(), "swapped")
    await asyncio.sleep(0)
    await made.remover.close()
    assert made.ends == []
