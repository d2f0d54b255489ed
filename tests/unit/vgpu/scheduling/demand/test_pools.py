"""How scarce GPUs are by pool, against a check of each node for the requests that can use it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.scheduling.demand.slow_pools import SlowPools, Step, inventory, later, report, reported
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling import scarcity
from vgpu.scheduling.demand import pools
from vgpu.scheduling.feasibility import FeasibilityTable
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import ANYWHERE, LabelRequirement, NodeConstraints, Taint, Term, Toleration


@settings(max_examples=examples(100), deadline=None)
@given(reported, later)
def test_each_gpu_is_as_scarce_as_a_check_of_each_node_finds(reported: list[Step], later: list[Step]) -> None:
    slow = SlowPools()
    for _ in report(slow, reported, later):
        assert set(slow.fleet.pools.constraints) == set(slow.fleet.distribution.constraints()) - {ANYWHERE}, (
            "nothing is left out"
        )


@settings(max_examples=examples(100), deadline=None)
@given(reported, later, st.tuples(*[st.integers(1, 3)] * 3))
def test_constraints_beyond_the_bounds_keep_requests_off_no_node(
    reported: list[Step], later: list[Step], most: tuple[int, int, int]
) -> None:
    slow = SlowPools()
    with pytest.MonkeyPatch.context() as patch:
        for what, number in zip(("MOST_CONSTRAINTS", "MOST_CLASSES", "MOST_KEYS"), most, strict=True):
            patch.setattr(pools, what, number)
        for _ in report(slow, reported, later):
            found = slow.fleet.pools
            assert len(found.constraints) <= most[0]
            assert len(np.unique(found.class_of)) <= most[1]
            assert len(frozenset().union(*(one.keys for one in found.constraints))) <= most[2]


def of_labels(fleet: Fleet, **nodes: dict[str, str]) -> None:
    for name, of_node in nodes.items():
        fleet.set_node(name, inventory(name, [("large", [])]))
        fleet.set_labels(name, of_node)


def on(**wanted: str) -> NodeConstraints:
    return NodeConstraints((tuple(Term((LabelRequirement(key, "In", (value,)),)) for key, value in wanted.items()),))


SHARE = PodRequest((GpuRequest("s", "share", 1, mib=10),))


def test_nodes_that_no_request_reports_apart_are_one_pool() -> None:
    fleet = Fleet()
    of_labels(fleet, a={"zone": "a", "disk": "a"}, b={"zone": "a"}, c={"zone": "b"}, d={})
    for its in (ANYWHERE, on(zone="a")):
        fleet.record(SHARE, its)
    scarcity.of_gpus(fleet)
    a, b, c, d = (int(fleet.pool[0, fleet.column[name]]) for name in "abcd")
    assert (a, c) == (b, d)
    assert a != c


def test_a_fleet_whose_requests_name_nothing_is_never_classified() -> None:
    fleet = Fleet()
    of_labels(fleet, a={"zone": "a"}, b={"zone": "b"})
    fleet.record(SHARE)
    scarcity.of_gpus(fleet)
    fleet.set_labels("a", {"zone": "c"})
    fleet.set_node("c", inventory("c", [("small", [])]))
    assert not fleet.pools._changed
    assert scarcity.of_gpus(fleet)[0][:-1].tolist() == pytest.approx([1 / 80] * 2, rel=1e-3), "each MiB is as good"


def test_a_node_whose_labels_or_taints_alone_change_is_judged_anew() -> None:
    fleet = Fleet()
    of_labels(fleet, **{name: {"zone": "a"} for name in "abcdefgh"})
    fleet.record(SHARE, on(zone="a"))
    scarcity.of_gpus(fleet)
    a, b = fleet.column["a"], fleet.column["b"]
    fleet.set_labels("a", {"zone": "a"}, [Taint("team")])
    scarcity.of_gpus(fleet)
    assert fleet.pool[0, a] != fleet.pool[0, b]
    fleet.set_labels("a", {"zone": "a"})
    fleet.set_labels("b", {"zone": "b"})
    scarcity.of_gpus(fleet)
    assert fleet.pool[0, a] != fleet.pool[0, b]
    fleet.set_labels("b", {"zone": "a"})
    scarcity.of_gpus(fleet)
    assert fleet.pool[0, a] == fleet.pool[0, b]


def test_taints_of_a_nodes_condition_make_no_pool() -> None:
    fleet = Fleet()
    of_labels(fleet, a={}, b={})
    fleet.set_labels(
        "a", {}, [Taint("node.kubernetes.io/not-ready", "", "NoExecute"), Taint("team", "", "PreferNoSchedule")]
    )
    fleet.record(SHARE, NodeConstraints())
    scarcity.of_gpus(fleet)
    assert fleet.pool[0, fleet.column["a"]] == fleet.pool[0, fleet.column["b"]]


def test_nodes_with_a_set_of_taints_beyond_the_bound_count_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_TAINTS", 3)
    fleet = Fleet()
    of_labels(fleet, a={}, b={}, c={}, d={})
    for name in "abc":
        fleet.set_labels(name, {}, [Taint("team", name)])
    fleet.record(SHARE, NodeConstraints())
    fleet.record(SHARE, NodeConstraints(tolerations=(Toleration("team", "Equal", "a"),)))
    scarcity.of_gpus(fleet)
    a, b, c, d = (int(fleet.pool[0, fleet.column[name]]) for name in "abcd")
    assert len({a, b, d}) == 3
    assert c == d
    fleet.set_labels("a", {})
    fleet.set_labels("c", {}, [Taint("team", "c")])
    fleet.set_labels("c", {})
    fleet.set_labels("c", {}, [Taint("team", "c")])
    scarcity.of_gpus(fleet)
    a, b, c, d = (int(fleet.pool[0, fleet.column[name]]) for name in "abcd")
    assert a == d != b, "a has no taints any more"
    assert c == b, "and c's count: no pod tolerates them, nor b's"


def test_sets_of_taints_are_numbered_anew_only_when_one_is_of_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a walk over all nodes, and nodes that come one after the other with a set of their own each would make one each."""
    monkeypatch.setattr(pools, "MOST_TAINTS", 3)
    walks = []
    forget = pools.Pools._forget_sets
    monkeypatch.setattr(pools.Pools, "_forget_sets", lambda self: (walks.append(1), forget(self)))
    fleet = Fleet()
    of_labels(fleet, **{name: {} for name in "abcdef"})
    for name in "abcdef":
        fleet.set_labels(name, {}, [Taint("team", name)])
    assert not walks
    fleet.remove_node("a")
    fleet.set_labels("f", {}, [Taint("team", "f", "NoExecute")])
    assert len(walks) == 1
    fleet.set_labels("b", {}, [Taint("team", "f")])
    assert len(walks) == 2, "the set that b alone had is of no node"


