"""A nomination reservation counts once, is never more than there is, and yields to the pods that it must."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extender.filter import filter_nodes
from extender.nominate.nomination_reservations import NominationReservations
from extender.protocol import FilterArgs
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Pod
from tests.builders import PodBuilder, mig_gpu, node, pod
from tests.examples import examples
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import Placement, place
from vgpu.scheduling.reservations import STAGES

FULL_MIB = 81_920
NODES = ("n1", "n2")


def cluster() -> tuple[State, NominationReservations]:
    state = State(lambda: 0.0, names=DEFAULT)
    for name in NODES:
        WatchIntake(state).node_changed(None, node(name).with_gpus(2).build())
    return state, NominationReservations(state)


def plan(state: State, plans: NominationReservations, built: PodBuilder, priority: int = 0) -> Placement | None:
    request = state.request_of(built.build())
    found = place(state.fleet, request, NODES)
    if not isinstance(found, Placement):
        return None
    plans.put(built.build().uid, built.build().key, priority, request, found)
    return found


def free_mib(state: State) -> int:
    return int(state.fleet.free_mib.sum())


class NominationMachine(RuleBasedStateMachine):
    """Pods are planned, filtered and deleted; other pods request their capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.plans = cluster()
        self.planned = self.state.reservations.of("nomination")
        self.sizes: dict[str, int] = {}
        """UID of every pod with an allocation -> MiB."""
        self.gone: set[str] = set()

    @rule(number=st.integers(0, 9), gib=st.integers(1, 80), priority=st.integers(0, 2))
    def plans_ahead(self, number: int, gib: int, priority: int) -> None:
        built = pod(f"p{number}").asking(mib=gib * 1024)
        if built.build().uid not in self.sizes and plan(self.state, self.plans, built, priority):
            self.sizes[built.build().uid] = gib * 1024

    @rule(number=st.integers(0, 19), gib=st.integers(1, 80), priority=st.integers(0, 2))
    def is_filtered(self, number: int, gib: int, priority: int) -> None:
        built = pod(f"p{number}").asking(mib=self.sizes.get(f"uid-default-p{number}", gib * 1024))
        uid = built.build().uid
        self.plans.end(uid)
        found = filter_nodes(self.state, FilterArgs(built.build(), NODES))
        if not found.node_names:
            before = {uid for uid in self.sizes if uid in self.plans}
            with self.plans.aside(priority, NODES) as some:
                assert some is any(self.planned[one].priority <= priority for one in before)
                found = filter_nodes(self.state, FilterArgs(built.build(), NODES)) if some else found
            for given_up in {one for one in before if one not in self.plans}:
                assert found.node_names, "no reservation yields without effect"
                del self.sizes[given_up]
        self.sizes.pop(uid, None)
        if found.node_names:
            self.sizes[uid] = requested_mib(built)

    @rule(number=st.integers(0, 19))
    def is_deleted(self, number: int) -> None:
        uid = f"uid-default-p{number}"
        self.plans.end(uid)
        WatchIntake(self.state).pod_changed(pod(f"p{number}").build(), None)
        self.sizes.pop(uid, None)

    @invariant()
    def each_counts_once_and_never_more_than_there_is(self) -> None:
        assert self.state.fleet.overcommitted() == []
        assert free_mib(self.state) == 4 * FULL_MIB - sum(self.sizes.values())


def requested_mib(built: PodBuilder) -> int:
    (container,) = built.containers
    return int(container["resources"]["limits"][DEFAULT.gpu_mem]) * 1024


TestPlans = NominationMachine.TestCase
TestPlans.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("priority", "yields"), [(4, False), (5, True), (6, True)])
def test_a_plan_yields_to_pods_of_the_same_or_a_higher_priority(priority: int, yields: bool) -> None:
    state, plans = cluster()
    for at in range(4):
        assert plan(state, plans, pod(f"p{at}").asking(mib=FULL_MIB), 5)
    asking = FilterArgs(pod("late").asking(mib=FULL_MIB).build(), NODES)
    assert filter_nodes(state, asking).node_names == []
    with plans.aside(priority, NODES) as some:
        found = filter_nodes(state, asking)
    assert some is yields
    assert bool(found.node_names) is yields
    assert len(plans) == (3 if yields else 4), "those that still fit are made again"
    assert state.fleet.overcommitted() == []


