"""The pod of a request: properties over a model of the kubelet's device manager."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.allocation import (
    Choice,
    DeviceRequest,
    NodePod,
    PodInFlight,
    candidates,
    check_capacity,
    choose_container,
    contradiction,
    prefer,
)
from deviceplugin.device_ledger import DeviceLedger
from tests.examples import examples
from tests.unit.deviceplugin.builders import KnownPods, ModelKubelet, inventory, node_pod, share, uuid
from vgpu.api.contract import uuid_of
from vgpu.api.errors import Refused
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.names import DEFAULT
from vgpu.api.request import GpuRequest

MEM, CORE = DEFAULT.gpu_mem, DEFAULT.gpu_core


def gpus_of(ids: frozenset[str]) -> Counter[str]:
    return Counter(uuid_of(one) for one in ids)


def set_up(access: str, seed: int, gpus: int = 2) -> tuple[KnownPods, DeviceLedger, ModelKubelet]:
    pods, has = KnownPods(), inventory(gpus, access=access)
    ledger = DeviceLedger(pods, lambda: has, DEFAULT, clock=lambda: 0.0, pod_wait_s=0.01)
    return pods, ledger, ModelKubelet(ledger, has, random.Random(seed))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 25])), min_size=2, max_size=4),
    st.sampled_from(["cdi", "nvidia"]),
    st.integers(0, 10_000),
    st.data(),
)
@settings(max_examples=examples(60), deadline=None)
async def test_pods_of_one_size_in_any_order_have_mem_and_core_on_one_gpu_and_no_gpu_is_overbooked(
    sizes: list[tuple[int, int]], access: str, seed: int, data: st.DataObject
) -> None:
    core = sizes[0][1]
    pods, _, kubelet = set_up(access, seed)
    waiting = [node_pod(f"p{i}", i, share("main", 4, core), on=[gpu]) for i, (gpu, _) in enumerate(sizes)]
    for one in waiting:
        pods.show(one)
    for one in data.draw(st.permutations(waiting)):
        await kubelet.admit(one)
        if data.draw(st.booleans()):
            pods.admitted(one)
    counted: Counter[str] = Counter()
    for records in kubelet.records.values():
        where = {resource: set(gpus_of(ids)) for (_, resource), ids in records.items()}
        assert len(where[MEM]) == 1
        assert CORE not in where or where[CORE] == where[MEM]
        counted += gpus_of(records["main", MEM])
    meant = Counter({uuid(i): n * 4 for i, n in Counter(gpu for gpu, _ in sizes).items()})
    assert counted == meant  # I3: whichever pod was taken for another, each GPU has what was assigned there


@given(st.integers(0, 10_000), st.sampled_from(["cdi", "nvidia"]), st.booleans())
@settings(max_examples=examples(30), deadline=None)
async def test_each_of_several_containers_gets_its_own_gpu_whatever_the_order_of_resources(
    seed: int, access: str, known_at_once: bool
) -> None:
    pods, ledger, kubelet = set_up(access, seed, gpus=3)
    many = node_pod("many", 0, share("a", 4, 20), share("b", 4, 30), share("c", 6), on={"a": [0], "b": [1], "c": [2]})
    other = node_pod("other", 1, share("a", 6, 50), on=[0])
    pods.show(many)
    if known_at_once:
        pods.show(other)
    await kubelet.admit(many)
    pods.show(other)
    await kubelet.admit(other)
    for pod in (many, other):
        for (container, resource), ids in kubelet.records[pod.uid].items():
            assert set(gpus_of(ids)) == set(pod.assignment.uuids(container)), (container, resource)
            assert ledger.holders(resource, ids) == [(pod.uid, container)]


@given(st.integers(0, 10_000))
@settings(max_examples=examples(30), deadline=None)
async def test_app_containers_reuse_an_init_containers_devices_and_get_the_rest_on_the_same_gpus(seed: int) -> None:
    pods, _, kubelet = set_up("cdi", seed, gpus=3)
    one = node_pod("p", 0, share("init", 4, 10, 2, init=True), share("app", 8, 20, 2), on=[0, 2])
    pods.show(one)
    await kubelet.admit(one)
    records = kubelet.records[one.uid]
    assert records["init", MEM] < records["app", MEM]
    assert gpus_of(records["app", MEM]) == {uuid(0): 4, uuid(2): 4}
    assert set(gpus_of(records["app", CORE])) == {uuid(0), uuid(2)}


@given(st.integers(0, 10_000))
@settings(max_examples=examples(30), deadline=None)
async def test_an_app_container_smaller_than_the_init_container_keeps_to_the_pods_gpus(seed: int) -> None:
    pods, ledger, kubelet = set_up("cdi", seed, gpus=3)
    one = node_pod("p", 0, share("init", 8, 0, 2, init=True), share("app", 4, 0, 2), on=[0, 2])
    pods.show(one)
    await kubelet.admit(one)
    assert set(gpus_of(kubelet.records[one.uid]["app", MEM])) <= {uuid(0), uuid(2)}
    assert ledger.done[one.uid]["app", MEM] == kubelet.records[one.uid]["app", MEM]


@pytest.mark.parametrize("seed", range(20))
async def test_a_wrong_guess_is_corrected_as_soon_as_a_request_shows_it(seed: int) -> None:
    pods, ledger, kubelet = set_up("nvidia", seed)
    small, large = (
        node_pod("small", 0, share("main", 4, 10), on=[0]),
        node_pod("large", 1, share("main", 4, 60), on=[0]),
    )
    pods.show(small)
    pods.show(large)
    await kubelet.admit(large)  # the younger one comes first, and its memory proves nothing
    assert ledger.done.keys() == {large.uid}
    await kubelet.admit(small)
    assert ledger.done[small.uid]["main", CORE] == kubelet.records[small.uid]["main", CORE]


async def test_a_pod_that_the_kubelet_rejected_half_way_does_not_delay_the_next() -> None:
    pods, ledger, kubelet = set_up("cdi", 1)
    rejected, following = node_pod("r", 0, share("main", 4, 10), on=[0]), node_pod("f", 1, share("main", 6, 10), on=[1])
    pods.show(rejected)
    pods.show(following)
    await ledger.allocate(MEM, await ledger.prefer(MEM, sorted(kubelet.all[MEM]), [], 4))
    await kubelet.admit(following)
    assert set(gpus_of(kubelet.records[following.uid]["main", MEM])) == {uuid(1)}
    assert set(gpus_of(kubelet.records[following.uid]["main", CORE])) <= {uuid(0), uuid(1)}


async def test_a_request_waits_for_the_watch_to_bring_its_pod() -> None:
    import asyncio

    pods, ledger, kubelet = set_up("cdi", 1)
    ledger._pod_wait_s = 5.0
    late = node_pod("late", 0, share("main", 4), on=[1])
    admission = asyncio.create_task(kubelet.admit(late))
    await asyncio.sleep(0)
    pods.show(late)
    await admission
    assert set(gpus_of(kubelet.records[late.uid]["main", MEM])) == {uuid(1)}


async def test_a_pod_that_came_past_our_scheduler_is_refused_with_a_sentence() -> None:
    _, _, kubelet = set_up("cdi", 1)
    with pytest.raises(
        Refused, match=r"no pod that waits on this node was assigned 4 tangram.sh/gpu-mem.*Tangram's scheduler"
    ):
        await kubelet.admit(node_pod("foreign", 0, share("main", 4), on=[0]))


async def test_assignments_beyond_a_gpus_memory_are_refused() -> None:
    pods, _, kubelet = set_up("cdi", 1)
    for name in ("a", "b"):
        pods.show(node_pod(name, 0, share("main", 10), on=[0]))
    with pytest.raises(Refused, match=r"has 16384 MiB .* assigned 20480 MiB"):
        await kubelet.admit(pods.shown["uid-a"])


def test_a_whole_gpu_that_is_shared_is_refused() -> None:
    whole = node_pod("w", 0, GpuRequest("main", "whole", 1, core_percent=100), on=[0])
    check_capacity([whole], [uuid(0)], inventory())
    with pytest.raises(Refused, match="to one container alone and to others"):
        check_capacity([whole, node_pod("s", 1, share("main", 1), on=[0])], [uuid(0)], inventory())


def test_a_share_of_a_gpu_that_is_given_whole_only_is_refused() -> None:
    """Also where an extender of an earlier version assigned it."""
    there = inventory()
    coherent = replace(there, gpus=(replace(there.gpus[0], coherent="numa"), *there.gpus[1:]))
    check_capacity([node_pod("w", 0, GpuRequest("main", "whole", 1, core_percent=100), on=[0])], [uuid(0)], coherent)
    shared = node_pod("s", 1, share("main", 1), on=[0])
    check_capacity([shared], [uuid(0)], there)
    with pytest.raises(Refused, match="is given whole only, since its memory is a NUMA node of the kernel"):
        check_capacity([shared], [uuid(0)], coherent)


def test_devices_on_an_unassigned_gpu_are_refused_with_cdi_and_taken_as_a_swap_with_nvidias_runtime() -> None:
    one = node_pod("p", 0, share("main", 2), on=[0])
    ids = [f"{uuid(1)}-{slot}" for slot in range(2)]

    def choices() -> list[Choice]:
        return list(candidates([one], {}, PodInFlight(), DeviceRequest(MEM, 2), DEFAULT))

    with pytest.raises(Refused, match=f"chose devices on {uuid(1)} for pod default/p, which was assigned {uuid(0)}"):
        choose_container(choices(), ids, DeviceRequest(MEM, 2), must_match=True)
    assert choose_container(choices(), ids, DeviceRequest(MEM, 2), must_match=False).swapped


def test_preferred_devices_contain_what_the_kubelet_demands_and_nothing_off_the_gpu() -> None:
    one = node_pod("p", 0, share("main", 3), on=[1])
    (choice,) = candidates([one], {}, PodInFlight(), DeviceRequest(MEM, 3), DEFAULT)
    available = [f"{uuid(gpu)}-{slot}" for gpu in (0, 1) for slot in range(12)]
    assert prefer(choice, available, [f"{uuid(1)}-11"], 3) == [f"{uuid(1)}-11", f"{uuid(1)}-0", f"{uuid(1)}-1"]
    assert prefer(choice, available[:13], [], 3) is None


def test_an_assignment_that_contradicts_the_request_is_reported() -> None:
    requests = (share("main", 4, 30),)

    def found(*gpus: AssignedGpu) -> str:
        return contradiction(requests, Assignment({"main": gpus})) or ""

    assert found(AssignedGpu(uuid(0), 0, 4096, 30)) == ""
    assert "assigned 8192 MiB and 30 percent" in found(AssignedGpu(uuid(0), 0, 8192, 30))
    assert "assigned 0 GPUs and requests 1" in found()
    assert "assigned a whole" in found(AssignedGpu(uuid(0), 0, 4096, 30, "whole"))


def test_a_pod_being_deleted_is_meant_last() -> None:
    from dataclasses import replace

    leaving: NodePod = replace(node_pod("old", 0, share("main", 4), on=[0]), leaving=True)
    fresh = node_pod("new", 1, share("main", 4), on=[1])
    found = [c.node_pod.name for c in candidates([leaving, fresh], {}, PodInFlight(), DeviceRequest(MEM, 4), DEFAULT)]
    assert found == ["new", "old"]


@pytest.mark.parametrize("core", [0, 20])
@pytest.mark.parametrize("fate", ["gone", "admitted"])
async def test_a_pod_whose_devices_a_twin_got_is_served_when_it_is_next(core: int, fate: str) -> None:
    pods, _, kubelet = set_up("nvidia", 3)
    first, twin = (
        node_pod("first", 0, share("main", 4, core), on=[0]),
        node_pod("twin", 1, share("main", 4, core), on=[1]),
    )
    pods.show(first)
    pods.show(twin)
    await kubelet.admit(twin)  # taken for the first, which waits longer
    if fate == "gone":
        kubelet.remove(twin)
        pods.gone(twin)
    else:
        pods.admitted(twin)
    await kubelet.admit(first)
    meant = (
        uuid(0) if fate == "gone" else uuid(1)
    )  # the twin has the first's GPU in the kubelet's records, so it gets the twin's
    assert all(set(gpus_of(ids)) == {meant} for ids in kubelet.records[first.uid].values())


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([0, 5, 8])), min_size=1, max_size=2),
            st.sampled_from(["waits", "admitted", "gone", "gone after it was seen admitted"]),
        ),
        min_size=2,
        max_size=4,
    ),
    st.integers(0, 10_000),
)
@settings(max_examples=examples(200), deadline=None)
async def test_a_pod_of_any_containers_is_served_whatever_became_of_those_before_it(
    given_pods: list[tuple[list[tuple[int, int]], str]], seed: int
) -> None:
    """Also where it could have been the one that a pod before it was taken for, and was not."""
    pods, ledger, kubelet = set_up("cdi", seed)
    for number, (sizes, fate) in enumerate(given_pods):
        shares = [share(f"c{at}", units, core) for at, (units, core) in enumerate(sizes)]
        one = node_pod(f"p{number}", number, *shares, on=[0])
        pods.show(one)
        await kubelet.admit(one)
        if fate.endswith("admitted"):
            pods.admitted(one)
        if all(before != "waits" for _, before in given_pods[:number]):  # else pods of one size cannot be told apart
            assert ledger.done[one.uid] == kubelet.records[one.uid]
        if fate.startswith("gone"):
            kubelet.remove(one)
            pods.gone(one)


@pytest.mark.parametrize("first_resource", [MEM, CORE])
async def test_a_pod_takes_over_nothing_of_one_that_came_and_went_before_it(first_resource: str) -> None:
    """A job's pod ended at once. The pod after it has the same memory in its first container, and another container."""
    pods, ledger, kubelet = set_up("cdi", 0)
    job = node_pod("job", 0, share("main", 8), on=[0])
    pair = node_pod("pair", 1, share("main", 8, 40), share("encoder", 4, 10), on=[0])
    pods.show(job)
    await kubelet.admit(job)
    kubelet.remove(job)
    pods.gone(job)
    pods.show(pair)
    requests = [DeviceRequest(MEM, 8), DeviceRequest(CORE, 40)]
    if first_resource == CORE:
        requests.reverse()
    for request in [*requests, DeviceRequest(CORE, 10), DeviceRequest(MEM, 4)]:
        ids = await ledger.prefer(request.resource, sorted(kubelet.all[request.resource]), [], request.quantity)
        assert (await ledger.allocate(request.resource, ids)).node_pod == pair
    assert {key: len(ids) for key, ids in ledger.done[pair.uid].items()} == {
        ("main", MEM): 8, ("main", CORE): 40, ("encoder", MEM): 4, ("encoder", CORE): 10,
    }  # fmt: skip
