"""Which pods are reported and evicted when a GPU of theirs is unhealthy or gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deviceplugin.gpus.health_watch import HealthWatch
from deviceplugin.gpus.offer import Offer
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.inventory import GpuCondition
from vgpu.api.names import DEFAULT
from vgpu.health.notes import Note
from vgpu.health.pod_policy import PodPolicy

LOST = GpuCondition("OffTheBus", "unhealthy", 100, "lost")
AWAY = GpuCondition("NvmlAway", "unmonitored", 100, "no child")


@dataclass
class Pods:
    """As `NodePods`, with one GPU for each pod."""

    gpus: dict[str, str] = field(default_factory=dict)
    synced: bool = True

    def node_pods(self) -> list[Any]:
        return [
            SimpleNamespace(uid=uid, assignment=SimpleNamespace(held=lambda gpu=gpu: (SimpleNamespace(uuid=gpu),)))
            for uid, gpu in self.gpus.items()
        ]

    def pod(self, uid: str) -> Any:
        return SimpleNamespace(uid=uid)


@dataclass
class Observer:
    notes: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)

    def gpu_changed(self, note: Note) -> None:
        self.notes.append(note.reason)

    def gpu_unfit(self, pod: Any, why: str) -> None:
        self.unfit.append(f"{pod.uid}: {why}")

    def evict_unfit(self, pod: Any, why: str) -> None:  # noqa: ARG002
        self.evicted.append(pod.uid)


class Watched:
    def __init__(self, evict_after_s: int | None) -> None:
        self.now_s = 100.0
        self.offer, self.pods, self.seen = Offer(DEFAULT, 1024), Pods(), Observer()
        self.watch = HealthWatch(self.offer, self.pods, PodPolicy(evict_after_s), self.seen, now=lambda: self.now_s)  # type: ignore[arg-type]
        self.uuids = [gpu.uuid for gpu in inventory(2).gpus]


def test_nothing_is_reported_before_nvml_and_the_pods_are_known() -> None:
    watched = Watched(0)
    watched.pods.gpus = {"a": "GPU-unknown"}
    watched.watch.once()
    assert watched.watch.gone_of(["GPU-unknown"]) == ""
    watched.pods.synced = False
    watched.offer.set_inventory(inventory(2))
    watched.watch.once()
    assert watched.seen == Observer()
    watched.pods.synced = True
    watched.watch.once()
    assert watched.seen.evicted == ["a"]
    assert watched.watch.gone_of(["GPU-unknown", watched.uuids[0]]) == "GPU-unknown is no longer in this node"


@pytest.mark.parametrize(("evict_after_s", "leaves_at_s"), [(None, None), (0, 100), (300, 400)])
def test_a_pod_on_an_unhealthy_gpu_is_reported_once_and_leaves_by_the_policy(
    evict_after_s: int | None, leaves_at_s: int | None
) -> None:
    watched = Watched(evict_after_s)
    watched.pods.gpus = {"a": watched.uuids[0], "b": watched.uuids[1]}
    watched.offer.set_inventory(inventory(2), {watched.uuids[0]: (LOST,), watched.uuids[1]: (AWAY,)})
    watched.watch.once()
    watched.watch.once()
    assert len(watched.seen.unfit) == 1
    assert watched.seen.unfit[0].startswith("a: ")
    assert watched.watch.must_leave("a") is (leaves_at_s == 100)
    watched.now_s = 400.0
    watched.watch.once()
    assert ("a" in watched.seen.evicted) is (leaves_at_s is not None)
    assert "b" not in watched.seen.evicted
    watched.offer.set_conditions({})
    watched.watch.once()
    assert watched.watch.must_leave("a") is False
    assert watched.seen.notes[-1] == "GpuHealthy"


def test_a_gpu_that_went_ends_its_pods_only() -> None:
    watched = Watched(0)
    watched.pods.gpus = {"a": watched.uuids[0], "b": watched.uuids[1]}
    watched.offer.set_inventory(inventory(2))
    watched.watch.once()
    assert watched.seen.evicted == []
    watched.offer.set_inventory(inventory(1))
    watched.watch.once()
    assert watched.seen.evicted == ["b"]
    assert watched.seen.unfit == [f"b: {watched.uuids[1]} is no longer in the node"]