def test_only_so_many_different_constraints_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpu.scheduling.demand.request_distribution.MOST_CONSTRAINTS", 2)
    fleet = Fleet()
    for value in ("a", "b", "c", "a"):
        fleet.record(SHARE, on(zone=value))
    assert Counter({one.constraints: times for one, times in fleet.distribution.seen.items()}) == {
        on(zone="a"): 2, on(zone="b"): 1, ANYWHERE: 1,
    }  # fmt: skip


def test_a_share_is_weighed_by_the_pools_of_the_gpus_that_it_takes() -> None:
    fleet = Fleet()
    fleet.set_node("a", inventory("a", [("small", []), ("large", []), ("large", [])]))
    fleet.set_node("b", inventory("b", [("small", []), ("small", []), ("small", [])]))
    large = PodRequest((GpuRequest("s", "share", 2, mib=80),))
    for request in (SHARE, large):
        fleet.record(request)
    for request in (SHARE, large):
        outcome = FeasibilityTable(fleet, request, fleet.look_up(["a", "b"])).outcome()
        before, after = outcome.gpus
        weights, _ = scarcity.of_gpus(fleet)
        expected = ((before.free_mib - after.free_mib) * weights[fleet.pool[:, : fleet.width]]).sum(axis=0)
        assert outcome.displace(outcome.gpus).gpus[0] == pytest.approx(expected[0])
        assert expected[0] > 0
