"""A pod that found no room: what is looked for on its behalf, and what was begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from extender.preemption.kueue_victims import WholeSearch
from kube.objects import Pod
from vgpu.api.request import PodRequest
from vgpu.scheduling.victims.allocated_pod import Cost
from vgpu.scheduling.victims.choice import Search
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.workloads import Whole


@dataclass(frozen=True, slots=True)
class Wanting:
    """A pod that found no room."""

    key: str
    uid: str
    nodes: Sequence[str]
    """Those that passed the scheduler's own filters, as far as they were known."""
    since_s: float


@dataclass(slots=True)
class Begun:
    """Evictions that are not all done."""

    wanting: Wanting
    plan: Eviction
    before: str
    """Where the pod was nominated to before we did; the watch may say so for a while."""
    wholes: Sequence[Whole]
    """Workloads that go, too: their pods on the node are among the victims of the plan."""
    deactivated: set[str] = field(default_factory=set)
    """Keys of those that are done with."""
    evicted: bool = False
    """Has anybody gone yet?"""

    @property
    def singles(self) -> list[str]:
        """UIDs of the victims that go by themselves."""
        together = frozenset[str]().union(*(one.uids for one in self.wholes))
        return [uid for uid in self.plan.victims if uid not in together]


@dataclass(slots=True)
class Looking:
    """For whom to evict for a pod."""

    wanting: Wanting
    pod: Pod
    request: PodRequest
    found: Eviction | None = None
    """Nobody has to be."""
    search: Search | None = None
    wholes: WholeSearch | None = None

    @property
    def single(self) -> Eviction | None:
        """The best so far in which each victim goes by itself."""
        return self.found or (self.search.best if self.search is not None else None)

    def _whole_is_less(self, cost: Cost) -> bool:
        return self.single is None or cost < self.single.cost

    @property
    def best(self) -> tuple[Eviction, Sequence[Whole]] | None:
        """So far, with the Workloads that go as a whole."""
        if self.wholes is not None and self.wholes.best is not None and self._whole_is_less(self.wholes.best.cost):
            return self.wholes.eviction(self.wholes.best), self.wholes.best.wholes
        return (self.single, ()) if self.single is not None else None
