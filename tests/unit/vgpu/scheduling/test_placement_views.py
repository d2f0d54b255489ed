"""Placement reads the fleet whole or in part, and counts MIG instances in arrays: what it answers must not depend on how it reads."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import NO_MIG, NO_MIG_EVER, NoFit, Placement, explain, place, spare

NODES = [f"n{number}" for number in range(6)]
PROFILES = ("1g.10gb", "2g.20gb")
MIB = {"1g.10gb": 10, "2g.20gb": 20}


def instances(draw: st.DrawFn, gpu: str) -> tuple[MigInstance, ...]:
    profiles = draw(st.lists(st.sampled_from(PROFILES), max_size=3))
    return tuple(MigInstance(f"{gpu}-{at}", profile, MIB[profile], at, 0) for at, profile in enumerate(profiles))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Nodes with plain GPUs and GPUs in MIG mode, some of both in use, some sick; one that came and went."""
    fleet = Fleet()
    fleet.set_node("gone", Inventory((Gpu("x", 0, "t4", 50),)))
    for node in draw(st.lists(st.sampled_from(NODES), unique=True, min_size=1)):
        gpus, held = [], []
        for row in range(draw(st.integers(0, 3))):
            uuid, mig, healthy = f"{node}-{row}", draw(st.booleans()), draw(st.integers(0, 9)) > 0
            model = draw(st.sampled_from(["t4", "h100"]))
            made = instances(draw, uuid) if mig else ()
            gpus.append(Gpu(uuid, row, model, draw(st.integers(10, 30)), mig=mig, healthy=healthy, instances=made))
            held += [AssignedGpu(i.uuid, row, i.mib, 100, "mig", i.profile) for i in made if draw(st.booleans())]
            if not mig and draw(st.booleans()):
                held.append(AssignedGpu(uuid, row, draw(st.integers(1, 10)), 20))
        fleet.set_node(node, Inventory(tuple(gpus)), held)
    fleet.remove_node("gone")
    return fleet


@st.composite
def requests(draw: st.DrawFn) -> PodRequest:
    parts = [
        GpuRequest("share", "share", draw(st.integers(1, 2)), mib=draw(st.integers(1, 30)), core_percent=50),
        GpuRequest("whole", "whole", 1),
        *(GpuRequest(f"mig-{profile}", "mig", draw(st.integers(1, 3)), profile=profile) for profile in PROFILES),
    ]
    chosen = draw(st.lists(st.sampled_from(parts), unique=True, min_size=1, max_size=2))
    uuids = st.frozensets(st.sampled_from([f"n{n}-{row}{at}" for n in range(6) for row in "01" for at in ("", "-0")]))
    some = {name: draw(uuids) for name in ("uuids", "not_uuids") if draw(st.integers(0, 3)) == 0}
    models = {"models": frozenset({"h100"})} if draw(st.integers(0, 3)) == 0 else {}
    return PodRequest(tuple(chosen), **some, **models)


def usable(fleet: Fleet, request: PodRequest, node: str, profile: str, only: dict[str, set[str]], *, free: bool) -> int:
    """The obvious count of instances that a pod may be given."""
    count = 0
    for gpu in fleet.inventory[node].gpus:
        for one in gpu.offered_instances:
            known = {gpu.uuid, one.uuid}
            count += (
                one.profile == profile
                and not (free and one.uuid in fleet.mig_containers[node])
                and (not request.models or gpu.model in request.models)
                and (not request.uuids or bool(known & request.uuids))
                and not known & request.not_uuids
                and (node not in only or bool(known & only[node]))
            )
    return count


