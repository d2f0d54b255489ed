"""When pods are nominated ahead, and how long a request that fits nowhere is left alone: with a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from extender.nominate.nominator import ACTIVE_S, VAIN_S, Nominator, When
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Condition, Needs, Node, Pod
from tests.builders import node, pod
from tests.unit.extender.extender_parts import FakeApiServer, PodCache
from vgpu.api.names import DEFAULT
from vgpu.scheduling.nominate import BACKLOG, FRONT
from vgpu.scheduling.nominate_pacing import SAMPLES, SLOW_S
from vgpu.scheduling.placement import Placement

FULL_MIB = 81_920


class Nodes:
    """Stands for the cache of nodes."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def items(self) -> Iterator[Node]:
        return iter(self._nodes)


class NominatorSetup:
    """One node with eight GPUs, and pods that wait."""

    def __init__(self, when: When = "always") -> None:
        self.now_s = 100.0
        self.made = 0
        self.pods = PodCache()
        self.state = State(lambda: self.now_s, names=DEFAULT)
        built = node("n1").with_gpus(8).build()
        WatchIntake(self.state).node_changed(None, built)
        self.nominator = Nominator(
            FakeApiServer(), self.state, pods=cast("Any", self.pods), nodes=cast("Any", Nodes(built)),
            clock=lambda: self.now_s, scheduler="tangram-scheduler", when=when,
        )  # fmt: skip

    def wait(self, count: int, mib: int = 1024) -> list[Pod]:
        """So many more do."""
        new = []
        for _ in range(count):
            self.made += 1
            one = pod(f"p{self.made}").asking(mib=mib).build()
            spec = msgspec.structs.replace(one.spec, scheduler_name="tangram-scheduler", needs=Needs())
            one = msgspec.structs.replace(one, spec=spec)
            self.pods.by_key[one.key] = one
            self.nominator.pod_changed(None, one)
            new.append(one)
        return new

    @asynccontextmanager
    async def planning(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.nominator.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def looked(self) -> None:
        async with asyncio.timeout(30):
            await self.nominator.flush()


async def test_a_nominator_that_is_not_called_any_more_plans_no_more() -> None:
    parts = NominatorSetup()
    first, *_ = parts.wait(2 * BACKLOG)
    async with parts.planning():
        await parts.looked()
        assert len(parts.nominator.reservations) == 0, "no call has come yet"
        parts.nominator.called(first)
        await parts.looked()
        planned = len(parts.nominator.reservations)
        assert planned > BACKLOG
        parts.now_s += ACTIVE_S
        parts.wait(2 * BACKLOG)
        await parts.looked()
        assert len(parts.nominator.reservations) == planned, "another extender is called by now"
        parts.now_s -= 0.1
        parts.wait(1)
        await parts.looked()
        assert len(parts.nominator.reservations) > planned


@pytest.mark.parametrize(("when", "slow", "expected"), [
    ("auto", True, True), ("auto", False, False), ("always", False, True), ("never", True, False),
])  # fmt: skip
async def test_pods_are_nominated_where_the_scheduler_is_slow_or_always_or_never(
    when: When, slow: bool, expected: bool
) -> None:
    parts = NominatorSetup(when)
    pods = parts.wait(SAMPLES + 2 * BACKLOG)
    for one in pods[: 1 + SAMPLES]:
        parts.now_s += 2 * SLOW_S if slow else SLOW_S / 2
        parts.nominator.called(one)
    async with parts.planning():
        await parts.looked()
        assert (len(parts.nominator.reservations) > 0) is expected


async def test_what_fits_nowhere_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = NominatorSetup()
    tried: list[object] = []
    place = Nominator._place

    def counted(self: Nominator, *of: Any) -> Placement | None:
        tried.append(of)
        return place(self, *of)

    monkeypatch.setattr(Nominator, "_place", counted)
    first, *_ = parts.wait(2 * BACKLOG, mib=FULL_MIB + 1024)
    async with parts.planning():
        parts.nominator.called(first)
        await parts.looked()
        assert len(tried) == 1, "one for all of them"
        parts.now_s += VAIN_S - 0.1
        parts.nominator.called(*parts.wait(BACKLOG + FRONT, mib=FULL_MIB + 1024)[:1])
        await parts.looked()
        assert len(tried) == 1
        parts.now_s += 0.1
        parts.nominator.called(*parts.wait(BACKLOG + FRONT, mib=FULL_MIB + 1024)[:1])
        await parts.looked()
        assert len(tried) == 2
    assert len(parts.nominator.reservations) == 0


async def test_a_pod_is_nominated_once_its_gates_are_gone() -> None:
    parts = NominatorSetup()
    first, *_, last = parts.wait(2 * BACKLOG)
    gated = msgspec.structs.replace(
        last,
        spec=msgspec.structs.replace(last.spec, needs=None),
        status=msgspec.structs.replace(
            last.status, conditions=(Condition("PodScheduled", status="False", reason="SchedulingGated"),)
        ),
    )
    parts.nominator.pod_changed(last, None)
    parts.nominator.pod_changed(None, gated)
    async with parts.planning():
        parts.nominator.called(first)
        await parts.looked()
        assert last.uid not in parts.nominator.reservations
        parts.pods.by_key[last.key] = last
        parts.nominator.pod_changed(gated, last)
        await parts.looked()
        assert last.uid in parts.nominator.reservations
