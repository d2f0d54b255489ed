"""Pods' preferences for their node weigh as much as kube-scheduler's own plugins weigh them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import LabelRequirement, Term
from vgpu.scheduling.nodes.labels import MOST_KEYS, Labels
from vgpu.scheduling.placement import Placement, fitting, place, rate
from vgpu.scheduling.preferences import Preferences, Spread, liking

GPU_MIB = 100
LabelsOf = dict[str, dict[str, str]]


def fleet_of(labels: LabelsOf, free: Mapping[str, Sequence[int]] | None = None) -> Fleet:
    fleet = Fleet()
    for name, each in labels.items():
        gpus = tuple(Gpu(f"{name}-{row}", row, "t4", mib) for row, mib in enumerate((free or {}).get(name, [GPU_MIB])))
        fleet.set_node(name, Inventory(gpus))
        fleet.labels.set(name, each)
    return fleet


def liked(preferences: Preferences, labels: LabelsOf) -> dict[str, int]:
    fleet = fleet_of(labels)
    names = sorted(labels)
    return dict(
        zip(names, liking(preferences, fleet, np.array([fleet.column[name] for name in names])).tolist(), strict=True)
    )


# --- the obvious slow version, node by node ---


def matches(condition: LabelRequirement, name: str, labels: Mapping[str, str]) -> bool:
    value = name if condition.by_name else labels.get(condition.key)
    match condition.operator:
        case "In":
            return value in condition.values
        case "NotIn":
            return value not in condition.values
        case "Exists":
            return value is not None and not condition.by_name
        case "DoesNotExist":
            return value is None and not condition.by_name
        case "Gt" | "Lt":
            if value is None or not value.isdigit() or len(condition.values) != 1 or not condition.values[0].isdigit():
                return False
            return (
                int(value) > int(condition.values[0])
                if condition.operator == "Gt"
                else int(value) < int(condition.values[0])
            )
        case _:
            return False


def term_matches(term: Term, name: str, labels: Mapping[str, str]) -> bool:
    return bool(term.conditions) and all(matches(one, name, labels) for one in term.conditions)


def slow_affinity(preferences: Preferences, labels: LabelsOf) -> dict[str, int]:
    sums = {
        name: sum(term.weight for term in preferences.preferred if term_matches(term, name, of))
        for name, of in labels.items()
    }
    most = max(sums.values())
    return {name: 100 * weight // most if most else 0 for name, weight in sums.items()}


def slow_spreading(preferences: Preferences, labels: LabelsOf, all_labels: LabelsOf) -> dict[str, int]:
    keys = [spread.key for spread in preferences.spreads]
    crowd = dict.fromkeys(labels, 0.0)
    inside = [name for name, of in labels.items() if all(key in of for key in keys)]
    for spread in preferences.spreads:
        size = len({labels[name][spread.key] for name in inside})
        for name in inside:
            pods = sum(
                number
                for node, number in spread.matching_pods.items()
                if node in all_labels
                and all(key in all_labels[node] for key in keys)
                and all_labels[node][spread.key] == labels[name][spread.key]
                and (
                    not spread.honors_affinity
                    or all(
                        any(term_matches(t, node, all_labels[node]) for t in group) for group in preferences.required
                    )
                )
            )
            crowd[name] += pods * math.log(size + 2) + (spread.max_skew - 1)
    rounded = {name: math.floor(crowd[name] + 0.5) for name in inside}
    if not inside:
        return dict.fromkeys(labels, 0)
    least, most = min(rounded.values()), max(rounded.values())
    return {
        name: 0 if name not in inside else 100 * (most + least - rounded[name]) // most if most else 100
        for name in labels
    }


def slow(preferences: Preferences, labels: LabelsOf, all_labels: LabelsOf) -> dict[str, int]:
    near = slow_affinity(preferences, labels) if preferences.preferred else dict.fromkeys(labels, 0)
    apart = slow_spreading(preferences, labels, all_labels) if preferences.spreads else dict.fromkeys(labels, 0)
    return {name: near[name] + apart[name] for name in labels}


NAMES = ("n0", "n1", "n2", "n3", "n4")
VALUES = st.sampled_from(["a", "b", "7", "12", "1_0"])
LABELS = st.dictionaries(st.sampled_from(["zone", "rack", "size"]), VALUES, max_size=3)
CONDITIONS = st.one_of(
    st.builds(
        LabelRequirement,
        st.sampled_from(["zone", "rack", "size", "none"]),
        st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Later"]),
        st.lists(VALUES, max_size=2).map(tuple),
    ),
    st.builds(
        LabelRequirement,
        st.just("metadata.name"),
        st.sampled_from(["In", "NotIn", "Exists"]),
        st.lists(st.sampled_from([*NAMES, "gone"]), min_size=1, max_size=2).map(tuple),
        st.just(True),
    ),
)
TERMS = st.builds(Term, st.lists(CONDITIONS, max_size=2).map(tuple), st.integers(1, 100))
SPREADS = st.builds(
    Spread,
    st.sampled_from(["zone", "rack", "size"]),
    st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.integers(1, 5)),
    st.integers(1, 5),
    st.booleans(),
)
PREFERENCES = st.builds(
    Preferences,
    st.lists(TERMS, max_size=3).map(tuple),
    st.lists(SPREADS, max_size=2, unique_by=lambda spread: spread.key).map(tuple),
    st.lists(st.lists(TERMS, max_size=2).map(tuple), max_size=2).map(tuple),
)


@pytest.mark.parametrize(
    ("operator", "values", "liked_size"),
    [
        ("Gt", ("7",), 100),
        ("Lt", ("7",), 0),
        ("Gt", ("7", "a"), 0),
        ("Gt", (), 0),
        ("Gt", ("-1",), 100),
        ("Gt", ("1_0",), 0),
    ],
)
def test_more_and_less_are_of_one_whole_number(operator: str, values: tuple[str, ...], liked_size: int) -> None:
    preference = Preferences((Term((LabelRequirement("size", operator, values),), 1),))
    assert liked(preference, {"a": {"size": "12"}, "b": {"size": "1_0"}, "c": {}}) == {"a": liked_size, "b": 0, "c": 0}


@settings(max_examples=examples(150), deadline=None)
@given(PREFERENCES, st.fixed_dictionaries(dict.fromkeys(NAMES, LABELS)), st.sets(st.sampled_from(NAMES), min_size=1))
def test_nodes_are_liked_as_the_schedulers_own_plugins_would_one_by_one(
    preferences: Preferences, labels: LabelsOf, requested: set[str]
) -> None:
    fleet, names = fleet_of(labels), sorted(requested)
    found = liking(preferences, fleet, np.array([fleet.column[name] for name in names]))
    assert dict(zip(names, found.tolist(), strict=True)) == slow(
        preferences, {name: labels[name] for name in names}, labels
    )


@settings(max_examples=examples(100), deadline=None)
@given(
    PREFERENCES,
    st.fixed_dictionaries(
        dict.fromkeys(NAMES, st.tuples(LABELS, st.lists(st.integers(1, GPU_MIB), min_size=1, max_size=3)))
    ),
    st.integers(1, GPU_MIB),
    st.sampled_from(["binpack", "spread", "fragmentation", "scheduler"]),
)
@example(
    Preferences(), {name: ({}, [2]) for name in NAMES[:4]} | {"n4": ({}, [2, 3])}, 1, "binpack"
)  # GPU sizes that differ: preferences that change nothing moved the pod
@example(
    Preferences((Term((LabelRequirement("zone", "In", ("a",)),), 1),)),
    {name: ({}, [2]) for name in NAMES[:4]} | {"n4": ({}, [2, 3])},
    1,
    "binpack",
)
def test_of_the_nodes_that_are_as_good_for_the_gpu_the_one_that_the_pod_likes_best(
    preferences: Preferences, nodes: dict[str, tuple[dict[str, str], list[int]]], mib: int, policy: str
) -> None:
    labels = {name: of for name, (of, _) in nodes.items()}
    fleet = fleet_of(labels, {name: free for name, (_, free) in nodes.items()})
    request = PodRequest((GpuRequest("a", "share", 1, mib=mib, units=mib),), policy=policy)
    fit = fitting(fleet, request, NAMES)
    without, found = place(fleet, request, NAMES), place(fleet, request, NAMES, None, preferences)
    assert isinstance(found, Placement) == isinstance(without, Placement) == bool(fit)
    if not isinstance(found, Placement) or not isinstance(without, Placement):
        return
    if not preferences:
        assert found == without
    largest = max(gpu.mib for name in fit for gpu in fleet.inventory[name].gpus)
    grade = {name: grade_of(fleet, request, name, largest) for name in fit}
    best = [name for name in fit if grade[name] == min(grade.values())]
    likes = slow(preferences, {name: labels[name] for name in best}, labels)
    favourites = [name for name in best if likes[name] == max(likes.values())]
    assert found == place(fleet, request, favourites), "and among these as it would be without preferences"
    assert (without.node in favourites) <= (found.node == without.node)


def grade_of(fleet: Fleet, request: PodRequest, name: str, largest: int) -> float:
    """Of one node, as the policies document it; `largest` is the largest GPU of the nodes that fit, in MiB."""
    free = sorted(fleet.free_mib[: len(fleet.inventory[name].gpus), fleet.column[name]].tolist())
    left = [mib - request.containers[0].mib for mib in free if mib >= request.containers[0].mib]
    match request.policy:
        case "binpack":
            return 4 * left[0] // largest
        case "spread":
            return 4 * -left[-1] // largest
        case "scheduler":
            return 10 - rate(fleet, request, [name])[name]
        case _:
            return 0  # no pod was seen that could leave capacity unused


def near(key: str, *values: str, weight: int = 1) -> Term:
    return Term((LabelRequirement(key, "In", values),), weight)


def test_a_preferred_zone_is_taken_where_its_gpus_are_as_good() -> None:
    labels = {"a": {"zone": "east"}, "b": {"zone": "west"}}
    request = PodRequest((GpuRequest("a", "share", 1, mib=10, units=10),))
    preferences = Preferences((near("zone", "west"),))
    equal = place(fleet_of(labels), request, labels, None, preferences)
    assert isinstance(equal, Placement)
    assert equal.node == "b"
    tighter = place(fleet_of(labels, {"a": [100, 20], "b": [100]}), request, labels, None, preferences)
    assert isinstance(tighter, Placement)
    assert tighter.node == "a", "a GPU that is in use is not left for an idle one"


def test_the_weights_of_what_is_preferred_add_up() -> None:
    labels = {"a": {"zone": "east", "disk": "ssd"}, "b": {"zone": "west"}, "c": {}}
    preferences = Preferences(
        (near("zone", "east", weight=10), near("disk", "ssd", weight=30), near("zone", "west", weight=20))
    )
    assert liked(preferences, labels) == {"a": 100, "b": 50, "c": 0}


def test_pods_spread_over_zones_and_a_node_outside_of_any_is_last() -> None:
    labels = {"a": {"zone": "east"}, "b": {"zone": "east"}, "c": {"zone": "west"}, "d": {}}
    found = liked(Preferences(spreads=(Spread("zone", {"a": 2, "c": 1}),)), labels)
    assert found["c"] > found["a"] == found["b"] > found["d"] == 0


@pytest.mark.parametrize(("honors", "same"), [(True, True), (False, False)])
def test_pods_on_nodes_that_the_pod_may_not_go_to_count_only_where_its_affinity_is_not_honoured(
    honors: bool, same: bool
) -> None:
    labels = {"a": {"zone": "east", "disk": "ssd"}, "b": {"zone": "west", "disk": "ssd"}, "x": {"zone": "west"}}
    spread = Spread("zone", {"x": 5}, honors_affinity=honors)
    preferences = Preferences(spreads=(spread,), required=((near("disk", "ssd"),),))
    found = liked(preferences, labels)
    assert (found["a"] == found["b"]) == same


def test_labels_follow_a_node_that_changes_leaves_and_comes_back() -> None:
    fleet = fleet_of({"a": {"zone": "east"}, "b": {"zone": "west"}})

    def values() -> dict[str, str]:
        key = fleet.labels.key("zone")
        names = {number: value for value, number in key.numbers.items()}
        return {node: names.get(int(key.codes[at]), "") for node, at in fleet.column.items()}

    assert values() == {"a": "east", "b": "west"}
    fleet.labels.set("a", {"zone": "north"})
    inventory = fleet.inventory["b"]
    fleet.remove_node("b")
    assert (fleet.labels.key("zone").codes >= 0).sum() == 1
    for number in range(200):
        fleet.set_node(f"n{number}", replace(inventory, gpus=()))
    fleet.set_node("b", inventory)
    assert {node: value for node, value in values().items() if value} == {"a": "north", "b": "west"}
    fleet.labels.set("b", None)
    assert values()["b"] == ""


def test_keys_that_no_pod_names_any_more_are_forgotten() -> None:
    labels = Labels({"a": 0})
    labels.grew(4)
    labels.set("a", {"zone": "east"})
    for number in range(MOST_KEYS + 5):
        labels.key(f"odd-{number}")
    assert len(labels._keys) == MOST_KEYS
    for number in range(100):
        labels.set("a", {"odd-20": str(number)})
    assert len(labels.key("odd-20").numbers) <= 10, "values that came and went do not pile up"
    assert labels.key("zone").codes[0] == -1


def test_keys_that_are_requested_about_again_and_again_are_made_once() -> None:
    labels = Labels({"a": 0})
    labels.grew(4)
    wanted = [f"wanted-{number}" for number in range(MOST_KEYS // 2)]
    first = {name: labels.key(name) for name in wanted}
    for number in range(4 * MOST_KEYS):
        labels.key(f"odd-{number}")
        name = wanted[number % len(wanted)]
        assert labels.key(name) is first[name]
