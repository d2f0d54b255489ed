"""What is known of the holders of a node, and that it is not kept for longer than it is true. In any order of events: test_extender_races.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extender import books
from kube.objects import Budget, OwnerReference, Pod
from tests.builders import card, node, pod, share
from tests.unit.extender.world import HALF_MIB, World
from vgpu.holder import Holder, started_at


def running(name: str, *, owner: str = "", **labels: str) -> Pod:
    built = pod(name).asking(mib=HALF_MIB, cpu="2").labelled(**labels).on("n1").with_phase("Running")
    made = built.assigned(share(card(0), HALF_MIB)).build()
    owners = (OwnerReference("ReplicaSet", "r", owner, True),) if owner else ()
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, owner_references=owners))


def budget(allowed: int, **labels: str) -> Budget:
    plain: dict[str, Any] = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }
    return msgspec.convert(plain, Budget)


def holder(world: World, name: str) -> Holder:
    view = world.preemption._books.view("n1")
    assert view is not None
    (found,) = (one for one in view.pods if one.uid == f"uid-default-{name}")
    return found


def test_a_holder_is_what_its_pod_says() -> None:
    world = World(n1=1)
    world.tell(running("a", app="x"))
    world.preemption.disruptions.changed(None, budget(1, app="x"))
    found = holder(world, "a")
    assert (found.klass, found.priority, found.started) == ("standard", 0, started_at("2026-01-01T00:00:00Z"))
    assert found.budgets == {"default/b"}
    assert found.requests["cpu"] == 2000
    assert not found.spared


def test_a_budget_that_comes_and_goes_is_noticed() -> None:
    world = World(n1=1)
    world.tell(running("a", app="x"))
    assert holder(world, "a").budgets == frozenset()
    world.preemption.disruptions.changed(None, budget(1, app="x"))
    assert holder(world, "a").budgets == {"default/b"}
    world.preemption.disruptions.changed(budget(1, app="x"), budget(1, app="y"))
    assert holder(world, "a").budgets == frozenset()


def test_who_was_preempted_too_often_is_spared_until_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1)
    now_s, starvation = 1000.0, world.preemption._starvation
    monkeypatch.setattr(starvation, "_clock", lambda: now_s)
    world.tell(running("a"))
    assert not holder(world, "a").spared
    for number in range(3):
        again = running("a")
        starvation.preempted(
            msgspec.structs.replace(again, metadata=msgspec.structs.replace(again.metadata, uid=f"uid-{number}"))
        )
    assert holder(world, "a").spared
    now_s += 3601
    assert not holder(world, "a").spared


def test_pods_of_one_controller_are_counted_as_they_come_and_go() -> None:
    """Each pod that it has allows three more preemptions an hour."""
    world = World(n1=2)
    starvation = world.preemption._starvation
    world.tell(running("a", owner="r"))
    for number in range(3):
        starvation.preempted(running(f"gone-{number}", owner="r"))
    assert holder(world, "a").spared
    world.tell(running("b", owner="r"))
    assert not holder(world, "a").spared
    world.end("b")
    assert holder(world, "a").spared


def test_a_view_is_made_once_for_a_node_on_which_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(n1=1, n2=1)
    world.tell(running("a"))
    known = world.preemption._books
    first = known.view("n1")
    assert known.view("n1") is first
    world.tell(pod("b").asking(mib=HALF_MIB).on("n2").assigned(share(card(0, node="n2"), HALF_MIB)))
    assert known.view("n1") is first
    world.tell(running("a", app="x"))
    second = known.view("n1")
    assert second is not first
    world.state.node_changed(node("n1").with_gpus(1).build(), node("n1").with_gpus(2).build())
    assert known.view("n1") is not second
    world.state.node_changed(node("n1").with_gpus(2).build(), None)
    assert known.view("n1") is None
    monkeypatch.setattr(books, "MOST_KEPT", 0)
    world.tell(running("a"))
    assert known.view("n2") is not None
