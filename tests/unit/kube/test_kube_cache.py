"""The watch cache, against an API server that disconnects, loses versions, sends wrong data and falls silent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from kube.cache import Cache
from kube.objects import Pod
from kube.paths import PODS
from kube.pending_calls import DEPARTURES
from tests.builders import PodBuilder, pod
from tests.fake_api import FakeApi
from tests.unit.kube.cache_kit import api, watching

__all__ = ["api"]


async def seen(cache: Cache[Pod], true: Callable[[], bool]) -> None:
    """Return when this is true, checked after each change that the cache reports."""
    assert await cache.wait_for(lambda: PROOF if true() else None, timeout_s=10) is PROOF, "it never became true"


PROOF = pod("proof").build()


def of(*names: str) -> list[PodBuilder]:
    return [pod(name) for name in names]


async def test_a_list_longer_than_a_page_is_read_whole(api: FakeApi) -> None:
    for built in of("a", "b", "c", "d", "e"):
        api.put(built.plain())
    async with watching(api, page=2) as (cache, log):
        assert log.kinds == [("added", f"default/{name}") for name in "abcde"]
        assert api.requests.count("GET /api/v1/pods") == 4, "three pages and the watch"
        assert len(cache) == cache.statistics().objects == 5


async def test_changes_are_reported_in_order_with_what_was_before(api: FakeApi) -> None:
    async with watching(api) as (cache, log):
        api.put(pod("a").plain())
        api.put(pod("a").on("n1").plain())
        api.remove(pod("a").plain())
        api.put(pod("b").plain())
        await seen(cache, lambda: cache.get("default/b") is not None)
        assert log.kinds == [
            ("added", "default/a"),
            ("changed", "default/a"),
            ("gone", "default/a"),
            ("added", "default/b"),
        ]
        assert [item.key for item in cache.items()] == ["default/b"]


async def test_a_cut_stream_is_taken_up_where_it_ended(api: FakeApi) -> None:
    api.put(pod("a").plain())
    async with watching(api) as (cache, log):
        api.cut()
        api.put(pod("b").plain())
        await seen(cache, lambda: cache.get("default/b") is not None)
        assert log.kinds == [("added", "default/a"), ("added", "default/b")]
        assert cache.statistics().lists == 1, "a broken connection is no reason to list again"


async def test_a_version_that_is_gone_is_listed_again_and_only_differences_are_reported(api: FakeApi) -> None:
    for built in of("stays", "changes", "goes"):
        api.put(built.plain())
    async with watching(api) as (cache, log):
        log.clear()
        api.put(pod("changes").on("n1").plain(), reported=False)
        api.remove(pod("goes").plain(), reported=False)
        api.put(pod("comes").plain(), reported=False)
        api.compact()
        api.cut()
        await seen(cache, lambda: cache.get("default/comes") is not None and cache.get("default/goes") is None)
        assert sorted(log.kinds) == [
            ("added", "default/comes"),
            ("changed", "default/changes"),
            ("gone", "default/goes"),
        ]
        assert cache.statistics().relists == {"gone": 1}


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","object":7}', b"\xff\xfe"])
async def test_a_line_that_cannot_be_read_makes_it_list_again(api: FakeApi, line: bytes) -> None:
    async with watching(api) as (cache, _):
        api.send(line)
        api.put(pod("a").plain())
        await seen(cache, lambda: cache.get("default/a") is not None)
        await seen(cache, lambda: cache.statistics().lists == 2)
        assert cache.statistics().relists == {"undecodable": 1}


async def test_an_object_that_cannot_be_decoded_is_kept_as_it_was_last_known(api: FakeApi) -> None:
    api.put(pod("a").on("n1").plain())
    async with watching(api) as (cache, log):
        broken = pod("a").on("n1").plain()
        broken["spec"]["nodeName"] = 7
        api.put(broken)
        api.put(pod("b").plain())
        await seen(cache, lambda: cache.get("default/b") is not None)
        kept = cache.get("default/a")
        assert kept is not None
        assert kept.spec.node_name == "n1"
        assert "nodeName" in cache.unknown["default/a"]
        assert cache.statistics().undecodable == 1
        assert log.kinds == [("added", "default/a"), ("added", "default/b")], (
            "nothing is reported of what is not understood"
        )
        api.put(pod("a").on("n2").plain())
        await seen(cache, lambda: not cache.unknown)
        assert log.kinds[-1] == ("changed", "default/a")


async def test_an_object_that_is_broken_in_the_first_list_does_not_keep_others_out(api: FakeApi) -> None:
    broken = pod("a").plain()
    broken["spec"] = []
    api.put(broken)
    api.put(pod("b").plain())
    async with watching(api) as (cache, log):
        assert log.kinds == [("added", "default/b")]
        assert list(cache.unknown) == ["default/a"]
        api.remove(broken)
        await seen(cache, lambda: not cache.unknown)
        assert log.kinds == [("added", "default/b")]


async def test_a_pod_made_again_under_its_name_while_the_watch_was_down_is_reported_as_gone_and_added(
    api: FakeApi,
) -> None:
    api.put(pod("a").plain())
    async with watching(api) as (cache, log):
        log.clear()
        again = pod("a").plain()
        again["metadata"]["uid"] = "another"
        api.put(again)
        await seen(cache, lambda: cache.get("default/a").uid == "another")  # type: ignore[union-attr]
        assert log.kinds == [("gone", "default/a"), ("added", "default/a")]


class Clumsy:
    """A callback that keeps what it gets in `kept`, and raises at some of its calls (a bit each, the first lowest), half done or not."""

    def __init__(self, failing: int, *, half_done: bool = False) -> None:
        self.kept: dict[str, Pod] = {}
        """UID -> pod."""
        self.calls = 0
        self._failing, self._half_done = failing, half_done

    def __call__(self, old: Pod | None, new: Pod | None) -> None:
        fails = bool(self._failing >> self.calls & 1)
        self.calls += 1
        if not fails or self._half_done:
            for pod_ in (old, new):
                if pod_ is not None:
                    self.kept.pop(pod_.uid, None)
            if new is not None:
                self.kept[new.uid] = new
        if fails:
            raise KeyError("a mistake")


async def test_a_callback_that_raises_is_counted_stops_nothing_and_is_called_again(api: FakeApi) -> None:
    waits: list[float] = []

    async def note(wait_s: float) -> None:
        waits.append(wait_s)

    callback = Clumsy(0b111)
    async with watching(api, on_change=callback, sleep=note, jitter=lambda: 0.0) as (cache, _):
        api.put(pod("a").plain())
        with capture_logs():
            await seen(cache, lambda: len(callback.kept) == 1)
        assert (cache.statistics().callback_errors, cache.statistics().unreported) == (3, 0)
        assert waits == pytest.approx([0.2, 0.4, 0.8])


class Scripted:
    """A client whose API server has nothing at first, then sends these events, then falls silent."""

    def __init__(self, *events: tuple[str, dict[str, Any]]) -> None:
        self._lines = [
            json.dumps(
                {"type": kind, "object": {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(at)}}}
            )
            for at, (kind, thing) in enumerate(events, 2)
        ]

    async def get(self, *_: object, **__: object) -> bytes:
        return b'{"metadata":{"resourceVersion":"1"}}'

    async def stream(self, *_: object, **__: object) -> AsyncGenerator[bytes, None]:
        for line in self._lines:
            yield line.encode()
            await asyncio.sleep(0)
        await asyncio.Event().wait()


@pytest.mark.parametrize("half_done", [False, True])
async def test_whenever_a_callback_raises_it_comes_to_know_what_there_is(half_done: bool) -> None:
    again = pod("a").plain()
    again["metadata"]["uid"] = "another"
    script = Scripted(
        ("ADDED", pod("a").plain()), ("MODIFIED", pod("a").on("n1").plain()), ("MODIFIED", again),
        ("ADDED", pod("b").plain()), ("DELETED", pod("b").plain()), ("ADDED", pod("c").plain()),
    )  # fmt: skip

    async def no_wait(_: float) -> None:
        await asyncio.sleep(0)

    for failing in range(256):
        callback = Clumsy(failing, half_done=half_done)
        cache = Cache(script, PODS, Pod, on_change=callback, sleep=no_wait)  # type: ignore[arg-type]
        running = asyncio.create_task(cache.run())
        with capture_logs():  # a traceback takes a tenth of a second to write
            await seen(cache, lambda: cache.get("default/c") is not None and not cache.statistics().unreported)  # noqa: B023
        assert callback.kept == {one.uid: one for one in cache.items()}, f"calls that raised: {failing:b}"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_callback_that_never_learns_that_an_object_is_gone_is_reported_a_bounded_number_of_times(
    api: FakeApi,
) -> None:
    reported: list[str] = []

    def explode(_: Pod | None, new: Pod | None) -> None:
        if new is None:
            reported.append("gone")
            raise KeyError("a mistake")

    api.put(pod("a").plain())
    with capture_logs():
        async with watching(api, on_change=explode) as (cache, _):
            api.remove(pod("a").plain())
            await seen(cache, lambda: len(reported) > 1 and not cache.statistics().unreported)
            assert len(reported) == DEPARTURES


async def test_bookmarks_move_the_version_that_a_broken_watch_goes_on_from(api: FakeApi) -> None:
    async with watching(api) as (cache, _):
        api.version = 99
        api.send(b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"99"}}}')
        api.compact()
        api.cut()
        api.put(pod("a").plain())
        await seen(cache, lambda: cache.get("default/a") is not None)
        assert cache.statistics().bookmarks == 1
        assert cache.statistics().lists == 1, "version 99 was not gone"


async def test_selectors_are_sent_and_an_object_that_leaves_the_selection_is_gone(api: FakeApi) -> None:
    api.put(pod("done").with_phase("Succeeded").plain())
    api.put(pod("runs").with_phase("Running").plain())
    async with watching(api, field_selector="status.phase!=Succeeded,status.phase!=Failed") as (cache, log):
        assert [item.key for item in cache.items()] == ["default/runs"]
        api.put(pod("runs").with_phase("Failed").plain())
        await seen(cache, lambda: not len(cache))
        assert log.kinds == [("added", "default/runs"), ("gone", "default/runs")]


async def test_waiting_for_an_object_ends_when_it_comes_or_time_is_up(api: FakeApi) -> None:
    async with watching(api) as (cache, _):
        assert await cache.wait_for(lambda: cache.get("default/a"), timeout_s=0.01) is None
        waiting = asyncio.create_task(cache.wait_for(lambda: cache.get("default/a"), timeout_s=10))
        api.put(pod("a").plain())
        found = await waiting
        assert found is not None
        assert found.key == "default/a"