def test_a_plan_ends_with_its_node() -> None:
    state, plans = cluster()
    found = plan(state, plans, pod("p").asking(mib=FULL_MIB), 5)
    assert found
    WatchIntake(state).node_changed(node(found.node).build(), None)
    with plans.aside(5, NODES):
        pass
    assert len(plans) == 0
    assert state.allocations.get("uid-default-p") is None


def test_an_instance_that_was_given_away_meanwhile_is_planned_no_more() -> None:
    state = State(lambda: 0.0, names=DEFAULT)
    plans = NominationReservations(state)
    WatchIntake(state).node_changed(None, node("n1").with_inventory(mig_gpu(0, "1g.10gb")).build())
    assert plan(state, plans, pod("p").asking(mig="1g.10gb"))
    with plans.aside(0, ["n1"]):
        assert filter_nodes(state, FilterArgs(pod("q").asking(mig="1g.10gb").build(), ["n1"])).node_names == ["n1"]
    assert len(plans) == 0
    assert state.fleet.overcommitted() == []


def test_reservations_lapse_when_their_time_is_up() -> None:
    state, plans = cluster()
    plan(state, plans, pod("p").asking(mib=1024))
    state.clock = lambda: STAGES["planned"].life_s - 0.1
    assert plans.lapsed() == []
    state.clock = lambda: STAGES["planned"].life_s
    assert plans.lapsed() == ["uid-default-p"]


def test_only_nominations_on_the_nodes_named_are_set_aside_and_only_those_whose_capacity_was_taken_end() -> None:
    state, plans = cluster()
    for at in range(4):
        assert plan(state, plans, pod(f"p{at}").asking(mib=FULL_MIB), at)
    asking = FilterArgs(pod("late").asking(mib=FULL_MIB).build(), ["n2"])
    with plans.aside(5, ["n2"]) as some:
        assert some
        assert [row.tolist() for row in state.fleet.free_mib[:2, [state.fleet.column[one] for one in NODES]].T] == [
            [0, 0], [FULL_MIB, FULL_MIB],
        ]  # fmt: skip
        assert filter_nodes(state, asking).node_names == ["n2"]
    left = sorted(one.node for one in state.reservations.of("nomination").values())
    assert left == ["n1", "n1", "n2"]
    assert state.fleet.overcommitted() == []


@pytest.mark.parametrize("order", [("low", "equal"), ("equal", "low")])
def test_of_plans_on_one_gpu_those_of_the_lowest_priority_are_given_up(order: tuple[str, ...]) -> None:
    state, plans = cluster()
    WatchIntake(state).node_changed(None, node("n3").with_gpus(1).build())
    half = FULL_MIB // 2
    for name in order:
        request = state.request_of(pod(name).asking(mib=half).build())
        found = place(state.fleet, request, ["n3"])
        assert isinstance(found, Placement)
        plans.put(name, name, {"low": 1, "equal": 5}[name], request, found)
    with plans.aside(5, ["n3"]):
        assert filter_nodes(state, FilterArgs(pod("late").asking(mib=half).build(), ["n3"])).node_names == ["n3"]
    assert set(state.reservations.of("nomination")) == {"equal"}


def test_processors_are_left_as_they_were() -> None:
    state, plans = cluster()
    built = pod("p").asking(mib=1024).plain()
    built["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "3"
    request = state.request_of(msgspec.convert(built, Pod))
    found = place(state.fleet, request, ["n1"])
    assert isinstance(found, Placement)
    state.resources.set_node("n1", {"cpu": 8000})
    plans.put("p", "p", 1, request, found)
    at = state.fleet.column["n1"]
    assert state.fleet.free_cpu_milli[at] == 5000
    with plans.aside(5, NODES):
        assert state.fleet.free_cpu_milli[at] == 8000
    assert state.fleet.free_cpu_milli[at] == 5000


def test_of_plans_of_the_same_priority_the_last_made_yield_and_no_more_than_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vgpu.scheduling.reservations.EQUALS", 2)
    state, plans = cluster()
    for name in ("p0", "p1", "p2", "p3"):
        assert plan(state, plans, pod(name).asking(mib=FULL_MIB), 5)
    with plans.aside(5, NODES):
        held = {uid for uid, _ in state.allocations}
        assert held == {"uid-default-p0", "uid-default-p1"}
    with plans.aside(6, NODES):
        assert len(state.allocations) == 0, "of lower priority all"
    assert len(plans) == len(state.allocations) == 4
