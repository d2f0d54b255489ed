"""To which NUMA nodes the kubelet aligns a pod, against its own merge written plainly."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.builders import gpu, mig_gpu, share
from tests.unit.vgpu.scheduling.slow_numa import SlowKubelet, Things
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import WITHDRAWN, GpuCondition, Inventory, Orphan
from vgpu.api.names import DEFAULT
from vgpu.api.numa import ContainerNeeds, DeviceCount, NumaFacts, NumaNode
from vgpu.scheduling.numa import CPU, Supply, gpus_of, mask_of, nodes_of, predict, preferred, supplies_of

POLICIES = ("restricted", "single-numa-node")
RESOURCES = ("a", "b")


def facts(policy: str = "restricted", scope: str = "container", nodes: int = 2, **more: Any) -> NumaFacts:
    return NumaFacts(1, policy, scope, tuple(NumaNode(at, 8, 8) for at in range(nodes)), exclusive_cpus=True, **more)


def counts(things: Things, among: set[str] | None = None) -> Counter[int]:
    return Counter(things.node_of[one] for one in (things.node_of if among is None else among))


@st.composite
def machines(draw: st.DrawFn, nodes: int) -> dict[str, Things]:
    """Mostly free, so that most pods are admitted."""
    order = random.Random(draw(st.integers(0, 2**32)))
    found = {}
    for resource in (CPU, *RESOURCES):
        node_of = {f"{resource}{at}": order.randrange(nodes) for at in range(order.randint(3, 9))}
        found[resource] = Things(node_of, {one for one in node_of if order.random() < 0.9})
    for resource in RESOURCES:
        if order.random() < 0.4:
            del found[resource]
    return found


amounts = st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 4))
containers = st.lists(st.tuples(st.integers(0, 4), amounts, st.booleans()), min_size=1, max_size=3)


def whole_pod(needs: list[ContainerNeeds]) -> ContainerNeeds:
    """All that run to the end together, or an init container with those that started before it, whichever is more."""
    most = Counter[str]()
    lasting = [[one for one in needs[:at] if not one.init] for at in range(len(needs))]
    for some in [
        *([*before, one] for one, before in zip(needs, lasting, strict=True)),
        [n for n in needs if not n.init],
    ]:
        total = Counter[str]()
        for one in some:
            total.update({CPU: one.cpus, **one.devices})
        most |= total
    return ContainerNeeds("", most.pop(CPU, 0), dict(most))


def needs_of(drawn: list[tuple[int, dict[str, int], bool]]) -> list[ContainerNeeds]:
    return [ContainerNeeds(f"c{at}", cpus, devices, init) for at, (cpus, devices, init) in enumerate(drawn)]


@settings(max_examples=500)
@given(
    data=st.data(), nodes=st.integers(1, 4), policy=st.sampled_from(POLICIES), scope=st.sampled_from(("container", "pod")),
    drawn=containers, closest=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_the_prediction_is_what_the_whole_merge_arrives_at_whatever_devices_are_taken(
    data: st.DataObject, nodes: int, policy: str, scope: str, drawn: list[Any], closest: bool, seed: int
) -> None:
    things, needs, order = data.draw(machines(nodes)), needs_of(drawn), random.Random(seed)
    far = {(a, b): 10 if a == b else order.choice([11, 20, 30]) for a in range(nodes) for b in range(a + 1)}
    rows = [tuple(far[max(a, b), min(a, b)] for b in range(nodes)) for a in range(nodes)]
    known = NumaFacts(
        1, policy, scope, tuple(NumaNode(at, 8, 8, rows[at]) for at in range(nodes)), prefer_closest=closest
    )
    supplies = {name: Supply(counts(some), counts(some, some.free)) for name, some in things.items()}
    answer = predict(known, supplies, needs)
    assume("cannot be predicted" not in answer.refused)

    def closeness(some: frozenset[int]) -> float:
        return sum(rows[a][b] for a in some for b in some) / len(some) ** 2 if closest else 0.0

    def pick(some: Any) -> list[str]:
        shuffled = sorted(some)
        order.shuffle(shuffled)
        return shuffled

    kubelet = SlowKubelet(policy, frozenset(range(nodes)), things, pick, closeness)
    before = counts(things[CPU], things[CPU].free)
    masks = kubelet.admit(needs, scope, whole_pod(needs))
    if answer.refused:
        assert masks is None
        return
    assert {name: frozenset(nodes_of(mask)) for name, mask in answer.masks.items()} == masks
    if answer.cpus is not None and scope == "container":
        assert Counter(answer.cpus) == before - counts(things[CPU], things[CPU].free)


@given(data=st.data(), nodes=st.integers(1, 5), wanted=st.integers(0, 8), kept=st.integers(0, 3))
def test_preferred_masks_are_those_of_all_hints(data: st.DataObject, nodes: int, wanted: int, kept: int) -> None:
    things = data.draw(machines(nodes))[CPU]
    things.reusable = set(sorted(things.free)[:kept])
    things.free -= things.reusable
    supply = Supply(counts(things), counts(things, things.free))
    expected = {mask_of(hint.nodes) for hint in things.hints(wanted) if hint.preferred and hint.nodes is not None}
    assert preferred(supply, wanted, counts(things, things.reusable)) == expected


def test_the_lowest_numa_node_wins_where_both_have_room() -> None:
    supplies = {"a": Supply({0: 4, 1: 4}, {0: 2, 1: 4})}
    assert predict(facts(), supplies, [ContainerNeeds("c", 0, {"a": 2})]).masks == {"c": 0b01}


def test_cpus_move_a_container_to_the_other_numa_node() -> None:
    supplies = {"a": Supply({0: 4, 1: 4}, {0: 4, 1: 4}), CPU: Supply({0: 8, 1: 8}, {0: 1, 1: 8})}
    answer = predict(facts(), supplies, [ContainerNeeds("c", 2, {"a": 2})])
    assert answer.masks == {"c": 0b10}
    assert answer.cpus == {1: 2}


@pytest.mark.parametrize(("policy", "admitted"), [("restricted", True), ("single-numa-node", False)])
def test_a_request_that_no_single_numa_node_could_ever_have(policy: str, admitted: bool) -> None:
    supplies = {"a": Supply({0: 4, 1: 4}, {0: 4, 1: 4})}
    answer = predict(facts(policy), supplies, [ContainerNeeds("c", 0, {"a": 6})])
    assert (answer.refused == "") is admitted


def test_what_is_not_predicted_is_refused_with_the_reason() -> None:
    assert predict(facts(unpredictable="the moon"), {}, []).refused == "the moon"
    assert "more than 8" in predict(facts(nodes=9), {}, []).refused
    several = predict(facts(), {"a": Supply({}, {})}, [ContainerNeeds("c", 0, {"a": 1})])
    assert several.refused == "devices of a belong to several NUMA nodes"


def test_a_later_container_is_not_guessed_after_one_on_several_numa_nodes() -> None:
    supplies = {CPU: Supply({0: 8, 1: 8}, {0: 8, 1: 8})}
    answer = predict(facts(), supplies, [ContainerNeeds("a", 12), ContainerNeeds("b", 1)])
    assert answer.refused == "which cpu earlier containers of the pod leave cannot be predicted"
    assert predict(facts(), supplies, [ContainerNeeds("a", 12)]).cpus is None


def test_the_kubelet_counts_ids_and_not_gpus() -> None:
    zero, one = gpu(0, numa=0, mib=4096), gpu(1, numa=1, mib=4096)
    given_whole = AssignedGpu(zero.uuid, 0, 4096, 100, "whole")
    found = supplies_of(facts(), Inventory((zero, one)), DEFAULT, [given_whole, share(one, 1024, 30)], {1: 3})
    assert found[DEFAULT.gpu] == Supply({0: 1, 1: 1}, {0: 0, 1: 1})
    assert found[DEFAULT.gpu_mem] == Supply({0: 4, 1: 4}, {0: 4, 1: 3})
    assert found[DEFAULT.gpu_core].free == {0: 100, 1: 70}
    assert found[CPU].free == {0: 8, 1: 5}


def test_ids_of_an_unhealthy_gpu_are_there_and_not_free() -> None:
    sick, well = gpu(0, numa=0, mib=4096, healthy=False), gpu(1, numa=0, mib=4096)
    found = supplies_of(facts(), Inventory((sick, well)), DEFAULT, [share(sick, 1024), share(well, 1024)], {})
    assert found[DEFAULT.gpu_mem] == Supply({0: 8}, {0: 3})


def test_resources_of_other_plugins_count() -> None:
    nic = (DeviceCount(1, 2, 1),)
    found = supplies_of(facts(others={"nic": nic}), Inventory(()), DEFAULT, [], {})
    assert found["nic"] == Supply({1: 2}, {1: 1})


def test_gpus_without_a_numa_node_are_given_only_where_no_mask_is_kept() -> None:
    near, nowhere, mig = gpu(0, numa=0), gpu(1), mig_gpu(2, "1g.10gb")
    inventory = Inventory((near, nowhere, mig))
    assert gpus_of(facts(), inventory, 0b11) == {near.uuid}
    assert gpus_of(facts("single-numa-node", nodes=1), inventory, 0b1) >= {
        near.uuid,
        nowhere.uuid,
        mig.instances[0].uuid,
    }
    assert gpus_of(facts(), Inventory((nowhere,)), 0b01) == {nowhere.uuid}


def test_devices_of_an_init_container_are_reused_once() -> None:
    supplies = {"a": Supply({0: 3, 1: 3}, {0: 3, 1: 3})}
    needs = [ContainerNeeds("init", 0, {"a": 2}, init=True), *(ContainerNeeds(name, 0, {"a": 2}) for name in "cd")]
    assert predict(facts(), supplies, needs).masks == {"init": 0b01, "c": 0b01, "d": 0b10}


def test_of_a_withdrawn_gpu_the_kubelet_has_the_ids_in_use_alone() -> None:
    cordoned = (GpuCondition("Cordoned", WITHDRAWN, 0),)
    left, stays = gpu(0, numa=0, mib=4096, conditions=cordoned), gpu(1, numa=0, mib=4096)
    held = [share(left, 1024), share(stays, 2048)]
    found = supplies_of(facts(), Inventory((left, stays)), DEFAULT, held, {})
    assert found[DEFAULT.gpu_mem] == Supply({0: 5}, {0: 2})
    assert found[DEFAULT.gpu] == Supply({0: 1}, {0: 1})


def test_ids_of_orphans_on_a_withdrawn_gpu_are_listed_and_free() -> None:
    """The plugin lists them, as processes use them, and the kubelet has no pod with them any more."""
    cordoned = (GpuCondition("Cordoned", WITHDRAWN, 0),)
    left, stays = gpu(0, numa=0, mib=4096, conditions=cordoned), gpu(1, numa=0, mib=4096)
    gone = Orphan("uid", "default", "gone", (share(left, 1024), share(stays, 1024)))
    for there, free in ((left, 5), (replace(left, healthy=False), 4)):
        inventory = Inventory((there, stays), orphans=(gone,))
        assert supplies_of(facts(), inventory, DEFAULT, [], {})[DEFAULT.gpu_mem] == Supply({0: 5}, {0: free})


def test_slots_on_demand_count_nowhere_and_are_given_anywhere() -> None:
    slots = replace(mig_gpu(0), numa=1, on_demand=True)
    inventory = Inventory((slots, gpu(1, numa=0, mib=4096)))
    assert DEFAULT.mig("1g.10gb") not in supplies_of(facts(), inventory, DEFAULT, [], {})
    assert slots.uuid in gpus_of(facts(), inventory, 0b01)
