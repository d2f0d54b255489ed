"""A gang, its node and kube-scheduler's calls, for tests of what is reserved for it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from extender.compact import small_pod_of
from extender.gangs import GangKeeper
from extender.protocol import FilterArgs, FilterResult
from kube.objects import Pod
from kube.pod_groups import PodGroup
from tests.builders import PodBuilder, pod
from tests.unit.extender.extender_parts import FULL_MIB, ExtenderParts
from vgpu.api.names import DEFAULT
from vgpu.scheduling.gangs import QUIET_S

GPUS = 3


def group(name: str = "gang", min_count: int | None = GPUS, *, scheduled: bool = False) -> PodGroup:
    policy = {"basic": {}} if min_count is None else {"gang": {"minCount": min_count}}
    condition = {"type": "PodGroupScheduled", "status": str(scheduled)}
    plain = {
        "metadata": {"name": name, "namespace": "default"}, "spec": {"schedulingPolicy": policy},
        "status": {"conditions": [condition]},
    }  # fmt: skip
    return msgspec.convert(plain, PodGroup)


def member(name: str, of: str = "gang") -> PodBuilder:
    return pod(name).in_group(of).asking(mib=FULL_MIB)


class Ganging:
    """A node with three GPUs, a gang of as many pods, and kube-scheduler's calls."""

    def __init__(self, *gangs: PodGroup, pods: int = GPUS) -> None:
        self.parts = ExtenderParts(n1=GPUS)
        self.keeper = GangKeeper(self.parts.server, self.parts.state, clock=lambda: self.parts.now_s)
        self.woken: list[str] = []
        self.parts.state.on_lapse = self.woken.append
        for one in gangs or (group(),):
            self.keeper.group_changed(None, one)
        self.pods = [member(f"m{at}") for at in range(pods)]
        for built in self.pods:
            self.report(built)

    def report(self, built: PodBuilder | Pod) -> None:
        """The watch reports a pod; the cache keeps what the extender's keeps."""
        new = small_pod_of(DEFAULT)(built if isinstance(built, Pod) else built.build())
        old = self.parts.pods.get(new.key)
        self.parts.report(new)
        self.keeper.pod_changed(old, new)

    def end(self, name: str) -> None:
        old = self.parts.pods.get(f"default/{name}")
        self.parts.end(name)
        self.keeper.pod_changed(old, None)

    def filter(self, built: PodBuilder, *names: str) -> FilterResult:
        args = FilterArgs(built.build(), names or ("n1",))
        result = self.keeper.refuses(args)
        if result is None:
            self.keeper.next_pod(built.build())
            result = self.parts.preemption.filter(args)
        self.keeper.answered(built.build(), result)
        return result

    def cycle(self, pods: int = GPUS - 1) -> None:
        """kube-scheduler calls filter for so many; the others are refused before that."""
        for built in self.pods[:pods]:
            assert self.filter(built).node_names == ["n1"]

    def pause(self) -> None:
        """No call comes for so long that the gang's reservations end."""
        self.parts.now_s += QUIET_S
        self.keeper.expire()
        assert self.stages() == []

    def refused_after(self, pause_s: float) -> Iterable[str]:
        """The reason that the last pod is given when kube-scheduler pauses before it for so long."""
        self.cycle()
        self.parts.now_s += pause_s
        self.keeper.expire()
        return self.filter(self.pods[2]).unresolvable

    def stages(self) -> list[str]:
        return [one.stage for one in self.parts.state.reservations]
