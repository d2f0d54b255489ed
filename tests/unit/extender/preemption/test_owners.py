"""The owner of a controller: read once when it is needed, never waited for, and nothing about it without bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from extender.preemption import owners as controllers
from extender.preemption.owners import AGAIN_S, AGE_S, Controllers, OwnerUnknown
from kube.errors import ApiError
from kube.objects import OwnerReference
from tests.builders import owner
from tests.unit.extender.extender_parts import FakeApiServer

JOB = OwnerReference("Job", "j", "uid-j", True, "batch/v1")
PATH = "GET /apis/batch/v1/namespaces/default/jobs/j"


def answer(uid: str, *owners: dict[str, Any]) -> bytes:
    return json.dumps({"metadata": {"name": "j", "uid": uid, "ownerReferences": owners}}).encode()


class OwnerReads:
    """What is read, and in which namespaces a change was reported. `now_s` is the time."""

    def __init__(self, resources: Iterable[str] = ("jobs.batch", "proxies.net.io", "pods")) -> None:
        self.now_s, self.reported = 0.0, list[str]()
        self.slept = list[float]()
        self.server = FakeApiServer()
        self.server.answer = lambda *_: answer("uid-j", owner("JobSet", "s", "jobset.x-k8s.io/v1alpha2"))
        self.all = Controllers(self.server, resources, lambda: self.now_s, self.reported.append, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.all.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_what_is_not_known_is_read_and_then_known() -> None:
    reading = OwnerReads()
    async with reading.going_on():
        assert reading.all.above("default", JOB) is OwnerUnknown.YET
        assert reading.all.above("default", JOB) is OwnerUnknown.YET
        assert reading.all.waiting == 1
        await reading.all.settled(10)
        assert reading.all.above("default", JOB) == OwnerReference(
            "JobSet", "s", "uid-s", True, "jobset.x-k8s.io/v1alpha2"
        )
        assert reading.reported == ["default"]
    assert reading.server.calls == [PATH]


async def test_one_without_a_controller_is_known_to_have_none() -> None:
    reading = OwnerReads()
    reading.server.answer = lambda *_: answer("uid-j", {"kind": "Job", "name": "x", "uid": "y"})
    async with reading.going_on():
        reading.all.above("default", JOB)
        await reading.all.settled(10)
        assert reading.all.above("default", JOB) is None


@pytest.mark.parametrize(
    "body",
    [b"garbage", b"\xff", b"{}", answer("uid-of-another"), ApiError(403, "Forbidden", "no"), ApiError(404, "NotFound", "no")],
)  # fmt: skip
async def test_what_cannot_be_read_stays_unread_and_is_read_again_later(body: bytes | ApiError) -> None:
    reading = OwnerReads()

    def refuse(*_: Any) -> bytes:
        if isinstance(body, ApiError):
            raise body
        return body

    good, reading.server.answer = reading.server.answer, refuse
    async with reading.going_on():
        for _ in range(3):
            assert reading.all.above("default", JOB) is OwnerUnknown.YET
            await reading.all.settled(10)
        assert reading.server.calls == [PATH], "not again and again"
        assert (reading.all.unreadable, reading.reported) == (1, [])
        reading.server.answer = good
        reading.now_s += AGAIN_S
        reading.all.expire()
        reading.all.above("default", JOB)
        await reading.all.settled(10)
        assert isinstance(reading.all.above("default", JOB), OwnerReference)
        assert reading.all.unreadable == 0


async def test_an_owner_reference_of_another_namespace_proves_nothing_about_a_controller() -> None:
    """The creator of a pod writes the UID, also that of another user's Job."""
    reading = OwnerReads()
    good, reading.server.answer = reading.server.answer, lambda *_: b"garbage"
    async with reading.going_on():
        reading.all.above("theirs", JOB)
        await reading.all.settled(10)
        reading.server.answer = good
        reading.all.above("default", JOB)
        await reading.all.settled(10)
        assert isinstance(reading.all.above("default", JOB), OwnerReference)
        assert reading.all.above("theirs", JOB) is OwnerUnknown.YET


