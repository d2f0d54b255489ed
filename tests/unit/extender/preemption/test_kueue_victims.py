"""Evicting where Kueue's Workloads are watched: what was made of a node follows what is known of queues, and doubt ends by itself."""

from __future__ import annotations

from typing import Any

import msgspec

from extender.preemption.kueue_pods import Queues
from extender.preemption.kueue_workloads import SILENT_S
from extender.preemption.owners import AGAIN_S
from extender.settings import Settings
from kube.objects import MetadataOnly
from tests.builders import PodBuilder, gpu, pod, share, workload
from tests.unit.extender.world import FULL_MIB, World

WITH_KUEUE = Settings(_cli_parse_args=False, kueue=True)  # type: ignore[call-arg]  # settings of the base class


def running(name: str, job: str = "") -> PodBuilder:
    built = pod(name).asking(mib=FULL_MIB).on("n1").with_phase("Running").assigned(share(gpu(0), FULL_MIB))
    return built.controlled_by("Job", job) if job else built


def urgent() -> PodBuilder:
    return pod("urgent").asking(mib=FULL_MIB).of_priority(1000)


def known(world: World) -> Queues:
    """All Workloads are: there are none."""
    queues = world.preemption.queues
    assert queues is not None
    queues.workloads._cache.has_synced.set()
    queues.workloads._cache.heard_s = world.now_s
    return queues


def report(queues: Queues, *owners: str) -> None:
    thing: dict[str, Any] = workload("w", *owners)
    queues.workloads._changed(None, msgspec.convert(thing, MetadataOnly))


def protected(world: World) -> bool:
    view = world.preemption._candidates.view("n1")
    assert view is not None
    (one,) = view.pods
    return one.protected


def test_a_workload_that_comes_is_noticed_on_every_node_where_its_namespace_has_pods() -> None:
    world = World(WITH_KUEUE, n1=1)
    queues = known(world)
    world.report(running("a", "j"))
    assert not protected(world)
    report(queues, "uid-j")
    assert protected(world)


def test_a_watch_that_falls_silent_is_noticed_and_that_it_speaks_again() -> None:
    world = World(WITH_KUEUE, n1=1)
    known(world)
    world.report(running("a"))
    assert not protected(world)
    world.now_s += SILENT_S + 1
    assert protected(world)
    known(world)
    assert not protected(world)


def test_a_node_with_an_unread_controller_is_looked_at_anew_each_time() -> None:
    """Nothing in the cluster has to change before the controller is read again."""
    world = World(WITH_KUEUE, n1=1)
    queues = known(world)
    report(queues, "uid-other")
    world.report(running("a", "j"))
    assert protected(world)
    (key,) = queues.controllers._waiting
    queues.controllers._waiting.clear()
    queues.controllers._failed[key] = world.now_s
    assert protected(world)
    assert queues.controllers.waiting == 0
    world.now_s += AGAIN_S
    known(world)
    world.preemption.expire()
    assert protected(world)
    assert queues.controllers.waiting == 1


def test_pods_that_wait_are_tried_again_when_there_is_no_doubt_any_more() -> None:
    world = World(WITH_KUEUE, n1=1)
    reported = list[str]()
    world.state.on_lapse = reported.append
    world.report(running("a"))
    world.report(urgent())
    assert world.preempt(urgent(), n1=["a"]).nodes == {}, "no Workload is known yet"
    world.preemption.expire()
    assert reported == []
    known(world)
    world.preemption.expire()
    assert reported == ["n1"]
    assert list(world.preempt(urgent(), n1=["a"]).nodes) == ["n1"]


def test_who_evicts_nobody_reads_no_workloads() -> None:
    chosen = Settings(_cli_parse_args=False, kueue=True, preemption=False)  # type: ignore[call-arg]
    world = World(chosen, n1=1)
    assert world.preemption.queues is None
    assert world.preemption.statistics() == {}
