"""A kept table, brought up to date, answers what a table made anew answers, after any changes of the fleet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.scheduling.test_placement_named import quoted
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.feasibility import FeasibilityTable
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import Taint
from vgpu.scheduling.placement import NO_SINGLE_GPU, TOO_LARGE, NoFit, Placement, explain, place
from vgpu.scheduling.policies.fragmentation import fragmentation
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.table_cache import KEPT, CachedTable, table_of_all

NODES = tuple(f"n{at:02}" for at in range(24))
MODELS = ("t4", "h100")
POLICY = st.sampled_from(sorted(POLICIES))


@st.composite
def requests(draw: st.DrawFn) -> PodRequest:
    part = GpuRequest("main", "share", draw(st.integers(1, 2)), mib=draw(st.sampled_from((2, 5, 9))), core_percent=draw(st.sampled_from((0, 40))))  # fmt: skip
    some = {"models": frozenset({"h100"})} if draw(st.integers(0, 3)) == 0 else {}
    return PodRequest((part,), policy=draw(POLICY), cpu_milli=draw(st.sampled_from((0, 500, 2000))), **some)


def inventory(draw: st.DrawFn, node: str) -> Inventory:
    return Inventory(
        tuple(
            Gpu(f"{node}-{row}", row, draw(st.sampled_from(MODELS)), draw(st.sampled_from((10, 20))), healthy=draw(st.integers(0, 5)) > 0)
            for row in range(draw(st.integers(1, 3)))
        )
    )  # fmt: skip


def change(draw: st.DrawFn, fleet: Fleet, held: list[tuple[str, AssignedGpu]]) -> None:
    """As the watch reports it."""
    node = draw(st.sampled_from(NODES))
    kind = draw(st.sampled_from(("debit", "debit", "credit", "cpu", "inventory", "gone", "saw", "taint")))
    if kind == "inventory":
        held[:] = [one for one in held if one[0] != node]
        fleet.set_node(node, inventory(draw, node))
    elif kind == "gone":
        held[:] = [one for one in held if one[0] != node]
        fleet.remove_node(node)
    elif kind == "cpu" and node in fleet:
        fleet.set_cpu(node, draw(st.integers(0, 4000)))
    elif kind == "debit" and node in fleet:
        gpu = draw(st.sampled_from(fleet.inventory[node].gpus))
        held.append((node, AssignedGpu(gpu.uuid, gpu.index, draw(st.integers(1, 4)), 20)))
        fleet.debit(*held[-1])
    elif kind == "credit" and held:
        fleet.credit(*held.pop(draw(st.integers(0, len(held) - 1))))
    elif kind == "saw":
        fleet.record(draw(requests()))
    elif kind == "taint":
        fleet.set_labels(node, {}, [Taint("a", "b", "NoSchedule")] if draw(st.booleans()) else [])


def scores_of(table: FeasibilityTable | None) -> dict[str, tuple[object, ...]]:
    """Node that fits -> its GPUs and its keys by policy `fragmentation`."""
    assert table is not None
    keys = fragmentation(table.outcome())
    return {
        table.names[at]: (table.assignment(at), *(key[at].item() for key in keys))
        for at in np.flatnonzero(table.fits).tolist()
    }


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_pods_are_placed_as_without_kept_tables_after_any_changes(data: st.DataObject) -> None:
    fleet, held, templates = Fleet(), list[tuple[str, AssignedGpu]](), [data.draw(requests()) for _ in range(3)]
    for node in NODES[: data.draw(st.integers(1, len(NODES)))]:
        fleet.set_node(node, inventory(data.draw, node))
        fleet.set_cpu(node, data.draw(st.sampled_from((1000, 4000))))
    for one in templates:
        fleet.record(one)
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 4))):
            change(data.draw, fleet, held)
        request, names = data.draw(st.sampled_from(templates)), sorted(fleet.column)
        if not names:
            continue
        assert scores_of(table_of_all(fleet, request, "tightest")) == scores_of(
            FeasibilityTable(fleet, request, fleet.look_up(names))
        )
        found = place(fleet, request, quoted(names))
        assert found == place(fleet, request, names)
        if isinstance(found, Placement):
            held += [(found.node, assigned) for assigned in found.assignment.held()]
            for assigned in found.assignment.held():
                fleet.debit(found.node, assigned)


def test_a_table_is_kept_for_the_next_pod_of_a_template_and_for_few_templates() -> None:
    fleet = Fleet()
    for node in NODES:
        fleet.set_node(node, Inventory((Gpu(node, 0, "t4", 100),)))
    request = PodRequest((GpuRequest("main", "share", 1, mib=1),))
    first = table_of_all(fleet, request, "tightest")
    fleet.debit(NODES[3], AssignedGpu(NODES[3], 0, 30, 0))
    assert isinstance(first, CachedTable)
    assert table_of_all(fleet, request, "tightest") is first
    for mib in range(2, KEPT + 2):
        table_of_all(fleet, PodRequest((GpuRequest("main", "share", 1, mib=mib),)), "tightest")
    assert len(fleet.kept) == KEPT
    assert table_of_all(fleet, request, "tightest") is not first


def test_tables_of_other_pods_are_not_kept() -> None:
    fleet, one = Fleet(), PodRequest((GpuRequest("main", "share", 1, mib=1),))
    others = (
        replace(one, uuids=frozenset("a")), replace(one, not_uuids=frozenset("a")),
        PodRequest((GpuRequest("main", "whole", 1),)), PodRequest((*one.containers, GpuRequest("other", "share", 1, mib=1))),
    )  # fmt: skip
    assert [table_of_all(fleet, request, "tightest") for request in others] == [None] * len(others)
    assert table_of_all(fleet, one, "emptiest") is None
    assert table_of_all(fleet, one, "linked") is None


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_reasons_are_those_of_tables_made_anew_after_any_changes(data: st.DataObject) -> None:
    fleet, held, templates = Fleet(), list[tuple[str, AssignedGpu]](), [data.draw(requests()) for _ in range(2)]
    for node in NODES[: data.draw(st.integers(1, len(NODES)))]:
        fleet.set_node(node, inventory(data.draw, node))
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 4))):
            change(data.draw, fleet, held)
        request, names = data.draw(st.sampled_from(templates)), sorted(fleet.column)
        one_by_one = [explain(fleet, request, [name]) for name in names]
        assert explain(fleet, request, names) == {name: why for one in one_by_one for name, why in one.items()}
        found = place(fleet, request, quoted(names)) if names else NoFit()
        if isinstance(found, NoFit):
            assert found.reasons == explain(fleet, request, names)


def test_a_node_that_gets_larger_gpus_has_another_reason() -> None:
    fleet, request = Fleet(), PodRequest((GpuRequest("main", "share", 1, mib=50),))
    for node in NODES:
        fleet.set_node(node, Inventory((Gpu(node, 0, "t4", 40),)))
    assert explain(fleet, request, NODES) == dict.fromkeys(NODES, TOO_LARGE)
    fleet.set_node(NODES[3], Inventory((Gpu(NODES[3], 0, "h100", 80),)), [AssignedGpu(NODES[3], 0, 60, 0)])
    assert explain(fleet, request, NODES) == dict.fromkeys(NODES, TOO_LARGE) | {NODES[3]: NO_SINGLE_GPU}