@settings(max_examples=examples(300), deadline=None)
@given(fleets(), requests(), st.data())
def test_the_answer_for_some_nodes_is_that_of_a_fleet_of_those_nodes(
    fleet: Fleet, request: PodRequest, data: st.DataObject
) -> None:
    requested = data.draw(st.lists(st.sampled_from(NODES), unique=True, min_size=1))
    only = {name: {f"{name}-0"} for name in requested if name in fleet and data.draw(st.integers(0, 3)) == 0}
    alone = [place(fleet, request, [name], only) for name in requested]
    fitting = [one.node for one in alone if isinstance(one, Placement)]
    together = place(fleet, request, requested, only)
    if isinstance(together, NoFit):
        assert not fitting
        assert together.reasons == {n: r for one in alone if isinstance(one, NoFit) for n, r in one.reasons.items()}
    else:
        assert together == alone[requested.index(together.node)]
        while len(fitting) > 1:  # the best stays the best among any candidates
            fitting = [
                name for name in fitting if name != data.draw(st.sampled_from(sorted(set(fitting) - {together.node})))
            ]
            assert place(fleet, request, fitting, only) == together


@settings(max_examples=examples(300), deadline=None)
@given(fleets(), requests(), st.data())
def test_mig_instances_fit_exactly_where_enough_of_them_are_free(
    fleet: Fleet, request: PodRequest, data: st.DataObject
) -> None:
    request = PodRequest(
        tuple(part for part in request.containers if part.kind == "mig") or (GpuRequest("m", "mig", 1, profile=PROFILES[0]),),
        models=request.models, uuids=request.uuids, not_uuids=request.not_uuids,
    )  # fmt: skip
    names = [name for name in fleet.column if fleet.inventory[name].gpus]
    only = {name: {f"{name}-0", f"{name}-1-0"} for name in names if data.draw(st.integers(0, 3)) == 0}
    reasons = explain(fleet, request, names, only)

    def enough(name: str, limits: dict[str, set[str]], *, free: bool) -> bool:
        return all(
            usable(fleet, request, name, one.profile, limits, free=free) >= one.gpus for one in request.containers
        )

    for name in names:
        if enough(name, only, free=True):
            assert name not in reasons
            result = place(fleet, request, [name], only)
            assert isinstance(result, Placement)
            gpus = [assigned for part in result.assignment.containers.values() for assigned in part]
            assert len({assigned.uuid for assigned in gpus}) == sum(part.gpus for part in request.containers)
            for assigned in gpus:
                before = len(fleet.mig_containers[name])
                fleet.debit(name, assigned)
                assert len(fleet.mig_containers[name]) == before + 1, "it was free"
            for assigned in gpus:
                fleet.credit(name, assigned)
        elif not enough(name, {}, free=False):
            assert reasons[name] == NO_MIG_EVER
        elif not enough(name, {}, free=True):
            assert reasons[name] == NO_MIG


def free_gpus(fleet: Fleet, node: str) -> Fraction:
    """The obvious sum over a node's GPUs."""
    free = Fraction(0)
    for row, gpu in enumerate(fleet.inventory[node].gpus):
        instances = [one.mib for one in gpu.offered_instances if one.uuid not in fleet.mig_containers[node]]
        mib = int(fleet.free_mib[row, fleet.column[node]]) if gpu.shareable else 0
        free += Fraction(mib + sum(instances), gpu.mib)
    return free


@settings(max_examples=examples(300), deadline=None)
@given(fleets(), st.lists(st.sampled_from([*NODES, "gone"]), unique=True))
def test_a_pod_without_a_gpu_rates_each_node_one_less_for_each_gpu_that_is_free(
    fleet: Fleet, requested: list[str]
) -> None:
    for name in fleet.column:
        fleet.debit(name, AssignedGpu(f"{name}-0", 0, 1, 1))  # parts of a GPU add up
    assert spare(fleet, requested) == {
        name: max(0, 10 - ceil(free_gpus(fleet, name))) if name in fleet else 10 for name in requested
    }


@settings(max_examples=examples(150), deadline=None)
@given(fleets())
def test_the_counts_of_instances_are_those_of_the_inventories(fleet: Fleet) -> None:
    for name, at in fleet.column.items():
        for row, gpu in enumerate(fleet.inventory[name].gpus):
            for profile, counts in fleet.mig.items():
                offered = [one for one in gpu.offered_instances if one.profile == profile]
                free = [one.mib for one in offered if one.uuid not in fleet.mig_containers[name]]
                found = (counts.offered[row, at], counts.free[row, at], counts.free_mib[row, at])
                assert found == (len(offered), len(free), sum(free))
