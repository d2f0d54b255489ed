"""What is known of the pods with an allocation on a node, and that it is not kept for longer than it is true. In any order of events: test_races.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extender.preemption import victim_candidates
from extender.watch_intake import WatchIntake
from kube.objects import OwnerReference, Pod, PodDisruptionBudget
from tests.builders import gpu, node, pod, share
from tests.unit.extender.extender_parts import HALF_MIB, ExtenderParts
from vgpu.scheduling.victims.eligibility import AllocatedPod, started_at


def running(name: str, *, owner: str = "", **labels: str) -> Pod:
    built = pod(name).asking(mib=HALF_MIB, cpu="2").labelled(**labels).on("n1").with_phase("Running")
    made = built.assigned(share(gpu(0), HALF_MIB)).build()
    owners = (OwnerReference("ReplicaSet", "r", owner, True),) if owner else ()
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, owner_references=owners))


def budget(allowed: int, **labels: str) -> PodDisruptionBudget:
    plain: dict[str, Any] = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }
    return msgspec.convert(plain, PodDisruptionBudget)


def allocated_pod(parts: ExtenderParts, name: str) -> AllocatedPod:
    view = parts.preemption._candidates.view("n1")
    assert view is not None
    (found,) = (one for one in view.pods if one.uid == f"uid-default-{name}")
    return found


def test_an_allocated_pod_has_the_values_of_its_pod() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(running("a", app="x"))
    parts.preemption.disruptions.changed(None, budget(1, app="x"))
    found = allocated_pod(parts, "a")
    assert (found.service_class, found.priority, found.started) == ("standard", 0, started_at("2026-01-01T00:00:00Z"))
    assert found.budgets == {"default/b"}
    assert found.requests["cpu"] == 2000
    assert not found.protected


def test_a_budget_that_comes_and_goes_is_noticed() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(running("a", app="x"))
    assert allocated_pod(parts, "a").budgets == frozenset()
    parts.preemption.disruptions.changed(None, budget(1, app="x"))
    assert allocated_pod(parts, "a").budgets == {"default/b"}
    parts.preemption.disruptions.changed(budget(1, app="x"), budget(1, app="y"))
    assert allocated_pod(parts, "a").budgets == frozenset()


def test_a_pod_that_was_preempted_too_often_is_protected_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1)
    now_s, history = 1000.0, parts.preemption._history
    monkeypatch.setattr(history, "_clock", lambda: now_s)
    parts.report(running("a"))
    assert not allocated_pod(parts, "a").protected
    for number in range(3):
        again = running("a")
        history.preempted(
            msgspec.structs.replace(again, metadata=msgspec.structs.replace(again.metadata, uid=f"uid-{number}"))
        )
    assert allocated_pod(parts, "a").protected
    now_s += 3601
    assert not allocated_pod(parts, "a").protected


def test_pods_of_one_controller_are_counted_as_they_come_and_go() -> None:
    """Each pod that it has allows three more preemptions an hour."""
    parts = ExtenderParts(n1=2)
    history = parts.preemption._history
    parts.report(running("a", owner="r"))
    for number in range(3):
        history.preempted(running(f"gone-{number}", owner="r"))
    assert allocated_pod(parts, "a").protected
    parts.report(running("b", owner="r"))
    assert not allocated_pod(parts, "a").protected
    parts.end("b")
    assert allocated_pod(parts, "a").protected


def test_a_view_is_made_once_for_a_node_on_which_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1, n2=1)
    parts.report(running("a"))
    known = parts.preemption._candidates
    first = known.view("n1")
    assert known.view("n1") is first
    parts.report(pod("b").asking(mib=HALF_MIB).on("n2").assigned(share(gpu(0, node="n2"), HALF_MIB)))
    assert known.view("n1") is first
    parts.report(running("a", app="x"))
    second = known.view("n1")
    assert second is not first
    WatchIntake(parts.state).node_changed(node("n1").with_gpus(1).build(), node("n1").with_gpus(2).build())
    assert known.view("n1") is not second
    WatchIntake(parts.state).node_changed(node("n1").with_gpus(2).build(), None)
    assert known.view("n1") is None
    monkeypatch.setattr(victim_candidates, "MOST_KEPT", 0)
    parts.report(running("a"))
    assert known.view("n2") is not None
