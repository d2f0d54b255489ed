"""The stored preemption history is not lost: not by a refused write, nor by two extenders that write at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import msgspec
import pytest

from extender.preemption.coordinator import PreemptionCoordinator
from extender.preemption.history import PreemptionHistory
from extender.preemption.history_store import KEY, HistoryStore
from extender.settings import Settings
from extender.watch_intake import WatchIntake
from kube.errors import ApiError
from tests.builders import pod
from tests.unit.extender.extender_parts import ExtenderParts, FakeApiServer

META = {"name": "preempted", "namespace": "default"}


class Store(FakeApiServer):
    """Keeps one ConfigMap, and refuses a write that goes by another version than the last."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, str] | None = None
        self.version = 1
        self.faults: list[ApiError] = []
        self.answer = self._answer
        self.answered = asyncio.Event()

    async def until(self, true: Callable[[], bool]) -> None:
        """Return when this is true, checked after every answer."""
        async with asyncio.timeout(10):
            while not true():
                self.answered.clear()
                await self.answered.wait()

    def _answer(self, method: str, _: str, body: Any) -> bytes:
        self.answered.set()
        if self.faults:
            raise self.faults.pop(0)
        if method == "POST" and self.data is not None:
            raise ApiError(409, "AlreadyExists", "it is there")
        if method == "PATCH":
            if self.data is None:
                raise ApiError(404, "NotFound", "it is not there")
            if body["metadata"].get("resourceVersion") not in (None, str(self.version)):
                raise ApiError(409, "Conflict", "it was changed")
        self.data = dict(body["data"])
        self.version += 1
        return b"{}"

    def names(self) -> set[str]:
        """The preempted pods that it names."""
        return set(msgspec.json.decode((self.data or {}).get(KEY, "{}")))

    def report(self, history_store: HistoryStore) -> None:
        """The watch reports what there is now."""
        thing = {"metadata": META | {"uid": "u", "resourceVersion": str(self.version)}, "data": self.data}
        history_store._cache._take(msgspec.Raw(msgspec.json.encode(thing)))


@asynccontextmanager
async def writing(store: Store) -> AsyncIterator[tuple[PreemptionHistory, HistoryStore]]:
    history = PreemptionHistory(lambda: 1000.0)
    made = HistoryStore(store, history, "default/preempted", each_s=0.0)
    made._cache.has_synced.set()
    task = asyncio.create_task(made._write_changes())
    try:
        yield history, made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_write_that_was_refused_is_tried_again_without_another_preemption() -> None:
    store = Store()
    store.faults = [ApiError(503, "ServiceUnavailable", "later"), ApiError(0, "Timeout", "")]
    async with writing(store) as (history, _):
        history.preempted(pod("a").build())
        await store.until(lambda: store.names() == {"default/a"})
    assert len(store.calls) == 3


@pytest.mark.parametrize("made_before", [True, False])
async def test_of_two_that_write_at_once_neither_takes_away_what_the_other_wrote(made_before: bool) -> None:
    store = Store()
    if made_before:
        store.data = {KEY: "{}"}
    async with writing(store) as (one, first), writing(store) as (two, second):
        for history_store in (first, second) if made_before else ():
            store.report(history_store)
        one.preempted(pod("a").build())
        two.preempted(pod("b").build())
        await store.until(lambda: len(store.calls) >= 4)
        assert len(store.names()) == 1, "the other is refused until the watch shows it the new version"
        for history_store in (first, second):
            store.report(history_store)
        await store.until(lambda: store.names() == {"default/a", "default/b"})


class UnreadableServer(FakeApiServer):
    """Lists disruption budgets, and answers to nothing else."""

    async def get(self, path: str, *_: Any, **__: Any) -> bytes:
        if "configmaps" in path:
            await asyncio.Event().wait()
        return b'{"metadata":{"resourceVersion":"1"},"items":[]}'

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[bytes]:  # type: ignore[override]  # it never ends
        await asyncio.Event().wait()
        yield b""


@pytest.mark.parametrize(("read_s", "informed"), [(0.0, True), (3600.0, False)])
async def test_no_pod_is_evicted_before_the_preemption_history_is_known_but_the_wait_is_bounded(
    read_s: float, informed: bool
) -> None:
    parts = ExtenderParts()
    chosen = Settings(_cli_parse_args=False, preempted_config_map="default/preempted")  # type: ignore[call-arg]
    preemption = PreemptionCoordinator(
        UnreadableServer(),
        parts.state,
        WatchIntake(parts.state),
        cast("Any", parts.pods),
        chosen,
        parts.nominator,
        read_s=read_s,
    )
    assert set(preemption.statistics()) == {"budgets", "preempted"}
    task = asyncio.create_task(preemption.run())
    try:
        async with asyncio.timeout(10):
            await preemption.budgets.has_synced.wait()
            if informed:
                await preemption.verb.informed.wait()
        await asyncio.sleep(0)
        assert preemption.verb.informed.is_set() is informed
        if not informed:
            preemption._history_store._cache.has_synced.set()
            async with asyncio.timeout(10):
                await preemption.verb.informed.wait()
    finally:
        task.cancel()
        await asyncio.wait({task})
