"""Which pods are part of a whole: compared with a plain walk through all objects; in doubt, all are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.preemption import background, kueue_pods
from extender.preemption.kueue_pods import LONGEST, KueuePods
from extender.preemption.kueue_workloads import SILENT_S
from kube.objects import MetadataOnly, Pod
from tests.builders import owner, pod, workload
from tests.unit.extender.extender_parts import FakeApiServer

KINDS = ("jobs.batch", "jobsets.jobset.x-k8s.io")


class KnownWorkloads:
    """`KueuePods` with these Workloads, and an API server with these Jobs: name -> name of the one above, or empty."""

    def __init__(self, jobs: Mapping[str, str], *owned: dict[str, Any]) -> None:
        self.now_s, self.jobs, self.server = 0.0, dict(jobs), FakeApiServer()
        self.server.answer = self.answer
        self.kueue_pods = KueuePods(self.server, KINDS, lambda: self.now_s)
        self.cache = self.kueue_pods.workloads._cache
        self.cache.has_synced.set()
        self.heard()
        for one in owned:
            self.report(None, one)

    def heard(self) -> None:
        self.cache.heard_s = self.now_s

    def report(self, old: dict[str, Any] | None, new: dict[str, Any] | None) -> None:
        """The watch reports a Workload."""
        read = [None if one is None else msgspec.convert(one, MetadataOnly) for one in (old, new)]
        self.kueue_pods.workloads._changed(*read)

    def answer(self, _: str, path: str, __: Any) -> bytes:
        name = path.rpartition("/")[2]
        above = self.jobs.get(name, "")
        owners = [owner("Job", above)] if above else []
        return json.dumps({"metadata": {"name": name, "uid": f"uid-{name}", "ownerReferences": owners}}).encode()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.kueue_pods.controllers.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def reported(self, one: Pod) -> bool:
        """The answer once all that it takes is read."""
        found = self.kueue_pods.alone(one)
        while self.kueue_pods.controllers.waiting:
            await self.kueue_pods.controllers.settled(10)
            found = self.kueue_pods.alone(one)
        return found


def of(job: str = "", name: str = "a", namespace: str = "default", kind: str = "Job") -> Pod:
    built = pod(name, namespace)
    return (built.controlled_by(kind, job) if job else built).build()


def test_a_pod_that_a_workload_names_is_part_of_it_and_so_are_all_of_its_controller() -> None:
    known = KnownWorkloads({}, workload("w", "uid-j", "uid-default-a"))
    assert not known.kueue_pods.alone(of())
    assert not known.kueue_pods.alone(of("j", "b"))
    assert known.kueue_pods.alone(of(name="c")), "without an owner"
    assert known.kueue_pods.alone(of("j", "b", "other")), "another namespace"
    assert known.server.calls == []


def test_a_label_makes_no_pod_part_of_anything() -> None:
    known = KnownWorkloads({}, workload("w", "uid-j"))
    assert known.kueue_pods.alone(pod("a").labelled(**{"kueue.x-k8s.io/queue-name": "q"}).build())


def test_an_owner_that_is_no_controller_does_not_count() -> None:
    known = KnownWorkloads({}, workload("w", "uid-j"))
    plain = pod("a").controlled_by("Job", "j").plain()
    plain["metadata"]["ownerReferences"][0]["controller"] = False
    assert known.kueue_pods.alone(msgspec.convert(plain, Pod))


@given(
    above=st.lists(st.integers(-1, 11), min_size=12, max_size=12),
    owned=st.sets(st.integers(0, 11), max_size=3),
    at=st.integers(0, 11),
    gone=st.integers(-1, 11),
)
def test_the_chain_is_walked_as_far_as_it_goes(above: list[int], owned: set[int], at: int, gone: int) -> None:
    """Against the plain walk; a circle, and a chain that is longer than is followed, count as doubt."""

    async def check() -> None:
        jobs = {f"j{one}": f"j{up}" if up >= 0 else "" for one, up in enumerate(above)}
        known = KnownWorkloads(jobs, workload("w", "uid-elsewhere", *(f"uid-j{one}" for one in owned)))
        alone = known.server.answer

        def answer(verb: str, path: str, body: Any) -> bytes:
            return b"{}" if path.endswith(f"/j{gone}") else alone(verb, path, body)

        known.server.answer = answer
        async with known.reading():
            reported = await known.reported(of(f"j{at}"))
        seen, one, expected = 0, at, True
        while one >= 0:
            seen += 1
            if one in owned or one == gone or seen > LONGEST:
                expected = False
                break
            one = above[one]
        # after exactly the longest chain, an owner that has none above it is not known to have none
        if expected and seen == LONGEST:
            expected = False
        assert reported == expected

    asyncio.run(check())


async def test_a_controller_of_another_kind_is_doubt_where_there_are_workloads_and_none_where_there_are_not() -> None:
    known = KnownWorkloads({}, workload("w", "uid-j"))
    assert not known.kueue_pods.alone(of("s", kind="Secret"))
    assert known.kueue_pods.doubts == 0, "no event can change that"
    assert known.kueue_pods.alone(of("s", namespace="other", kind="Secret"))


async def test_what_is_being_read_is_doubt_until_it_is_read() -> None:
    known = KnownWorkloads({"k": ""}, workload("w", "uid-j"))
    before = known.kueue_pods.version("default")
    assert not known.kueue_pods.alone(of("k"))
    assert (known.kueue_pods.doubts, known.kueue_pods.version("default")) == (1, before)
    async with known.reading():
        assert await known.reported(of("k"))
    assert known.kueue_pods.version("default") != before
    assert known.kueue_pods.version("other") == (0, False)


def test_before_the_list_and_while_the_watch_is_silent_no_pod_is_alone() -> None:
    known = KnownWorkloads({})
    assert known.kueue_pods.alone(of())
    version = known.kueue_pods.version("default")
    known.now_s = SILENT_S + 1
    assert not known.kueue_pods.alone(of())
    assert known.kueue_pods.version("default") != version
    known.heard()
    assert known.kueue_pods.alone(of())
    known.cache.has_synced.clear()
    assert not known.kueue_pods.alone(of())


def test_a_workload_that_cannot_be_read_is_doubt_about_its_namespace() -> None:
    known = KnownWorkloads({})
    known.cache.unknown["default/w"] = "why"
    assert not known.kueue_pods.alone(of())
    assert known.kueue_pods.alone(of(namespace="default-2"))
    known.cache.unknown[""] = "why"
    assert not known.kueue_pods.alone(of(namespace="default-2"))


def test_a_workload_that_changes_its_owners_or_goes_is_noticed() -> None:
    first, second = workload("w", "uid-j"), workload("w", "uid-k")
    known = KnownWorkloads({}, first, workload("other", "uid-k"))
    seen = [known.kueue_pods.version("default")]
    known.report(first, second)
    assert known.kueue_pods.workloads.owners("default") == {"uid-k": {"w", "other"}}
    seen.append(known.kueue_pods.version("default"))
    known.report(second, second)
    assert known.kueue_pods.version("default") == seen[-1], "nothing changed"
    known.report(second, None)
    assert not known.kueue_pods.alone(of("k"))
    known.report(workload("other", "uid-k"), None)
    assert known.kueue_pods.alone(of("k"))
    seen.append(known.kueue_pods.version("default"))
    assert len(set(seen)) == 3


def test_versions_of_many_namespaces_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(kueue_pods, "NAMESPACES", 2)
    known = KnownWorkloads({})
    before = known.kueue_pods.version("d")
    for name in "abc":
        known.report(None, workload("w", "uid-j", namespace=name))
    assert len(known.kueue_pods._versions) <= 2
    assert known.kueue_pods.version("d") != before, "rather one change too many"


async def test_however_many_pods_there_are_half_of_the_time_is_left_for_the_search(monkeypatch: Any) -> None:
    monkeypatch.setattr(background, "WORK_S", 0.0)
    known = KnownWorkloads({}, workload("w", "uid-other"))

    def touching() -> Iterator[None]:
        for at in count():
            known.kueue_pods.alone(of(f"j{at}"))
            known.now_s += 0.25
            yield

    await known.kueue_pods.read(touching(), background.BackgroundWork(lambda: known.now_s), until_s=10.0)
    assert known.now_s == 5.0


def test_a_pod_that_was_kept_while_there_was_doubt_may_be_evicted_after_it() -> None:
    known = KnownWorkloads({}, workload("w", "uid-j"))
    known.kueue_pods.no_eviction_on(["n1"])
    assert known.kueue_pods.expire() == "", "there was no doubt"
    assert not known.kueue_pods.alone(of("k"))
    known.kueue_pods.no_eviction_on(["n1", "n2"])
    assert known.kueue_pods.expire() == ""
    known.kueue_pods.controllers._waiting.clear()
    assert known.kueue_pods.expire() == "n1"
    assert known.kueue_pods.expire() == "", "once"


@pytest.mark.parametrize("key", ["default/w", ""])
def test_so_they_may_once_a_workload_is_decoded(key: str) -> None:
    known = KnownWorkloads({})
    known.cache.unknown |= {key: "garbage", "other/w": "garbage"}
    assert not known.kueue_pods.alone(of("k"))
    known.kueue_pods.no_eviction_on(["n1"])
    assert known.kueue_pods.expire() == ""
    del known.cache.unknown[key]
    assert known.kueue_pods.alone(of("k"))
    assert [known.kueue_pods.expire() for _ in range(2)] == ["n1", ""], (
        "that another one is in doubt is no reason to wait"
    )


def test_so_they_may_when_workloads_are_watched_again() -> None:
    known = KnownWorkloads({})
    known.now_s += SILENT_S + 1
    known.kueue_pods.no_eviction_on(["n1"])
    assert known.kueue_pods.expire() == ""
    known.heard()
    assert known.kueue_pods.expire() == "n1"
