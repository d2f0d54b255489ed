"""The service class in a pod's annotations now: class and level of a pod that is placed may be edited while it runs.

The pod was placed and admitted with one class; its assignment, which only Tangram writes, has it. The annotations
may be changed by any user who may write the pod, and no admission webhook is called then. So they count only where they make sense
and are allowed: latency-critical work in the namespaces that may have it. What does not count is reported once, and what the
pod was placed with applies instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog

from deviceplugin.allocation import NodePod
from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.grants.grant_directories import GrantDirectories
from kube.objects import Pod
from vgpu.api.errors import BadRequest
from vgpu.api.grant import Assignment
from vgpu.api.names import CLASSES, DEFAULT_CLASS, LEVELS, Names
from vgpu.api.request import one_of

REASON: Final = "ClassIgnored"
URGENT: Final = CLASSES[0]
EVERY: Final = "*"
"""Stands for all namespaces."""
RETRY_S: Final = 1.0
"""Until a grant that could not be written is written again. Guessed."""

log = structlog.get_logger("deviceplugin.pods.service_class")


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """What applies, and a sentence for each annotation that does not count."""

    service_class: str
    level: int
    ignored: tuple[str, ...] = ()


def service_class_of(
    annotations: Mapping[str, str], assignment: Assignment, namespace: str, names: Names, urgent: Collection[str]
) -> ServiceClass:
    """The class and level of a placed pod. `urgent`: namespaces that may have latency-critical work, or `*`."""
    may = EVERY in urgent or namespace in urgent
    placed = DEFAULT_CLASS if assignment.service_class == URGENT and not may else assignment.service_class
    ignored = []
    try:
        service_class = one_of(
            annotations.get(names.service_class, placed), CLASSES, what=f"annotation {names.service_class}"
        )
    except BadRequest as error:
        ignored.append(f"{error}; class {placed} applies")
        service_class = placed
    if service_class == URGENT and not may:
        allowed = ", ".join(sorted(urgent)) or "none"
        ignored.append(
            f"annotation {names.service_class} is {URGENT!r}, which namespace {namespace} may not have (those that may: {allowed}); class {placed} applies"
        )
        service_class = placed
    try:
        text = annotations.get(names.level, str(assignment.level))
        level = int(one_of(text, tuple(map(str, LEVELS)), what=f"annotation {names.level}"))
    except BadRequest as error:
        ignored.append(f"{error}; level {assignment.level} applies")
        level = assignment.level
    return ServiceClass(service_class, level, tuple(ignored))


class ObservedPods(Protocol):
    """The pods of this node and their changes, as `deviceplugin.pods.node_pods.NodePods` has them."""

    def node_pods(self) -> Collection[NodePod]: ...

    def pod(self, uid: str) -> Pod | None: ...

    async def changed(self) -> None: ...


class Observer(Protocol):
    """Reports to users."""

    def class_ignored(self, pod: Pod, note: str) -> None:
        """An annotation does not count, and that was not reported yet."""


class ServiceClassUpdater:
    """Writes the grants of running containers anew when the terms of their pod change. `until_idle` as `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self,
        pods: ObservedPods,
        grants: GrantDirectories,
        observer: Observer,
        until_idle: Callable[[], Awaitable[None]] = without_waiting,
    ) -> None:
        self._pods, self._grants, self._observer, self._until_idle = pods, grants, observer, until_idle
        self._written: dict[str, tuple[str, int]] = {}
        self._reported: dict[str, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.once()
            except OSError as error:
                log.error("a grant could not be written anew", error=str(error), retry_s=RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            await self._pods.changed()
            await self._until_idle()

    def once(self) -> None:
        """Check every pod once; files are read only for those whose terms are new. Raises OSError."""
        now = {node_pod.uid: node_pod for node_pod in self._pods.node_pods()}
        self._report(now)
        fresh = {uid for uid, node_pod in now.items() if self._written.get(uid) != _class_and_level(node_pod)}
        for key, record in self._grants.of_pods(fresh).items() if fresh else ():
            self._update(key, now[record.uid])
        self._written = {uid: _class_and_level(node_pod) for uid, node_pod in now.items()}

    def _update(self, key: str, node_pod: NodePod) -> None:
        grant = self._grants.read(key)
        service_class, level = _class_and_level(node_pod)
        if grant is None or grant.uid != node_pod.uid or (grant.service_class, grant.level) == (service_class, level):
            return
        self._grants.write(key, replace(grant, service_class=service_class, level=level))
        log.info(
            "class changed",
            pod=str(node_pod),
            container=grant.container,
            service_class=service_class,
            level=level,
            was=grant.service_class,
        )

    def _report(self, now: Mapping[str, NodePod]) -> None:
        reported = {uid: node_pod.ignored for uid, node_pod in now.items()}
        for uid, notes in reported.items():
            for note in notes:
                pod = self._pods.pod(uid)
                if note not in self._reported.get(uid, ()) and pod is not None:
                    log.warning("an annotation does not count", pod=pod.key, note=note)
                    self._observer.class_ignored(pod, note)
        self._reported = reported


def _class_and_level(node_pod: NodePod) -> tuple[str, int]:
    return node_pod.assignment.service_class, node_pod.assignment.level
