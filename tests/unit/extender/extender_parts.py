"""An extender without its process: state, nominating and preemption in one object, which sees pods as the watch would show them, with a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import msgspec

from extender.nominate.nominator import Nominator
from extender.preemption import background
from extender.preemption.coordinator import PreemptionCoordinator
from extender.protocol import BindingArgs, FilterArgs, FilterResult, PreemptionArgs, PreemptionResult
from extender.settings import Settings
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.client import Client
from kube.objects import Node, Pod
from tests.builders import PodBuilder, node
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import Placement, place

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2


def answer_of(
    answering: Coroutine[Any, Any, PreemptionResult], meanwhile: Callable[[int], object] = bool
) -> PreemptionResult:
    """What the verb answers; `meanwhile` is called, with a count, whenever it yields to other tasks. It waits for nothing else."""
    for step in count(1):
        try:
            answering.send(None)
        except StopIteration as end:
            answer: PreemptionResult = end.value
            return answer
        meanwhile(step)
    raise AssertionError


@contextmanager
def step_by_step() -> Iterator[None]:
    """Long work yields to other tasks after every step."""
    before, background.WORK_S = background.WORK_S, -1.0  # type: ignore[misc]
    try:
        yield
    finally:
        background.WORK_S = before  # type: ignore[misc]


class PodCache:
    """Stands for the cache of pods."""

    def __init__(self) -> None:
        self.by_key: dict[str, Pod] = {}
        self.has_synced = asyncio.Event()
        self.has_synced.set()

    def get(self, key: str) -> Pod | None:
        return self.by_key.get(key)

    def items(self) -> Iterator[Pod]:
        return iter(self.by_key.values())


class FakeApiServer(Client):
    """Stands for the API server: `answer` returns the result of each call, or raises ApiError."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answer: Callable[[str, str, Any], bytes] = lambda *_: b"{}"

    async def get(self, path: str, *_: Any, **__: Any) -> bytes:
        return await self.send("GET", path)

    async def send(self, method: str, path: str, body: object = None, *_: Any, **__: Any) -> bytes:
        self.calls.append(f"{method} {path}")
        await asyncio.sleep(0)
        return self.answer(method, path, body)

    def evictions(self) -> list[str]:
        """Names of the pods whose eviction was requested, in order."""
        return [call.split("/")[-2] for call in self.calls if call.endswith("/eviction")]


class ExtenderParts:
    """`gpus_by_node`: how many GPUs each node has. With `settings` other than the default ones."""

    def __init__(self, settings: Settings | None = None, /, **gpus_by_node: int) -> None:
        self.now_s = 0.0
        self.pods, self.server = PodCache(), FakeApiServer()
        chosen = settings or Settings(_cli_parse_args=False)  # type: ignore[call-arg]  # settings of the base class
        self.state = State(
            lambda: self.now_s, names=DEFAULT, bursts=chosen.burst_enabled, overcommit=chosen.burst_overcommit
        )
        self.nominator = Nominator(
            self.server,
            self.state,
            pods=cast("Any", self.pods),
            nodes=cast("Any", {}),
            clock=lambda: self.now_s,
            scheduler="tangram-scheduler",
            when="always",
        )
        self.preemption = PreemptionCoordinator(
            self.server,
            self.state,
            WatchIntake(self.state),
            cast("Any", self.pods),
            chosen,
            self.nominator,
            clock=lambda: self.now_s,
        )
        self.preemption.budgets.has_synced.set()
        self.preemption.verb.informed.set()
        for name, gpus in gpus_by_node.items():
            WatchIntake(self.state).node_changed(None, node(name).with_gpus(gpus).build())

    def report(self, built: PodBuilder | Pod) -> Pod:
        """The watch reports a pod."""
        new = built if isinstance(built, Pod) else built.build()
        old = self.pods.by_key.get(new.key)
        self.pods.by_key[new.key] = new
        self.preemption.pod_changed(old, new)
        return new

    def end(self, name: str) -> None:
        """The watch reports that a pod is gone."""
        self.preemption.pod_changed(self.pods.by_key.pop(f"default/{name}"), None)

    def leaving(self) -> list[Pod]:
        """Pods that are deleted, and still there."""
        return [one for one in self.pods.items() if one.metadata.deletion_timestamp]

    def resources(self, name: str, **allocatable: str) -> None:
        """The watch shows what a node has for pods beside GPUs."""
        there = node(name).with_gpus(len(self.state.fleet.inventory[name].gpus)).plain()
        WatchIntake(self.state).node_changed(
            None, msgspec.convert(there | {"status": {"allocatable": allocatable}}, Node)
        )

    def plan(self, built: PodBuilder, where: str) -> None:
        """Make a nomination reservation."""
        pod = built.build()
        request = self.state.request_of(pod)
        found = place(self.state.fleet, request, [where])
        assert isinstance(found, Placement)
        self.nominator.reservations.put(pod.uid, pod.key, pod.spec.priority or 0, request, found)

    def filter(self, built: PodBuilder, *names: str) -> FilterResult:
        return self.preemption.filter(FilterArgs(built.build(), names))

    def preempt(self, built: PodBuilder, **victims: list[str]) -> PreemptionResult:
        """`victims`: node -> names of pods."""
        named = {where: {"Pods": [{"UID": f"uid-default-{name}"} for name in some]} for where, some in victims.items()}
        body = {"Pod": built.plain(), "NodeNameToMetaVictims": named}
        args = msgspec.json.decode(msgspec.json.encode(body), type=PreemptionArgs)
        return answer_of(self.preemption.verb.preempt(args, self.preemption.verb.deadline()))

    def binding(self, built: PodBuilder, where: str) -> BindingArgs:
        pod = built.build()
        return BindingArgs(pod.metadata.name, pod.metadata.namespace, pod.uid, where)
