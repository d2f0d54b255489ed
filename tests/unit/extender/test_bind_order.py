"""Pods of one size on different GPUs of a node start one after the other, where the kubelet could mistake them."""

from __future__ import annotations

import asyncio

import pytest

from extender.bind import BindOrder
from extender.filter import filter_nodes
from extender.protocol import FilterArgs
from extender.state import State
from extender.watch_intake import WatchIntake
from tests.builders import PodBuilder, mig_gpu, node, pod
from vgpu.api.codec import assignment_to_json
from vgpu.api.names import DEFAULT
from vgpu.scheduling.reservations import Event

LONG_S = 60.0


@pytest.fixture
def state() -> State:
    state = State(lambda: 0.0, names=DEFAULT)
    WatchIntake(state).node_changed(None, node("n1").with_gpus(2).with_access("cdi").build())
    return state


def spreading(name: str, mib: int = 8192) -> PodBuilder:
    return pod(name).asking(mib=mib).annotated(placement="spread")


def reserve(state: State, *pods: PodBuilder) -> list[str]:
    """Filter each, and answer their UIDs."""
    for built in pods:
        assert filter_nodes(state, FilterArgs(built.build(), ("n1",))).node_names == ["n1"]
    return [built.build().uid for built in pods]


def bound(state: State, built: PodBuilder) -> PodBuilder:
    allocation = state.allocations.get(built.build().uid)
    assert allocation is not None
    return built.on("n1").assigned(text=assignment_to_json(allocation.assignment))


def test_a_pod_that_has_only_a_reservation_blocks_no_pod(state: State) -> None:
    order = BindOrder(state, 0)
    assert not any(map(order.blocked, reserve(state, spreading("a"), spreading("b"))))


@pytest.mark.parametrize("events", [("bind",), ("bind", "no answer"), ("bind", "accepted")])
def test_a_pod_that_is_being_bound_blocks_its_size_on_another_gpu(state: State, events: tuple[Event, ...]) -> None:
    order = BindOrder(state, 0)
    first, other, same, size = reserve(state, spreading("a"), spreading("b"), spreading("c"), spreading("d", 4096))
    for event in events:
        state.on(event, first)
    assert [order.blocked(uid) for uid in (first, other, same, size)] == [False, True, False, False]


def test_a_pod_that_was_seen_bound_blocks_until_it_has_started_or_is_gone(state: State) -> None:
    order, first = BindOrder(state, 0), spreading("a")
    _, other = reserve(state, first, spreading("b"))
    seen = bound(state, first)
    WatchIntake(state).pod_changed(None, seen.build())
    assert order.blocked(other)
    started = seen.with_phase("Running")
    WatchIntake(state).pod_changed(seen.build(), started.build())
    assert not order.blocked(other)
    WatchIntake(state).pod_changed(started.build(), seen.build())
    assert order.blocked(other)
    WatchIntake(state).pod_changed(seen.build(), None)
    assert not order.blocked(other)


def test_a_nomination_reservation_blocks_no_bind(state: State) -> None:
    order, first = BindOrder(state, 0), spreading("a")
    request = state.request_of(first.build())
    placement = state.place(request, ["n1"])
    state.allocate("x", "default/x", request, placement, own=False)  # type: ignore[arg-type]
    (uid,) = reserve(state, spreading("b"))
    assert not order.blocked(uid)


@pytest.mark.parametrize("access", ["nvidia", "cdi"])
def test_shares_only_where_devices_come_from_allocate(access: str) -> None:
    state = State(lambda: 0.0, names=DEFAULT)
    WatchIntake(state).node_changed(None, node("n1").with_gpus(2).with_access(access).build())  # type: ignore[arg-type]
    first, other = reserve(state, spreading("a"), spreading("b"))
    state.on("bind", first)
    assert BindOrder(state, 0).blocked(other) == (access == "cdi")


@pytest.mark.parametrize("access", ["nvidia", "cdi"])
def test_mig_instances_with_each_access_mode(access: str) -> None:
    state = State(lambda: 0.0, names=DEFAULT)
    gpus = (mig_gpu(0, "1g.10gb", "1g.10gb"),)
    WatchIntake(state).node_changed(None, node("n1").with_inventory(*gpus).with_access(access).build())  # type: ignore[arg-type]
    order = BindOrder(state, 0)
    pods = [pod(name).asking(mig="1g.10gb").annotated(placement="spread") for name in ("a", "b")]
    first, other = reserve(state, *pods)
    state.on("bind", first)
    assert order.blocked(other)


async def test_a_pod_is_bound_when_the_other_has_started(state: State) -> None:
    order, first = BindOrder(state, LONG_S), spreading("a")
    _, *others = reserve(state, first, spreading("b"), spreading("c"), spreading("d"))
    seen = bound(state, first)
    WatchIntake(state).pod_changed(None, seen.build())
    other, _, second = others
    waiting = [asyncio.create_task(order.wait(uid)) for uid in (other, second)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    WatchIntake(state).pod_changed(seen.build(), seen.with_phase("Running").build())
    assert await asyncio.gather(*waiting) == [True, True]


async def test_patience_ends(state: State) -> None:
    first, other = reserve(state, spreading("a"), spreading("b"))
    state.on("bind", first)
    assert not await BindOrder(state, 0.01).wait(other)
    assert not await BindOrder(state, 0).wait(other)
