"""Bind chooses a place itself where none is reserved, and other calls go on while it reads the pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from extender.bind import Binder
from extender.watch_intake import WatchIntake
from kube.errors import ApiError
from tests.builders import gpu, node, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts
from vgpu.api.errors import Refused
from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, withdraw

LISTED = pod("s").asking(mib=FULL_MIB).annotated(placement="scheduler")


def binder(parts: ExtenderParts) -> Binder:
    return Binder(parts.state, parts.server, timeout_s=1, lifted=parts.preemption.lifted)


async def test_a_pod_seen_bound_elsewhere_while_it_was_read_keeps_what_it_has() -> None:
    parts = ExtenderParts(n1=1, n2=1)
    parts.report(LISTED)
    bound = LISTED.on("n2").assigned(share(gpu(0, node="n2"), FULL_MIB))

    def answer(method: str, *_: Any) -> bytes:
        if method == "POST":
            raise ApiError(409, "Conflict", "already assigned")
        if len(parts.server.calls) == 1:
            parts.report(bound)  # the watch overtakes the answer
            return LISTED.json()
        return bound.json()

    parts.server.answer = answer
    with pytest.raises(Refused, match="is bound to node n2: it cannot be bound to n1"):
        await binder(parts).bind(parts.binding(LISTED, "n1"))
    allocation = parts.state.allocations.get("uid-default-s")
    assert allocation is not None
    assert allocation.node == "n2"
    assert parts.filter(pod("other").asking(mib=FULL_MIB), "n2").node_names == []
    assert parts.filter(pod("other").asking(mib=FULL_MIB), "n1").node_names == ["n1"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda one: withdraw(one, GpuCondition("Cordoned", WITHDRAWN, 1, "fan")),
            "not offered any more: Cordoned: fan",
        ),
        (lambda one: replace(one, healthy=False), "not offered any more: unhealthy"),
        (lambda _: gpu(7, 1024), "is no longer in the node"),
    ],
    ids=["cordoned", "unhealthy", "gone"],
)
async def test_a_pod_whose_gpu_is_not_offered_any_more_is_placed_again_and_not_bound(
    change: Callable[[Gpu], Gpu], why: str
) -> None:
    """The device plugin would refuse its devices, and the kubelet fails such a pod for good."""
    parts = ExtenderParts(n1=1, n2=1)
    wanting = pod("a").asking(mib=HALF_MIB)
    parts.report(wanting)
    assert parts.filter(wanting, "n1").node_names == ["n1"]
    there = node("n1").with_inventory(change(gpu(0)))
    WatchIntake(parts.state).node_changed(node("n1").with_gpus(1).build(), there.build())
    parts.server.answer = lambda *_: wanting.json()
    with pytest.raises(Refused, match=why):
        await binder(parts).bind(parts.binding(wanting, "n1"))
    assert not parts.server.calls
    assert parts.state.allocations.get(wanting.build().uid) is None
    assert parts.filter(wanting, "n1", "n2").node_names == ["n2"]


async def test_a_pod_seen_bound_where_it_is_to_go_is_bound_already() -> None:
    parts = ExtenderParts(n1=2)
    parts.report(LISTED)

    def answer(*_: Any) -> bytes:
        parts.report(LISTED.on("n1").assigned(share(gpu(1), FULL_MIB)))
        return LISTED.json()

    parts.server.answer = answer
    assert await binder(parts).bind(parts.binding(LISTED, "n1")) == "bound already"
    assert parts.server.calls == ["GET /api/v1/namespaces/default/pods/s"]


async def test_of_two_bind_calls_that_read_at_the_same_time_one_is_refused_and_takes_nothing_from_the_other() -> None:
    parts = ExtenderParts(n1=2)
    parts.report(LISTED)
    parts.server.answer = lambda method, *_: LISTED.json() if method == "GET" else b"{}"
    calls = [binder(parts).bind(parts.binding(LISTED, "n1")) for _ in range(2)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[0] == "bound"
    assert isinstance(answers[1], Refused)
    assert sum(call.startswith("POST") for call in parts.server.calls) == 1
    reservation = parts.state.reservations.get("uid-default-s")
    assert reservation is not None
    assert reservation.stage == "bound"


async def test_a_preemption_reservation_stays_while_bind_reads_its_pod() -> None:
    parts = ExtenderParts(n1=1, n2=1)
    for name, where in (("v", "n1"), ("w", "n2")):
        parts.report(pod(name).asking(mib=FULL_MIB).on(where).assigned(share(gpu(0, node=where), FULL_MIB)))
    urgent = LISTED.of_priority(1000)
    parts.report(urgent)
    assert list(parts.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    parts.end("v")
    parts.end("w")
    assert parts.filter(urgent, "n1", "n2").node_names == ["n1", "n2"], "so nothing is reserved"

    def answer(method: str, *_: Any) -> bytes:
        if method == "GET":
            assert parts.filter(pod("other").asking(mib=1024), "n1").node_names == []
        return urgent.json()

    parts.server.answer = answer
    assert await binder(parts).bind(parts.binding(urgent, "n1")) == "bound"
    assert parts.state.fleet.overcommitted() == []


async def test_a_preemption_reservation_that_is_not_enough_yet_stays_when_bind_refuses() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    urgent = LISTED.of_priority(1000)
    parts.report(urgent)
    parts.preempt(urgent, n1=["v"])
    parts.server.answer = lambda *_: urgent.json()
    with pytest.raises(Refused, match="does not fit node n1 any more"):
        await binder(parts).bind(parts.binding(urgent, "n1"))
    assert parts.filter(pod("other").asking(mib=1024), "n1").node_names == []


async def test_a_nomination_reservation_does_not_block_its_pod_when_it_is_bound() -> None:
    parts = ExtenderParts(n1=1)
    planned = pod("p").asking(mib=FULL_MIB)
    parts.report(planned)
    parts.plan(planned, "n1")
    parts.server.answer = lambda *_: planned.json()
    assert await binder(parts).bind(parts.binding(planned, "n1")) == "bound"
    assert len(parts.nominator.reservations) == 0
    assert parts.state.fleet.overcommitted() == []


async def test_a_pod_that_has_run_and_ended_by_the_time_it_is_read_has_no_allocation() -> None:
    """Found by the machine of the races."""
    parts = ExtenderParts(n1=1)
    parts.report(LISTED)
    ended = LISTED.on("n1").assigned(share(gpu(0), FULL_MIB)).with_phase("Succeeded")
    parts.server.answer = lambda *_: ended.json()
    assert await binder(parts).bind(parts.binding(LISTED, "n1")) == "bound already"
    assert len(parts.state.allocations) == len(parts.state.reservations) == 0
