"""From a pod's spec to its preferred constraints: the pods that they count, and what filter then answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from extender.compact import small_node
from extender.filter import filter_nodes, prioritize_nodes, spare_nodes
from extender.preferences import MOST_KEYS, preferences_of
from extender.protocol import FilterArgs, FilterResult
from extender.spread_index import SpreadIndex
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Node, Pod
from tests.builders import PodBuilder, gpu, node, pod, share
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import NO_SINGLE_GPU

ZONE = "topology.kubernetes.io/zone"
FULL_MIB = 81_920


def spreading(built: PodBuilder, **constraint: Any) -> Pod:
    """A pod that prefers not to be with others of its app."""
    given = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway"}
    given |= {"labelSelector": {"matchLabels": {"app": "a"}}} | constraint
    return with_spec(built, topologySpreadConstraints=[given])


def preferring(built: PodBuilder, zone: str) -> Pod:
    term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}
    preferred = [{"weight": 10, "preference": term}]
    return with_spec(built, affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}})


def with_spec(built: PodBuilder, **spec: Any) -> Pod:
    plain = built.plain()
    return msgspec.convert(plain | {"spec": plain["spec"] | spec}, Pod)


@dataclass
class ZonedState:
    """Three nodes with two GPUs each: n1 and n2 in the east, n3 in the west."""

    state: State = field(default_factory=lambda: State(lambda: 0.0, names=DEFAULT))

    def __post_init__(self) -> None:
        for name, zone in (("n1", "east"), ("n2", "east"), ("n3", "west")):
            plain = node(name).with_gpus(2).plain()
            plain["metadata"]["labels"] = {ZONE: zone}
            WatchIntake(self.state).node_changed(None, small_node(DEFAULT)(msgspec.convert(plain, Node)))

    def filter(self, asking: Pod, *names: str) -> FilterResult:
        return filter_nodes(self.state, FilterArgs(asking, names or ("n1", "n2", "n3")))

    def runs(self, built: PodBuilder, on: str) -> None:
        WatchIntake(self.state).pod_changed(None, built.on(on).assigned(share(gpu(0, node=on), 1024)).build())

    def counted(self, asking: Pod) -> dict[str, int]:
        (spread,) = preferences_of(asking, self.state.spread_index).spreads
        return dict(spread.matching_pods)


@pytest.fixture
def cluster() -> ZonedState:
    return ZonedState()


def of_app(name: str, app: str = "a", namespace: str = "default") -> PodBuilder:
    return pod(name, namespace).asking(mib=1024).labelled(app=app)


def test_a_preferred_zone_wins_among_equal_gpus(cluster: ZonedState) -> None:
    assert cluster.filter(of_app("x").build()).node_names == ["n1"]
    assert cluster.filter(preferring(of_app("x"), "west")).node_names == ["n3"]


def test_replicas_go_to_different_zones_while_gpus_are_as_good(cluster: ZonedState) -> None:
    found = []
    for number in range(4):
        asking = with_spec(
            of_app(str(number)),
            containers=[{"name": "main", "resources": {"limits": {DEFAULT.gpu: "1"}, "requests": {DEFAULT.gpu: "1"}}}],
            topologySpreadConstraints=[
                {
                    "maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"app": "a"}},
                }
            ],
        )  # fmt: skip
        WatchIntake(cluster.state).pod_changed(None, asking)
        found += cluster.filter(asking).node_names
    assert found == ["n1", "n3", "n1", "n3"]


def test_pods_of_the_selector_count_with_a_reservation_too(cluster: ZonedState) -> None:
    cluster.runs(of_app("here"), "n1")
    cluster.runs(of_app("other", app="b"), "n1")
    cluster.runs(of_app("elsewhere", namespace="team-b"), "n1")
    cluster.runs(of_app("going").terminating(), "n1")
    reserved = of_app("reserved").build()
    WatchIntake(cluster.state).pod_changed(None, reserved)
    cluster.filter(reserved, "n3")
    asking = spreading(of_app("x"))
    WatchIntake(cluster.state).pod_changed(None, asking)
    cluster.filter(asking, "n2")
    assert cluster.counted(asking) == {"n1": 1, "n3": 1}, (
        "neither itself, nor pods of another app, nor terminating ones"
    )
    WatchIntake(cluster.state).pod_changed(of_app("here").build(), None)
    assert cluster.counted(asking) == {"n3": 1}


def test_a_pod_whose_labels_change_counts_by_its_new_ones(cluster: ZonedState) -> None:
    cluster.runs(of_app("here"), "n1")
    cluster.runs(of_app("here", app="b"), "n1")
    assert cluster.counted(spreading(of_app("x"))) == {}
    assert len(cluster.state.spread_index) == 1


@pytest.mark.parametrize(
    ("constraint", "counted"),
    [
        ({"labelSelector": None}, {}),
        ({"labelSelector": {}}, {"n1": 1, "n3": 1}),
        ({"matchLabelKeys": ["version"]}, {"n3": 1}),
        ({"matchLabelKeys": ["absent"]}, {"n1": 1, "n3": 1}),
        (
            {"labelSelector": {"matchExpressions": [{"key": "version", "operator": "NotIn", "values": ["2"]}]}},
            {"n1": 1},
        ),
    ],
)
def test_selectors_count_as_the_scheduler_does(
    cluster: ZonedState, constraint: dict[str, Any], counted: dict[str, int]
) -> None:
    cluster.runs(of_app("old").labelled(app="a", version="1"), "n1")
    cluster.runs(of_app("new").labelled(app="a", version="2"), "n3")
    assert cluster.counted(spreading(of_app("x").labelled(app="a", version="2"), **constraint)) == counted


def test_what_must_be_is_left_to_the_scheduler(cluster: ZonedState) -> None:
    hard = spreading(of_app("x"), whenUnsatisfiable="DoNotSchedule")
    assert not preferences_of(hard, cluster.state.spread_index)


def test_with_policy_scheduler_every_node_that_fits_is_answered_and_nothing_is_reserved(cluster: ZonedState) -> None:
    asking = of_app("x").annotated(placement="scheduler").build()
    assert cluster.filter(asking) == FilterResult(["n1", "n2", "n3"])
    assert len(cluster.state.reservations) == len(cluster.state.allocations) == 0


def test_with_policy_scheduler_filter_reserves_where_only_one_node_is_left(cluster: ZonedState) -> None:
    asking = of_app("x").annotated(placement="scheduler").build()
    assert cluster.filter(asking, "n2") == FilterResult(["n2"])
    assert [one.node for one in cluster.state.reservations] == ["n2"]
    assert cluster.filter(asking).node_names == ["n1", "n2", "n3"], "at the next call, it is released"
    assert len(cluster.state.allocations) == 0


def test_with_policy_scheduler_a_pod_that_fits_nowhere_is_reported_why(cluster: ZonedState) -> None:
    for number in range(2):
        for name in ("n1", "n2", "n3"):
            whole = share(gpu(number, node=name), 81_920)
            WatchIntake(cluster.state).pod_changed(
                None, pod(f"{name}-{number}").asking(mib=81_920).on(name).assigned(whole).build()
            )
    asking = of_app("x").annotated(placement="scheduler").build()
    assert cluster.filter(asking) == FilterResult([], {NO_SINGLE_GPU: ["n1", "n2", "n3"]})


def test_fuller_gpus_are_rated_higher_and_nodes_that_do_not_fit_not_at_all(cluster: ZonedState) -> None:
    WatchIntake(cluster.state).pod_changed(
        None, pod("y").asking(mib=61_440).on("n2").assigned(share(gpu(0, node="n2"), 61_440)).build()
    )
    asking = pod("x").asking(mib=10_240).annotated(placement="scheduler").build()
    rated = prioritize_nodes(cluster.state, FilterArgs(asking, ("n1", "n2", "n3", "unknown")))
    assert rated == {"n1": 1, "n2": 7, "n3": 1}
    large = pod("x").asking(mib=81_920, container="a").asking(mib=81_920, container="b").build()
    assert prioritize_nodes(cluster.state, FilterArgs(large, ("n1", "n2", "n3"))) == {"n1": 10, "n3": 10}
    assert prioritize_nodes(cluster.state, FilterArgs(pod("plain").build(), ("n1",))) == {}


def test_a_pod_without_a_gpu_is_reported_where_fewest_are_left_and_one_with_a_share_nothing(
    cluster: ZonedState,
) -> None:
    full = share(gpu(0, node="n2"), FULL_MIB)
    WatchIntake(cluster.state).pod_changed(None, pod("y").asking(mib=FULL_MIB).on("n2").assigned(full).build())
    names = ("n1", "n2", "unknown")
    assert spare_nodes(cluster.state, FilterArgs(pod("x").build(), names)) == {"n1": 8, "n2": 9, "unknown": 10}
    assert spare_nodes(cluster.state, FilterArgs(pod("x").asking(mib=1024).build(), names)) == {}


@pytest.mark.parametrize(
    ("busy", "asking_mib", "looks"),
    [(0, 10_240, 1), (1, 10_240, 0), (2, FULL_MIB, 0)],
    ids=["several are as good", "one is best", "none fits"],
)
def test_others_are_counted_only_where_that_matters(
    cluster: ZonedState, monkeypatch: pytest.MonkeyPatch, busy: int, asking_mib: int, looks: int
) -> None:
    """One GPU that is in use is better than any that is free."""
    taken = {0: [], 1: [("n3", 0)], 2: [(name, row) for name in ("n1", "n2", "n3") for row in range(2)]}
    for name, row in taken[busy]:
        built = pod(f"{name}-{row}").asking(mib=61_440).on(name)
        WatchIntake(cluster.state).pod_changed(None, built.assigned(share(gpu(row, node=name), 61_440)).build())
    counted: list[object] = []
    count = SpreadIndex.count
    monkeypatch.setattr(SpreadIndex, "count", lambda *of: counted.append(of) or count(*of))
    found = cluster.filter(spreading(pod("x").asking(mib=asking_mib)))
    assert bool(found.node_names) is (busy < 2)
    assert len(counted) == looks


def test_a_pod_may_request_about_so_many_labels_and_what_is_beyond_is_not_read(cluster: ZonedState) -> None:
    def asking(keys: int) -> Pod:
        terms = [
            {"weight": 1, "preference": {"matchExpressions": [{"key": f"odd-{at}", "operator": "Exists"}]}}
            for at in range(keys)
        ]
        west = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["west"]}]}
        preferred = [*terms, {"weight": 100, "preference": west}]
        return with_spec(
            of_app("x"),
            affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
        )

    assert cluster.filter(asking(MOST_KEYS - 1)).node_names == ["n3"]
    assert cluster.filter(asking(MOST_KEYS)).node_names == ["n1"]
    assert len(cluster.state.fleet.labels._keys) == MOST_KEYS + 1


def test_a_condition_that_names_too_many_labels_counts_no_pod_out(cluster: ZonedState) -> None:
    required = {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": f"odd-{at}", "operator": "Exists"} for at in range(MOST_KEYS)]},
        {"matchExpressions": [{"key": ZONE, "operator": "Exists"}]},
    ]}  # fmt: skip
    spread = {
        "maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {},
    }  # fmt: skip
    asking = with_spec(
        of_app("x"),
        topologySpreadConstraints=[spread],
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
    )
    assert preferences_of(asking, cluster.state.spread_index).required == ()
    few = {"nodeSelectorTerms": required["nodeSelectorTerms"][1:]}
    fewer = with_spec(
        of_app("x"),
        topologySpreadConstraints=[spread],
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": few}},
    )
    assert len(preferences_of(fewer, cluster.state.spread_index).required) == 1
