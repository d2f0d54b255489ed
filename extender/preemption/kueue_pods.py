"""Pods that a queue (Kueue) admitted as part of a Workload: none of them is evicted alone.

A pod does if a Workload of its namespace names as its owner the pod, the pod's controller, or a controller above that one: the Job of
a JobSet, the RayCluster of a RayJob. Labels do not count, because the creator of a pod may set them. If there is doubt, the pod counts as
part of a whole: Kueue's Workloads are not known, or a controller cannot be read. In a namespace without Workloads there is no doubt.

`alone` makes no call and never waits: controllers that are not known yet are read from then on (`controllers`). A search for victims may have
them read first (`read`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import count
from typing import Final

from extender.preemption.background import BackgroundWork
from extender.preemption.kueue_workloads import KueueWorkloads
from extender.preemption.owners import Controllers, OwnerUnknown, controller_of
from kube.cache import CacheStatistics
from kube.client import Client
from kube.objects import Pod

LONGEST: Final = 8
"""Controllers one above the other; longer chains are in doubt. Guessed: a pod of a RayJob has two, of a TrainJob three."""

NAMESPACES: Final = 65_536
"""Whose changes are counted each by itself; with more, a change in one counts as one in all. Guessed."""

CHAINS_S: Final = 1.0
"""Longest wait of a search for victims until controllers of pods are read. Guessed: hundreds are read in that time."""

CONTROLLERS: Final = "/controllers"
"""Stands for controllers that are not read, among the names of namespaces."""

Version = tuple[int, bool]


class KueuePods:
    """`resources` are the kinds of controllers that may be read."""

    def __init__(self, client: Client, resources: Iterable[str], clock: Callable[[], float]) -> None:
        self.workloads = KueueWorkloads(client, clock, self._changed)
        self.controllers = Controllers(client, resources, clock, self._changed)
        self.doubts = 0
        """Answers of "no" because a controller was not read yet: the answer may change without any change in the cluster."""
        self._clock, self._kept_back, self._kept_for = clock, "", frozenset[str]()
        self._changes, self._before, self._versions = count(1), 0, dict[str, int]()

    def alone(self, pod: Pod) -> bool:
        """May this pod be evicted by itself?"""
        return self.workload_of(pod) == ""

    def workload_of(self, pod: Pod) -> str | None:
        """The Workload of this pod, as `namespace/name`; empty: it is part of none; None: that is in doubt, also where there are several."""
        namespace = pod.metadata.namespace
        if self.workloads.unsure(namespace):
            return None
        owners = self.workloads.owners(namespace)
        if not owners:
            return ""
        if pod.uid in owners:
            return _the_one(namespace, owners[pod.uid])
        one = controller_of(pod.metadata.owner_references)
        for _ in range(LONGEST):
            if one is None:
                return ""
            if one.uid in owners:
                return _the_one(namespace, owners[one.uid])
            above = self.controllers.above(namespace, one)
            if isinstance(above, OwnerUnknown):
                self.doubts += above is OwnerUnknown.YET
                return None
            one = above
        return None

    def is_doubted(self, pod: Pod) -> bool:
        """Is it kept only because something is not known yet?"""
        doubts = self.doubts
        return not self.alone(pod) and (self.workloads.unsure(pod.metadata.namespace) or self.doubts != doubts)

    @property
    def unread(self) -> int:
        """Controllers that are not read yet, or could not be."""
        return self.controllers.waiting + self.controllers.unreadable

    async def read(self, touching: Iterator[None], background: BackgroundWork, until_s: float) -> None:
        """Look at pods, in steps, and wait for what is to be read of them; for half of the time there is at most: the search has the rest."""
        half_s = (self._clock() + until_s) / 2
        await background.run(touching, until_s=half_s)
        if self.controllers.waiting:
            await self.controllers.settled(min(CHAINS_S, max(0.0, half_s - self._clock())))

    def no_eviction_on(self, nodes: Iterable[str]) -> None:
        """No set of pods was found there to be evicted. A doubt may be the reason: `expire` returns such a node once fewer are in doubt."""
        if doubts := self._doubts():
            self._kept_back = next(iter(nodes), "")
            self._kept_for |= doubts

    def _doubts(self) -> frozenset[str]:
        """What is not known, each by a name."""
        return self.workloads.doubts() | ({CONTROLLERS} if self.unread else set())

    def version(self, namespace: str) -> Version:
        """Another value whenever pods there may have another answer than before."""
        return self._versions.get(namespace, self._before), self.workloads.unsure(namespace)

    def statistics(self) -> dict[str, CacheStatistics]:
        """What its caches have seen, by name."""
        return {"workloads": self.workloads.statistics()}

    def expire(self) -> str:
        """Once a second: forget what is old. Returns a node where pods may be evicted that were kept while there was a doubt; empty for none."""
        self.controllers.expire()
        before, self._kept_for = self._kept_for, self._kept_for & self._doubts()
        return self._kept_back if before != self._kept_for else ""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.workloads.run())
            group.create_task(self.controllers.run())

    def _changed(self, namespace: str) -> None:
        change = next(self._changes)
        if namespace not in self._versions and len(self._versions) >= NAMESPACES:
            self._versions.clear()
            self._before = change
        self._versions[namespace] = change


def _the_one(namespace: str, names: Set[str]) -> str | None:
    return f"{namespace}/{next(iter(names))}" if len(names) == 1 else None
