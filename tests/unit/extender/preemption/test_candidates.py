"""What is known of the holders of a node, and that it is not kept for longer than it is true. In any order of events: test_races.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extender.preemption import candidates as candidates
from extender.watch_intake import WatchIntake
from kube.objects import Budget, OwnerReference, Pod
from tests.builders import gpu, node, pod, share
from tests.unit.extender.world import HALF_MIB, World
from vgpu.scheduling.victims.allocated_pod import AllocatedPod, started_at


def running(name: str, *, owner: str = "", **labels: str) -> Pod:
    built = pod(name).asking(mib=HALF_MIB, cpu="2").labelled(**labels).on("n1").with_phase("Running")
    made = built.assigned(share(gpu(0), HALF_MIB)).build()
    owners = (OwnerReference("ReplicaSet", "r", owner, True),) if owner else ()
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, owner_references=owners))


def budget(allowed: int, **labels: str) -> Budget:
    plain: dict[str, Any] = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }
    return msgspec.convert(plain, Budget)


def allocated_pod(world: World, name: str) -> AllocatedPod:
    view = world.preemption._candidates.view("n1")
    assert view is not None
    (found,) = (one for one in view.pods if one.uid == f"uid-default-{name}")
    return found


def test_a_allocated_pod_is_what_its_pod_says() -> None:
    world = World(n1=1)
    world.report(running("a", app="x"))
    world.preemption.disruptions.changed(None, budget(1, app="x"))
    found = allocated_pod(world, "a")
    assert (found.service_class, found.priority, found.started) == ("standard", 0, started_at("2026-01-01T00:00:00Z"))
    assert found.budgets == {"default/b"}
    assert found.requests["cpu"] == 2000
    assert not found.protected


def test_a_budget_that_comes_and_goes_is_noticed() -> None:
    world = World(n1=1)
    world.report(running("a", app="x"))
    assert allocated_pod(world, "a").budgets == frozenset()
    world.preemption.disruptions.changed(None, budget(1, app="x"))
    assert allocated_pod(world, "a").budgets == {"default/b"}
    world.preemption.disruptions.changed(budget(1, app="x"), budget(1, app="y"))
    assert allocated_pod(world, "a").budgets == frozenset()


def test_a_pod_that_was_preempted_too_often_is_protected_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1)
    now_s, history = 1000.0, world.preemption._history
    monkeypatch.setattr(history, "_clock", lambda: now_s)
    world.report(running("a"))
    assert not allocated_pod(world, "a").protected
    for number in range(3):
        again = running("a")
        history.preempted(
            msgspec.structs.replace(again, metadata=msgspec.structs.replace(again.metadata, uid=f"uid-{number}"))
        )
    assert allocated_pod(world, "a").protected
    now_s += 3601
    assert not allocated_pod(world, "a").protected


def test_pods_of_one_controller_are_counted_as_they_come_and_go() -> None:
    """Each pod that it has allows three more preemptions an hour."""
    world = World(n1=2)
    history = world.preemption._history
    world.report(running("a", owner="r"))
    for number in range(3):
        history.preempted(running(f"gone-{number}", owner="r"))
    assert allocated_pod(world, "a").protected
    world.report(running("b", owner="r"))
    assert not allocated_pod(world, "a").protected
    world.end("b")
    assert allocated_pod(world, "a").protected


def test_a_view_is_made_once_for_a_node_on_which_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1, n2=1)
    world.report(running("a"))
    known = world.preemption._candidates
    first = known.view("n1")
    assert known.view("n1") is first
    world.report(pod("b").asking(mib=HALF_MIB).on("n2").assigned(share(gpu(0, node="n2"), HALF_MIB)))
    assert known.view("n1") is first
    world.report(running("a", app="x"))
    second = known.view("n1")
    assert second is not first
    WatchIntake(world.state).node_changed(node("n1").with_gpus(1).build(), node("n1").with_gpus(2).build())
    assert known.view("n1") is not second
    WatchIntake(world.state).node_changed(node("n1").with_gpus(2).build(), None)
    assert known.view("n1") is None
    monkeypatch.setattr(candidates, "MOST_KEPT", 0)
    world.report(running("a"))
    assert known.view("n2") is not None
