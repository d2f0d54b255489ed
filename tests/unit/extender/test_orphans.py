"""Pods that the API has lost and whose processes run on stay allocated until their node no longer names them (I1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from extender.bind import Binder
from extender.snapshot import snapshot_of
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Node
from tests.builders import NodeBuilder, gpu, mig_gpu, node, pod, share
from tests.examples import examples
from tests.unit.extender.extender_parts import ExtenderParts
from vgpu.api.codec import inventory_to_json
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, Orphan
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import Placement
from vgpu.scheduling.reservations import WatchProgress
from vgpu.scheduling.snapshot import drift, snapshot_from_json, snapshot_to_json

FULL_MIB = 81_920


def orphan(name: str, *held: AssignedGpu) -> Orphan:
    return Orphan(f"uid-default-{name}", "default", name, held)


def reporting(of: NodeBuilder, *orphans: Orphan) -> Node:
    """The node, with these in its inventory."""
    gpus: tuple[Gpu, ...] = tuple(of.gpus)
    return of.with_text(inventory_to_json(Inventory(gpus, orphans=orphans))).build()


def state_of(*nodes: Node) -> State:
    made = State(lambda: 0.0, names=DEFAULT)
    for one in nodes:
        WatchIntake(made).node_changed(None, one)
    return made


def free(state: State, at: str, row: int = 0) -> tuple[int, int]:
    column = state.fleet.column[at]
    return int(state.fleet.free_mib[row, column]), int(state.fleet.free_percent[row, column])


def test_an_orphan_keeps_its_memory_and_compute_until_its_node_names_it_no_longer() -> None:
    one = node("n1").with_gpus(1)
    before, after = reporting(one), reporting(one, orphan("a", share(gpu(0), 8192, 30)))
    state = state_of(before)
    assert free(state, "n1") == (FULL_MIB, 100)
    WatchIntake(state).node_changed(before, after)
    assert free(state, "n1") == (FULL_MIB - 8192, 70)
    WatchIntake(state).node_changed(after, before)
    assert free(state, "n1") == (FULL_MIB, 100)


def test_a_pod_that_is_lost_to_the_api_is_never_counted_twice_and_never_not_at_all() -> None:
    one = node("n1").with_gpus(1)
    assigned = share(gpu(0), 8192, 30)
    running = pod("a").asking(mib=8192, core=30).on("n1").assigned(assigned).with_phase("Running").build()
    nodes = reporting(one), reporting(one, orphan("a", assigned))
    for order in ("node first", "pod first"):
        state = state_of(nodes[0])
        WatchIntake(state).pod_changed(None, running)
        changes = [
            lambda state=state: WatchIntake(state).node_changed(*nodes),
            lambda state=state: WatchIntake(state).pod_changed(running, None),
        ]
        changes[order == "pod first"]()
        changes[order == "node first"]()
        assert free(state, "n1") == (FULL_MIB - 8192, 70)
        WatchIntake(state).node_changed(nodes[1], nodes[0])
        assert free(state, "n1") == (FULL_MIB, 100)
        assert len(state.orphans) == 0


def test_a_pod_that_was_bound_and_deleted_by_force_before_the_watch_showed_it_stays_allocated() -> None:
    one, assigned = node("n1").with_gpus(1), share(gpu(0), 8192, 30)
    now_s, shown = [0.0], [WatchProgress()]
    state = State(lambda: now_s[0], names=DEFAULT, shown=lambda: shown[0])
    nodes = reporting(one), reporting(one, orphan("a", assigned))
    WatchIntake(state).node_changed(None, nodes[0])
    asking = pod("a").asking(mib=8192, core=30).build()
    found = state.place(state.request_of(asking), ["n1"])
    assert isinstance(found, Placement)
    state.reserve(asking.uid, asking.key, state.request_of(asking), found)
    state.on("bind", asking.uid)
    state.on("accepted", asking.uid)
    WatchIntake(state).node_changed(*nodes)
    now_s[0], shown[0] = 60.0, WatchProgress(60.0, 50.0)
    state.expire()
    assert len(state.reservations) == 0
    assert free(state, "n1") == (FULL_MIB - 8192, 70), "its processes run on"
    WatchIntake(state).node_changed(nodes[1], nodes[0])
    assert free(state, "n1") == (FULL_MIB, 100)


def test_an_orphans_whole_gpu_and_mig_instance_are_assigned_to_no_other_pod() -> None:
    big, small = gpu(0), mig_gpu(1, "1g.10gb", "1g.10gb")
    one = node("n1").with_inventory(big, small)
    instance = small.instances[0]
    held = (
        AssignedGpu(big.uuid, 0, big.mib, 100, "whole"),
        AssignedGpu(instance.uuid, 1, instance.mib, 100, "mig", "1g.10gb"),
    )
    state = state_of(reporting(one, orphan("a", *held)))
    assert free(state, "n1") == (0, 0)
    assert state.fleet.mig["1g.10gb"].free[1, state.fleet.column["n1"]] == 1


def test_an_inventory_that_cannot_be_read_frees_no_orphan() -> None:
    one = node("n1").with_gpus(1)
    reported, broken, later = (
        reporting(one, orphan("a", share(gpu(0), 8192))),
        one.with_text("{").build(),
        reporting(one),
    )
    state = state_of(reported)
    WatchIntake(state).node_changed(reported, broken)
    assert len(state.orphans) == 1
    WatchIntake(state).node_changed(broken, later)
    assert free(state, "n1") == (FULL_MIB, 100)


def test_a_node_that_goes_takes_its_orphans_with_it() -> None:
    one = node("n1").with_gpus(1)
    reported = reporting(one, orphan("a", share(gpu(0), 8192)))
    state = state_of(reported)
    WatchIntake(state).node_changed(reported, None)
    assert (len(state.orphans), len(state.allocations)) == (0, 0)


def test_a_node_that_names_another_nodes_pod_takes_nothing_from_it() -> None:
    assigned = share(gpu(0), 8192)
    n1, n2 = node("n1").with_gpus(1), node("n2").with_gpus(1)
    state = state_of(reporting(n1, orphan("a", assigned)), reporting(n2, orphan("a", share(gpu(0, node="n2"), 1024))))
    assert free(state, "n1") == (FULL_MIB - 8192, 100)
    WatchIntake(state).node_changed(reporting(n2, orphan("a", share(gpu(0, node="n2"), 1024))), reporting(n2))
    assert free(state, "n1") == (FULL_MIB - 8192, 100)


async def test_a_node_that_names_a_pod_which_waits_neither_gets_it_nor_keeps_it_from_others() -> None:
    """Whoever has a node's account reads the UIDs of all pods."""
    parts = ExtenderParts(n1=1, n2=1)
    waiting = pod("a").asking(mib=8192)
    parts.report(waiting)
    honest = node("n2").with_gpus(1)
    lying = reporting(honest, orphan("a", share(gpu(0, node="n2"), 1024)))
    WatchIntake(parts.state).node_changed(honest.build(), lying)
    assert parts.state.unplaced(waiting.build(), waiting.build().uid) is not None
    assert parts.filter(waiting, "n1").node_names == ["n1"]
    WatchIntake(parts.state).node_changed(lying, honest.build())
    assert free(parts.state, "n1") == (FULL_MIB - 8192, 100), "the reservation stands"
    parts.state.end_reservation(waiting.build().uid)
    WatchIntake(parts.state).node_changed(honest.build(), lying)
    parts.server.answer = lambda method, *_: waiting.json() if method == "GET" else b"{}"
    bound = await Binder(parts.state, parts.server, timeout_s=1).bind(parts.binding(waiting, "n2"))
    assert (bound, parts.server.calls[-1]) == ("bound", "POST /api/v1/namespaces/default/pods/a/binding")


