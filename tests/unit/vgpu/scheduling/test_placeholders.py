"""Which placeholders are made and removed, against the obvious slow version."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import gpu
from vgpu.api.inventory import GpuCondition, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling import placeholders
from vgpu.scheduling.placeholders import (
    Limits,
    PlaceholderPod,
    Plan,
    StrandedPod,
    amounts,
    decide,
    node_types,
    smallest,
)

UIDS = list("abcde")
TIMES = st.integers(0, 20).map(float)
PODS = st.dictionaries(
    st.sampled_from(UIDS),
    st.builds(
        StrandedPod,
        st.just(""),
        st.integers(-1, 2),
        TIMES,
        st.sampled_from([None, True, True, False]),
        st.sampled_from([False, False, True]),
        st.sampled_from(["", "small", "large"]),
    ),
).map(lambda pods: {uid: replace(pod, uid=uid) for uid, pod in pods.items()})
PLACEHOLDERS = st.dictionaries(st.sampled_from(UIDS), st.tuples(TIMES, st.booleans())).map(
    lambda made: [PlaceholderPod(f"placeholder-{uid}", uid, *one) for uid, one in made.items()]
)
FIRST = st.dictionaries(st.sampled_from(UIDS), TIMES)
LIMITS = st.builds(Limits, st.integers(0, 4), st.sampled_from([1.0, 5.0, 100.0]))


def slow(
    waiting: dict[str, StrandedPod],
    present: list[PlaceholderPod],
    first_s: dict[str, float],
    limits: Limits,
    now_s: float,
) -> Plan:
    """Pod by pod, as the rules are written."""

    def timed_out(uid: str) -> bool:
        made = [one.created_s for one in present if one.pod_uid == uid] + [
            at for of, at in first_s.items() if of == uid
        ]
        return bool(made) and now_s - min(made) >= limits.timeout_s

    def wrong(one: PlaceholderPod) -> str:
        if one.pod_uid not in waiting:
            return "pod gone"
        pod = waiting[one.pod_uid]
        if pod.placed:
            return "placed"
        if timed_out(pod.uid):
            return "timed out"
        if pod.stranded is False or (pod.stranded is True and pod.node_type == ""):
            return "not needed"
        return ""

    removed: list[tuple[PlaceholderPod, str]] = []
    room = limits.most
    for one in sorted(present, key=lambda one: (one.created_s, one.name)):
        if one.leaving:
            room -= 1
        elif wrong(one):
            removed.append((one, wrong(one)))
        elif room <= 0:
            removed.append((one, "over the maximum"))
        else:
            room -= 1
    created = []
    left = list(waiting.values())
    while left:
        best = left[0]
        for pod in left:
            if (pod.priority, -pod.since_s) > (best.priority, -best.since_s) or (
                (pod.priority, pod.since_s) == (best.priority, best.since_s) and pod.uid < best.uid
            ):
                best = pod
        left.remove(best)
        has_one = any(one.pod_uid == best.uid for one in present)
        wants = best.stranded and not best.placed and best.node_type and not has_one and not timed_out(best.uid)
        if wants and room - len(removed) > len(created):
            created.append(best)
    return Plan(tuple(created), tuple(removed), tuple(uid for uid in first_s if uid not in waiting))  # type: ignore[arg-type]


@given(PODS, PLACEHOLDERS, FIRST, LIMITS, st.integers(20, 30).map(float))
def test_it_is_what_the_rules_say_pod_by_pod(
    waiting: dict[str, StrandedPod],
    present: list[PlaceholderPod],
    first_s: dict[str, float],
    limits: Limits,
    now_s: float,
) -> None:
    plan = decide(waiting, present, first_s, limits, now_s)
    assert plan == slow(waiting, present, first_s, limits, now_s)
    gone = {one.name for one, _ in plan.remove}
    after = [one.pod_uid for one in present if one.name not in gone] + [pod.uid for pod in plan.create]
    assert len(after) == len(set(after)), "one for each pod"
    assert len(plan.create) + len(present) <= max(limits.most, len(present)), (
        "those that are leaving count until they are gone"
    )


def test_a_pod_that_has_a_placeholder_gets_no_second_one_also_while_the_first_is_leaving() -> None:
    waiting = {"a": StrandedPod("a", 0, 0.0, True, False, "small")}
    for leaving in (False, True):
        assert decide(waiting, [PlaceholderPod("p", "a", 0.0, leaving)], {"a": 0.0}, Limits(9, 900), 1.0) == Plan()


def test_a_thousand_stranded_pods_get_as_many_as_allowed_and_the_most_important_come_first() -> None:
    waiting = {f"{n:03}": StrandedPod(f"{n:03}", n % 7, float(-n), True, False, "small") for n in range(1000)}
    plan = decide(waiting, (), {}, Limits(10, 900), 0.0)
    assert [pod.priority for pod in plan.create] == [6] * 10
    assert [pod.uid for pod in plan.create[:2]] == ["993", "986"]


def test_no_more_pods_are_remembered_than_a_config_map_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placeholders, "MOST_RECORDS", 2)
    waiting = {uid: StrandedPod(uid, 0, 0.0, True, False, "small") for uid in UIDS}
    assert [pod.uid for pod in decide(waiting, (), {"e": 0.0}, Limits(9, 900), 1.0).create] == ["a", "e"]


def share(mib: int, **conditions: frozenset[str]) -> PodRequest:
    return PodRequest((GpuRequest("main", "share", 1, units=mib // 1024, mib=mib),), **conditions)  # type: ignore[arg-type]


def of(*gpus: int, model: str = "A") -> Inventory:
    return Inventory(tuple(gpu(index, mib, model=model) for index, mib in enumerate(gpus)))


def test_the_smallest_type_that_places_the_pod_is_chosen() -> None:
    types = node_types([("large", of(49_152, 49_152)), ("small", of(24_576)), ("large", of(49_152)), ("", of(81_920))])
    assert set(types) == {"large", "small"}
    assert len(types["large"].inventory.gpus) == 2, "the node that has most stands for its type"
    assert smallest(types.values(), share(20_480)) == "small"
    assert smallest(types.values(), share(40_960)) == "large"
    assert smallest(types.values(), share(81_920)) == "", "no GPU is so large"


def test_a_new_node_has_other_gpus_and_the_same_model() -> None:
    types = node_types([("small", of(24_576))]).values()
    uuid = of(24_576).gpus[0].uuid
    assert smallest(types, share(1024, uuids=frozenset({uuid}))) == ""
    assert smallest(types, share(1024, not_uuids=frozenset({uuid}))) == "small"
    assert smallest(types, share(1024, models=frozenset({"B"}))) == ""


def test_a_placeholder_requests_what_the_kubelet_counts_of_a_whole_node() -> None:
    whole = of(24_576, 24_575)
    assert amounts(whole) == (47, 200, 2)
    lost = replace(whole.gpus[0], healthy=False, conditions=(GpuCondition("OffTheBus", "unhealthy", 1),))
    assert amounts(replace(whole, gpus=(lost, whole.gpus[1]))) == (23, 100, 1)
