"""From pods' and nodes' specs to what policies read of them: judged as `kube.needs` judges, bounded, and in the snapshot by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.compact import small_node, small_pod_of
from extender.node_constraints import MOST_CONDITIONS, MOST_TOLERATIONS, MOST_VALUES, constraints_of
from extender.snapshot import snapshot_of
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.needs import WholePod, needs_of, suits
from kube.objects import Node, NodeSpec, Pod
from tests.builders import PodBuilder, node, pod
from tests.examples import examples
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import ANYWHERE, NodeConstraints
from vgpu.scheduling.placement import Placement, place
from vgpu.scheduling.snapshot import fleet_of, snapshot_from_json, snapshot_to_json

Spec = dict[str, Any]
KEYS, VALUES = st.sampled_from(("zone", "disk")), st.sampled_from(("a", "b", "3"))
labels = st.dictionaries(KEYS, VALUES)
expressions = st.fixed_dictionaries({
    "key": KEYS, "operator": st.sampled_from(("In", "NotIn", "Exists", "DoesNotExist")), "values": st.lists(VALUES, min_size=1, max_size=2),
})  # fmt: skip
terms = st.lists(st.fixed_dictionaries({"matchExpressions": st.lists(expressions, max_size=2)}), min_size=1, max_size=2)
required = terms.map(
    lambda some: {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": some}}}
)
effects = st.sampled_from(("NoSchedule", "NoExecute", "PreferNoSchedule"))
taints = st.fixed_dictionaries({"key": st.sampled_from(("team", "gpu")), "value": VALUES, "effect": effects})
tolerations = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from(("team", "gpu")), "operator": st.sampled_from(("Exists", "Equal", "Gt")), "value": VALUES, "effect": effects,
    },
)  # fmt: skip
specs = st.fixed_dictionaries(
    {}, optional={"nodeSelector": labels, "affinity": required, "tolerations": st.lists(tolerations, max_size=3)}
)


@settings(max_examples=examples(300), deadline=None)
@given(specs, st.lists(st.tuples(labels, st.lists(taints, max_size=2)), min_size=1, max_size=4))
def test_a_node_meets_them_where_the_scheduler_would_let_the_pod_go(
    spec: Spec, nodes: list[tuple[dict[str, str], list[Spec]]]
) -> None:
    fleet, read = Fleet(), msgspec.convert({"spec": spec}, WholePod).spec
    needs = needs_of(read, DEFAULT.ours)
    assert needs is not None
    expected = []
    for at, (of_node, tainted) in enumerate(nodes):
        has = msgspec.convert({"taints": tainted}, NodeSpec)
        fleet.set_node(f"n{at}", Inventory(()))
        fleet.set_labels(f"n{at}", of_node, has.taints)
        expected.append(suits(needs, of_node, has.taints, unschedulable=False))
    columns = np.array([fleet.column[f"n{at}"] for at in range(len(nodes))])
    assert fleet.pools.meets([constraints_of(read)], columns)[0].tolist() == expected


def of(**spec: Any) -> NodeConstraints:
    return constraints_of(msgspec.convert({"spec": spec}, Pod).spec)


def test_tolerations_that_every_pod_has_are_left_out() -> None:
    usual = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        for what in ("not-ready", "unreachable")
    ]
    assert of(tolerations=usual) == of() == NodeConstraints()
    assert of(tolerations=[{"key": "a", "effect": "PreferNoSchedule"}]) == of()


def test_pods_of_one_template_have_one_object() -> None:
    spec = {"nodeSelector": {"zone": "a"}, "tolerations": [{"operator": "Exists"}]}
    assert of(**spec) is of(**spec)


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (
            {"nodeSelector": {f"k{at}": "" for at in range(MOST_CONDITIONS)}},
            {"nodeSelector": {f"k{at}": "" for at in range(MOST_CONDITIONS + 1)}},
        ),
        (
            {"tolerations": [{"key": f"k{at}"} for at in range(MOST_TOLERATIONS)]},
            {"tolerations": [{"key": f"k{at}"} for at in range(MOST_TOLERATIONS + 1)]},
        ),
    ],
)
def test_a_pod_beyond_the_bounds_counts_as_one_that_can_use_every_node(within: Spec, beyond: Spec) -> None:
    assert of(**within) != ANYWHERE
    assert of(**beyond) == ANYWHERE


def test_so_does_a_pod_that_names_too_many_values() -> None:
    def naming(values: int) -> NodeConstraints:
        one = {"key": "zone", "operator": "In", "values": [str(at) for at in range(values)]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [one]}]}
        return of(affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}})

    assert naming(MOST_VALUES) != ANYWHERE
    assert naming(MOST_VALUES + 1) == ANYWHERE


def small(built: PodBuilder, **spec: Any) -> Pod:
    plain = built.plain()
    return small_pod_of(DEFAULT)(msgspec.convert(plain | {"spec": plain["spec"] | spec}, Pod))


def cluster() -> State:
    """a has a label and d a taint; pods request the label and do not tolerate the taint. b and c are as every other node."""
    state = State(lambda: 0.0, names=DEFAULT)
    for name in "abcd":
        plain = node(name).with_gpus(1).plain()
        plain["metadata"]["labels"] = {"network": "infiniband"} if name == "a" else {}
        plain["spec"] = {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]} if name == "d" else {}
        WatchIntake(state).node_changed(None, small_node(DEFAULT)(msgspec.convert(plain, Node)))
    for at in range(64):
        wants = {"nodeSelector": {"network": "infiniband"}} if at % 4 == 0 else {}
        WatchIntake(state).pod_changed(None, small(pod(f"p{at}").asking(mib=40_960), **wants))
    return state


def chosen(state: State, fleet: Fleet, *names: str) -> str:
    found = place(
        fleet, state.request_of(pod("x").asking(mib=40_960).annotated(placement="fragmentation").build()), names
    )
    assert isinstance(found, Placement)
    return found.node


def test_what_pods_require_is_learnt_from_the_watch() -> None:
    state = cluster()
    assert chosen(state, state.fleet, "a", "b", "c") == "b", "a is left for pods that fit nowhere else"
    assert chosen(state, state.fleet, "a", "b", "c", "d") == "d", "no other pod can use it"


def test_a_node_that_changes_is_judged_anew() -> None:
    state = cluster()
    assert chosen(state, state.fleet, "a", "b") == "b"
    for name, network in (("a", "ethernet"), ("b", "infiniband")):
        plain = node(name).with_gpus(1).plain()
        plain["metadata"]["labels"] = {"network": network}
        old = small_node(DEFAULT)(node(name).with_gpus(1).build())
        WatchIntake(state).node_changed(old, small_node(DEFAULT)(msgspec.convert(plain, Node)))
    assert chosen(state, state.fleet, "a", "b") == "a"
    WatchIntake(state).node_changed(node("b").build(), None)
    assert chosen(state, state.fleet, "a", "c") == "a", "equal, so the smaller name"


def test_a_snapshot_decides_alike_and_names_no_label() -> None:
    state = cluster()
    document = snapshot_to_json(snapshot_of(state).whole())
    assert b"infiniband" not in document
    read = snapshot_from_json(document)
    assert read == snapshot_of(state).whole()
    replayed = fleet_of(read)
    for names in ("ab", "abc", "abcd", "ad"):
        assert chosen(state, replayed, *names) == chosen(state, state.fleet, *names)
    forgetful = fleet_of(replace(read, nodes=tuple(replace(one, meets=()) for one in read.nodes)))
    assert chosen(state, forgetful, "a", "b") == "a", "else this test shows nothing"


def test_a_snapshot_is_of_an_old_version_where_every_node_will_do() -> None:
    state = State(lambda: 0.0, names=DEFAULT)
    WatchIntake(state).node_changed(None, node("a").with_gpus(1).build())
    WatchIntake(state).pod_changed(None, small(pod("p").asking(mib=1024)))
    assert msgspec.json.decode(snapshot_to_json(snapshot_of(state).whole()))["v"] == 2
    WatchIntake(state).pod_changed(None, small(pod("q").asking(mig="1g.10gb")))
    assert msgspec.json.decode(snapshot_to_json(snapshot_of(state).whole()))["v"] == 4