def test_a_node_that_lies_first_does_not_make_the_true_node_free() -> None:
    assigned = share(gpu(0), 8192)
    n1, n2 = node("n1").with_gpus(1), node("n2").with_gpus(1)
    state = state_of(reporting(n2, orphan("a", share(gpu(0, node="n2"), 1024))), reporting(n1))
    running = pod("a").asking(mib=8192).on("n1").assigned(assigned).with_phase("Running").build()
    WatchIntake(state).pod_changed(None, running)
    WatchIntake(state).pod_changed(running, None)
    WatchIntake(state).node_changed(reporting(n1), reporting(n1, orphan("a", assigned)))
    assert free(state, "n1") == (FULL_MIB - 8192, 100)


def test_a_snapshot_shows_which_pods_are_orphans_and_is_of_the_earlier_version_where_none_is() -> None:
    one = node("n1").with_gpus(1)
    state = state_of(reporting(one, orphan("a", share(gpu(0), 8192, 30))))
    snapshot = snapshot_of(state).whole()
    assert [(each.key, each.stage, each.node) for each in snapshot.pods] == [("default/a", "orphaned", "n1")]
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot
    assert list(drift(snapshot)) == []
    assert snapshot_to_json(snapshot).startswith(b'{"v":3,')
    assert snapshot_to_json(snapshot_of(state_of(reporting(one))).whole()).startswith(b'{"v":2,')


@dataclass
class Model:
    """The obvious slow count: the pods of the API, and those that the node names."""

    pods: dict[str, Any] = field(default_factory=dict)
    reported: Mapping[str, Orphan] = field(default_factory=dict)

    def used(self) -> int:
        orphans = {uid: one.held[0].mib for uid, one in self.reported.items() if uid not in self.pods}
        return sum(orphans.values()) + sum(size for size, _ in self.pods.values())


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from(["pod", "delete", "tell", "restart", "mend"]), st.integers(0, 3)), max_size=20)
)
def test_what_is_free_is_what_the_api_and_the_node_leave(steps: list[tuple[str, int]]) -> None:
    one, model = node("n1").with_gpus(1), Model()
    now = reporting(one)
    state = state_of(now)
    for step, number in steps:
        name, size = f"p{number}", 1024 * (number + 1)
        uid = f"uid-default-{name}"
        if step == "pod" and uid not in model.reported:
            running = pod(name).asking(mib=size).on("n1").assigned(share(gpu(0), size)).with_phase("Running").build()
            WatchIntake(state).pod_changed(None, running)
            model.pods[uid] = size, running
        elif step == "delete" and uid in model.pods:
            WatchIntake(state).pod_changed(model.pods.pop(uid)[1], None)
        elif step == "tell":  # of some, whether the API has lost them yet or not
            known = {f"uid-default-p{n}": orphan(f"p{n}", share(gpu(0), 1024 * (n + 1))) for n in range(4)}
            model.reported = {u: o for at, (u, o) in enumerate(known.items()) if number != at}
            then = reporting(one, *model.reported.values())
            WatchIntake(state).node_changed(now, then)
            now = then
        elif step == "restart":
            state = state_of(now)
            for _, running in model.pods.values():
                WatchIntake(state).pod_changed(None, running)
        elif step == "mend":
            assert state.allocations.recount("n1")
        assert free(state, "n1")[0] == FULL_MIB - model.used()
    assert state.allocations.fleet.overcommitted() == []
