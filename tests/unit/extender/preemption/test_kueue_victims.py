"""Evicting where Kueue's Workloads are watched: a node's view follows what is known of its Workloads, and doubt ends by itself."""

from __future__ import annotations

from typing import Any

import msgspec

from extender.preemption.kueue_pods import KueuePods
from extender.preemption.kueue_workloads import SILENT_S
from extender.preemption.owners import AGAIN_S
from extender.settings import Settings
from kube.objects import MetadataOnly
from tests.builders import PodBuilder, gpu, pod, share, workload
from tests.unit.extender.extender_parts import FULL_MIB, ExtenderParts

WITH_KUEUE = Settings(_cli_parse_args=False, kueue=True)  # type: ignore[call-arg]  # settings of the base class


def running(name: str, job: str = "") -> PodBuilder:
    built = pod(name).asking(mib=FULL_MIB).on("n1").with_phase("Running").assigned(share(gpu(0), FULL_MIB))
    return built.controlled_by("Job", job) if job else built


def urgent() -> PodBuilder:
    return pod("urgent").asking(mib=FULL_MIB).of_priority(1000)


def known(parts: ExtenderParts) -> KueuePods:
    """All Workloads are: there are none."""
    kueue_pods = parts.preemption.kueue_pods
    assert kueue_pods is not None
    kueue_pods.workloads._cache.has_synced.set()
    kueue_pods.workloads._cache.heard_s = parts.now_s
    return kueue_pods


def report(kueue_pods: KueuePods, *owners: str) -> None:
    thing: dict[str, Any] = workload("w", *owners)
    kueue_pods.workloads._changed(None, msgspec.convert(thing, MetadataOnly))


def protected(parts: ExtenderParts) -> bool:
    view = parts.preemption._candidates.view("n1")
    assert view is not None
    (one,) = view.pods
    return one.protected


def test_a_workload_that_comes_is_noticed_on_every_node_where_its_namespace_has_pods() -> None:
    parts = ExtenderParts(WITH_KUEUE, n1=1)
    kueue_pods = known(parts)
    parts.report(running("a", "j"))
    assert not protected(parts)
    report(kueue_pods, "uid-j")
    assert protected(parts)


def test_a_watch_that_falls_silent_is_noticed_and_so_is_its_return() -> None:
    parts = ExtenderParts(WITH_KUEUE, n1=1)
    known(parts)
    parts.report(running("a"))
    assert not protected(parts)
    parts.now_s += SILENT_S + 1
    assert protected(parts)
    known(parts)
    assert not protected(parts)


def test_a_node_with_an_unread_controller_is_examined_anew_each_time() -> None:
    """Nothing in the cluster has to change before the controller is read again."""
    parts = ExtenderParts(WITH_KUEUE, n1=1)
    kueue_pods = known(parts)
    report(kueue_pods, "uid-other")
    parts.report(running("a", "j"))
    assert protected(parts)
    (key,) = kueue_pods.controllers._waiting
    kueue_pods.controllers._waiting.clear()
    kueue_pods.controllers._failed[key] = parts.now_s
    assert protected(parts)
    assert kueue_pods.controllers.waiting == 0
    parts.now_s += AGAIN_S
    known(parts)
    parts.preemption.expire()
    assert protected(parts)
    assert kueue_pods.controllers.waiting == 1


def test_pods_that_wait_are_tried_again_when_there_is_no_doubt_any_more() -> None:
    parts = ExtenderParts(WITH_KUEUE, n1=1)
    reported = list[str]()
    parts.state.on_lapse = reported.append
    parts.report(running("a"))
    parts.report(urgent())
    assert parts.preempt(urgent(), n1=["a"]).nodes == {}, "no Workload is known yet"
    parts.preemption.expire()
    assert reported == []
    known(parts)
    parts.preemption.expire()
    assert reported == ["n1"]
    assert list(parts.preempt(urgent(), n1=["a"]).nodes) == ["n1"]


def test_an_extender_that_evicts_no_pod_reads_no_workloads() -> None:
    chosen = Settings(_cli_parse_args=False, kueue=True, preemption=False)  # type: ignore[call-arg]
    parts = ExtenderParts(chosen, n1=1)
    assert parts.preemption.kueue_pods is None
    assert parts.preemption.statistics() == {}