async def test_an_api_server_that_is_busy_is_requested_more_slowly() -> None:
    reading = OwnerReads()

    def busy(*_: Any) -> bytes:
        raise ApiError(429, "TooManyRequests", "no", retry_after_s=7)

    reading.server.answer = busy
    async with reading.going_on():
        reading.all.above("default", JOB)
        await reading.all.settled(10)
    assert reading.slept == [7]


async def test_what_was_read_long_ago_is_read_again() -> None:
    reading = OwnerReads()
    async with reading.going_on():
        reading.all.above("default", JOB)
        await reading.all.settled(10)
        reading.now_s = AGE_S - 1
        reading.all.expire()
        assert isinstance(reading.all.above("default", JOB), OwnerReference)
        reading.now_s = AGE_S
        reading.all.expire()
        assert reading.reported == ["default", "default"], "that it is not known any more is a change"
        assert reading.all.above("default", JOB) is OwnerUnknown.YET


@pytest.mark.parametrize(
    "one",
    [
        OwnerReference("Secret", "s", "u", True, "v1"), OwnerReference("Job", "j", "u", True, "other/v1"),
        OwnerReference("Job", "j", "u", True, "batch/.."), OwnerReference("Job", "..", "u", True, "batch/v1"),
        OwnerReference("Job", "j", "u", True, ""), OwnerReference("Job", "", "u", True, "batch/v1"),
        OwnerReference("Job", "j", "", True, "batch/v1"), OwnerReference("Job", "j" * 254, "u", True, "batch/v1"),
        OwnerReference("Job", "j", "u" * 65, True, "batch/v1"), OwnerReference("", "j", "u", True, "batch/v1"),
    ],
)  # fmt: skip
async def test_what_is_not_on_the_list_or_would_be_another_path_is_never_read(one: OwnerReference) -> None:
    reading = OwnerReads()
    assert reading.all.above("default", one) is OwnerUnknown.EVER
    assert reading.all.waiting == 0


@pytest.mark.parametrize(
    ("one", "path"),
    [
        (OwnerReference("Pod", "p/q", "u", True, "v1"), "/api/v1/namespaces/default/pods/p%2Fq"),
        (OwnerReference("Proxy", "p", "u", True, "net.io/v1beta1"), "/apis/net.io/v1beta1/namespaces/default/proxies/p"),
    ],
)  # fmt: skip
async def test_the_path_is_that_of_the_kind_and_a_name_is_no_path(one: OwnerReference, path: str) -> None:
    reading = OwnerReads()
    async with reading.going_on():
        reading.all.above("default", one)
        await reading.all.settled(10)
    assert reading.server.calls == [f"GET {path}"]


async def test_nothing_grows_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "MOST_KNOWN", 3)
    monkeypatch.setattr(controllers, "MOST_WAITING", 4)
    reading = OwnerReads()
    many = [OwnerReference("Job", f"j{at}", f"uid-j{at}", True, "batch/v1") for at in range(6)]
    reading.server.answer = lambda _, path, __: answer("uid-" + path.rpartition("/")[2])
    for one in many:
        assert reading.all.above("default", one) is OwnerUnknown.YET
    assert reading.all.waiting == 4
    async with reading.going_on():
        await reading.all.settled(10)
        assert len(reading.all) == 3
        reading.server.answer = lambda *_: b"garbage"
        for one in (*many[4:], *many[:4]):
            reading.all.above("default", one)
            await reading.all.settled(10)
        for at in range(6, 16):
            reading.all.above("default", OwnerReference("Job", f"j{at}", f"uid-j{at}", True, "batch/v1"))
            await reading.all.settled(10)
        assert reading.all.unreadable == 4


async def test_a_wait_for_owners_is_not_longer_than_its_limit() -> None:
    reading = OwnerReads()
    reading.all.above("default", JOB)  # and nothing reads
    async with asyncio.timeout(5):
        await reading.all.settled(0.0)
    assert reading.all.waiting == 1
