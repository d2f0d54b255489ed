"""Which Workloads are evicted as a whole: against the walk through all sets, and which never are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import Assignment
from vgpu.scheduling.victims.eligibility import AllocatedPod
from vgpu.scheduling.victims.eviction_cost import Cost, cost_of
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.workloads import (
    EXACT,
    BoundWorkload,
    Suffices,
    WorkloadEviction,
    least_cost,
    least_workload_eviction,
)

PRIORITY = 10
HEADROOM = {"tight": 0, "loose": 1}
EMPTY: Cost = cost_of("n1", (), {})

singles = [AllocatedPod(f"s{at}", (), priority=at, started=100 - at) for at in range(3)]


@st.composite
def allocated_pods(draw: st.DrawFn, name: str) -> AllocatedPod:
    budget = draw(st.sampled_from(["", "", "", "loose", "loose", "tight"]))
    return AllocatedPod(
        name, (), draw(st.sampled_from([0, 1, 5, 5, 12])), draw(st.sampled_from(["standard", "best-effort"])),
        draw(st.integers(0, 3)), frozenset({budget} - {""}), draw(st.sampled_from([False] * 5 + [True])),
    )  # fmt: skip


@st.composite
def nodes(draw: st.DrawFn, most: int) -> tuple[list[BoundWorkload], dict[str, int], int]:
    """Workloads, what each pod on the node has, and what the applicant needs. Single pods use 1 each."""
    workloads, held = [], {}
    for at in range(draw(st.integers(0, most))):
        pods = tuple(draw(allocated_pods(f"w{at}p{pod}")) for pod in range(draw(st.integers(1, 3))))
        workloads.append(BoundWorkload(f"default/w{at}", pods))
        held |= {one.uid: draw(st.integers(0, 3)) for one in pods}
    return workloads, held, draw(st.integers(1, 9))


def suffices(held: dict[str, int], needs: int) -> Suffices:
    """As many single pods are evicted, in their order, as are needed beside those that are gone."""

    def answer(gone: frozenset[str]) -> tuple[Eviction, Sequence[AllocatedPod]] | None:
        lacking = max(0, needs - sum(held.get(uid, 0) for uid in gone))
        if lacking > len(singles):
            return None
        some = singles[:lacking]
        return Eviction("n1", tuple(one.uid for one in some), 0, Assignment({}), EMPTY), some

    return answer


def every(workloads: Sequence[BoundWorkload], held: dict[str, int], needs: int) -> list[tuple[Cost, set[str]]]:
    """Costs and keys of all sets that may be evicted and suffice."""
    found = []
    for count in range(1, len(workloads) + 1):
        for some in combinations(workloads, count):
            answer = suffices(held, needs)(frozenset(uid for one in some for uid in one.uids))
            pods = [pod for one in some for pod in one.pods]
            if answer is None or any(pod.protected or pod.priority >= PRIORITY for pod in pods):
                continue
            cost = cost_of("n1", [*pods, *answer[1]], HEADROOM)
            if cost[0] == 0:
                found.append((cost, {one.key for one in some}))
    return found


def search(
    workloads: Sequence[BoundWorkload], held: dict[str, int], needs: int, below: Cost | None = None
) -> WorkloadEviction | None:
    return [None, *least_workload_eviction("n1", workloads, suffices(held, needs), PRIORITY, HEADROOM, below)][-1]


@settings(max_examples=examples(500), deadline=None, derandomize=True)
@given(nodes(EXACT), st.booleans())
def test_the_least_set_of_few_workloads_is_found(
    case: tuple[list[BoundWorkload], dict[str, int], int], limited: bool
) -> None:
    workloads, held, needs = case
    of_all = sorted(every(workloads, held, needs), key=lambda one: one[0])
    below = of_all[len(of_all) // 2][0] if limited and of_all else None
    found = search(workloads, held, needs, below)
    cheaper = [one for one in of_all if below is None or one[0] < below]
    assert (found is not None) is bool(cheaper)
    if found is not None:
        assert (found.cost, {one.key for one in found.workloads}) == cheaper[0]


@settings(max_examples=examples(500), deadline=None, derandomize=True)
@given(nodes(EXACT))
def test_nothing_is_found_for_less_than_what_a_node_costs_at_least(
    case: tuple[list[BoundWorkload], dict[str, int], int],
) -> None:
    workloads, held, needs = case
    bound = least_cost("n1", workloads, PRIORITY, HEADROOM)
    assert (bound is None) is (not any(one.may_go(PRIORITY, HEADROOM) for one in workloads))
    found = search(workloads, held, needs)
    if found is not None:
        assert bound is not None
        assert bound <= found.cost[:5]


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(nodes(EXACT + 4))
def test_of_many_workloads_what_is_found_suffices_and_none_could_stay(
    case: tuple[list[BoundWorkload], dict[str, int], int],
) -> None:
    workloads, held, needs = case
    found = search(workloads, held, needs)
    if found is None:
        return
    keys = {one.key for one in found.workloads}
    assert (found.cost, keys) in every(workloads, held, needs)
    if sum(one.may_go(PRIORITY, HEADROOM) for one in workloads) > EXACT:
        gone = {one.key: one.uids for one in found.workloads}
        for key in keys if len(keys) > 1 else ():
            rest = frozenset(uid for other, uids in gone.items() if other != key for uid in uids)
            assert suffices(held, needs)(rest) is None


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(nodes(EXACT + 8))
def test_a_step_is_short_however_many_workloads_there_are(
    case: tuple[list[BoundWorkload], dict[str, int], int],
) -> None:
    """The caller does other work between two steps."""
    workloads, held, needs = case
    answer, calls = suffices(held, needs), 0

    def counted(gone: frozenset[str]) -> tuple[Eviction, Sequence[AllocatedPod]] | None:
        nonlocal calls
        calls += 1
        return answer(gone)

    for _ in least_workload_eviction("n1", workloads, counted, PRIORITY, HEADROOM):
        assert calls <= 2
        calls = 0
    assert calls <= 2


def workload(name: str, *pods: AllocatedPod) -> BoundWorkload:
    return BoundWorkload(f"default/{name}", pods)


def test_a_pod_on_another_node_counts_in_what_a_workload_costs() -> None:
    wide = workload("wide", AllocatedPod("a", ()), AllocatedPod("elsewhere", (), service_class="latency-critical"))
    narrow = workload("narrow", AllocatedPod("b", (), priority=5), AllocatedPod("c", ()))
    found = search([wide, narrow], {"a": 1, "b": 1}, 1)
    assert found is not None
    assert [one.key for one in found.workloads] == ["default/narrow"]


def test_no_workload_goes_of_which_one_pod_must_stay() -> None:
    for stays in (
        AllocatedPod("x", (), priority=PRIORITY),
        AllocatedPod("x", (), protected=True),
        AllocatedPod("x", (), budgets=frozenset({"tight"})),
    ):
        assert search([workload("w", AllocatedPod("a", ()), stays)], {"a": 1}, 1) is None
