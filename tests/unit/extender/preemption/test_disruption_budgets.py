"""The disruption budgets that count a pod, against a check of every budget."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.preemption.disruption_budgets import DisruptionBudgets
from kube.objects import Pod, PodDisruptionBudget
from tests.builders import pod
from tests.examples import examples

LABELS = st.dictionaries(st.sampled_from(["app", "tier"]), st.sampled_from(["a", "b"]), max_size=2)
NAMESPACES = st.sampled_from(["default", "other"])
SELECTORS = st.one_of(
    st.none(),
    st.builds(lambda labels: {"matchLabels": labels}, LABELS),
    st.just({"matchExpressions": [{"key": "app", "operator": "Exists"}]}),
    st.just({"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["b"]}]}),
)


@st.composite
def made(draw: st.DrawFn) -> PodDisruptionBudget:
    plain: dict[str, Any] = {
        "metadata": {"name": draw(st.sampled_from(["x", "y", "z"])), "namespace": draw(NAMESPACES)},
        "spec": {"selector": draw(SELECTORS)},
        "status": {
            "disruptionsAllowed": draw(st.integers(0, 2)),
            "disruptedPods": draw(st.sampled_from([None, {"p": "2026-01-01T00:00:00Z"}])),
        },
    }
    return msgspec.convert(plain, PodDisruptionBudget)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(made(), st.booleans()), max_size=12), LABELS, NAMESPACES)
def test_a_pod_counts_in_the_budgets_that_count_it(
    steps: list[tuple[PodDisruptionBudget, bool]], labels: dict[str, str], namespace: str
) -> None:
    known: dict[str, PodDisruptionBudget] = {}
    budgets, requested = DisruptionBudgets(), pod("p", namespace).labelled(**labels).build()
    for budget, stays in steps:
        before, version = counted(known, requested), budgets.version(namespace)
        old = known.pop(budget.key, None)
        if stays:
            known[budget.key] = budget
        if old is not None or stays:
            budgets.changed(old, known.get(budget.key))
        now = counted(known, requested)
        assert budgets.of(requested) == now
        assert budgets.headroom() == {key: one.status.disruptions_allowed for key, one in known.items()}
        assert before == now or budgets.version(namespace) != version, "a cached answer is recognised as old"
    assert len(budgets) == len(known)


def counted(known: dict[str, PodDisruptionBudget], requested: Pod) -> frozenset[str]:
    return frozenset(key for key, budget in known.items() if budget.counts(requested))


def test_what_one_still_allows_changes_nobodys_budgets() -> None:
    plain = {"metadata": {"name": "x", "namespace": "default"}, "spec": {"selector": {}}}
    one, fewer = (
        msgspec.convert(plain | {"status": {"disruptionsAllowed": left}}, PodDisruptionBudget) for left in (2, 1)
    )
    budgets = DisruptionBudgets()
    budgets.changed(None, one)
    version = budgets.version("default")
    budgets.changed(one, fewer)
    assert budgets.version("default") == version
    assert budgets.headroom()["default/x"] == 1
    assert "default/no-such" not in budgets.headroom()
    pods = [pod(name).build() for name in ("a", "b", "c")]
    assert [budgets.violations(pods[:evicted]) for evicted in range(4)] == [0, 0, 1, 2]
