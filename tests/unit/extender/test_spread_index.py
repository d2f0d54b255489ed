"""The pods that a spread constraint counts: as by going through all pods, and without going through all pods."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extender.accounting import Accounting, Allocation
from extender.spread_index import SpreadIndex
from kube.objects import Pod, Requirement, Selector
from tests.builders import gpu, pod, share
from tests.examples import examples
from vgpu.api.grant import Assignment

NODES = st.sampled_from(["n1", "n2", "n3"])
LABELS = st.dictionaries(st.sampled_from(["app", "name"]), st.sampled_from(["a", "b"]), max_size=2)
UIDS = st.integers(0, 5).map(lambda number: f"uid-default-p{number}")
SELECTORS = [
    Selector(),
    Selector({"app": "a"}),
    Selector({"app": "a", "name": "b"}),
    Selector({"app": "a"}, (Requirement("name", "NotIn", ("a",)),)),
    Selector({"app": "a"}, (Requirement("name", "In", ("b",)),)),
    Selector({"app": "a"}, (Requirement("app", "In", ("b",)),)),
    Selector({"app": "a"}, (Requirement("app", "In", ("a",)),)),
    Selector(None, (Requirement("name", "Exists"),)),
    Selector(None, (Requirement("name", "In", ("a", "b")),)),
]


def allocation(node: str) -> Allocation:
    return Allocation(node, Assignment({"main": (share(gpu(0, node=node), 1024),)}))


def labelled(uid: str, labels: dict[str, str], namespace: str = "default") -> Pod:
    name = uid.removeprefix("uid-default-")
    built = pod(name, namespace).asking(mib=1024).labelled(**labels).build()
    return msgspec.structs.replace(built, metadata=msgspec.structs.replace(built.metadata, uid=uid))


class SpreadMachine(RuleBasedStateMachine):
    """Pods come, change, get places and lose them, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations = Accounting()
        self.spread_index = SpreadIndex(self.allocations)
        self.seen: dict[str, Pod] = {}
        self.at: dict[str, str] = {}

    @rule(uid=UIDS, labels=LABELS, namespace=st.sampled_from(["default", "other"]))
    def is_seen(self, uid: str, labels: dict[str, str], namespace: str) -> None:
        self.seen[uid] = labelled(uid, labels, namespace)
        self.spread_index.see(self.seen[uid])

    @rule(uid=UIDS, node=NODES)
    def gets_a_place(self, uid: str, node: str) -> None:
        self.allocations.allocate(uid, allocation(node))
        self.at[uid] = node

    @rule(uid=UIDS, node=NODES)
    def has_capacity_set_aside(self, uid: str, node: str) -> None:
        """That does not place the pod."""
        self.allocations.allocate(uid, dataclasses.replace(allocation(node), own=False))
        self.at.pop(uid, None)

    @rule(uid=UIDS)
    def loses_it(self, uid: str) -> None:
        self.allocations.release(uid)
        self.at.pop(uid, None)

    @rule(uid=UIDS)
    def is_gone(self, uid: str) -> None:
        self.spread_index.forget(uid)
        self.seen.pop(uid, None)

    @invariant()
    def all_are_counted_where_they_are(self) -> None:
        for selector in SELECTORS:
            for but in ("", "uid-default-p0"):
                right = Counter(
                    self.at[uid]
                    for uid, one in self.seen.items()
                    if uid in self.at
                    and uid != but
                    and one.metadata.namespace == "default"
                    and selector.matches(one.metadata.labels or {})
                )
                assert self.spread_index.count("default", selector, but) == right
        assert len(self.spread_index) == len(self.seen)
        assert self.seen or not self.spread_index._by_namespace


TestSpreadIndex = SpreadMachine.TestCase
TestSpreadIndex.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("selector", "tried"),
    [
        (Selector({"app": "big"}), 0),
        (Selector({"app": "big", "name": "p3"}), 0),
        (Selector({"name": "p3"}, (Requirement("app", "Exists"),)), 1),
    ],
)
def test_where_each_pod_has_labels_of_its_own_few_are_read(
    monkeypatch: pytest.MonkeyPatch, selector: Selector, tried: int
) -> None:
    allocations = Accounting()
    spread_index = SpreadIndex(allocations)
    for number in range(100):
        one = labelled(f"uid-default-p{number}", {"app": "big", "name": f"p{number}"})
        allocations.allocate(one.uid, allocation("n1"))
        spread_index.see(one)
    calls: list[object] = []
    matches = Selector.matches

    def counted(self: Selector, labels: dict[str, str]) -> bool:
        calls.append(labels)
        return matches(self, labels)

    monkeypatch.setattr(Selector, "matches", counted)
    all_of_them = selector == Selector({"app": "big"})
    assert sum(spread_index.count("default", selector, "uid-of-another").values()) == (100 if all_of_them else 1)
    assert len(calls) == tried
    calls.clear()
    spread_index.forget("uid-default-p3")
    assert sum(spread_index.count("default", selector, "uid-of-another").values()) == (99 if all_of_them else 0)
    assert len(calls) == 1, "what was counted is kept in step"
