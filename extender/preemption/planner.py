"""Plan an eviction where kube-scheduler does not call /preempt: choose the least set of victims that lets a pod fit on one of its nodes.

    UnplacedPod --EvictionPlanner.plan--> PlannedEviction --Evictor--> evictions

The planner reads the state and changes nothing. Pods that end by themselves come first: if the request fits once they have ended, the plan
has no victims. Then single pods and, where Kueue's Workloads may be deactivated, whole Workloads compete by cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile

from extender.preemption.background import BackgroundWork
from extender.preemption.kueue_pods import KueuePods
from extender.preemption.kueue_victims import WorkloadCandidates, WorkloadSearch
from extender.preemption.preemption_reservations import PreemptionReservations
from extender.preemption.victim_candidates import VictimCandidates, leaving, priority_of
from extender.state import State
from kube.cache import Cache
from kube.objects import Pod
from kube.pod_requests import requests_of
from vgpu.api.request import PodRequest
from vgpu.scheduling.placement import Placement
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms
from vgpu.scheduling.victims.eligibility import LOWEST
from vgpu.scheduling.victims.eviction_cost import Cost
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.victim_search import VictimSearch, least_eviction
from vgpu.scheduling.victims.workloads import BoundWorkload


@dataclass(frozen=True, slots=True)
class UnplacedPod:
    """A pod for which filter found no node."""

    key: str
    """As `namespace/name`."""
    uid: str
    nodes: Sequence[str]
    """Nodes that passed kube-scheduler's own filters, as far as the extender knows them."""
    since_s: float


@dataclass(slots=True)
class PlannedEviction:
    """A plan that the evictor carries out step by step."""

    wanting: UnplacedPod
    plan: Eviction
    before: str
    """The node to which the pod was nominated before the extender nominated it; the watch may still show that for a while."""
    workloads: Sequence[BoundWorkload]
    """Workloads to deactivate. Their pods on the node are among the victims of the plan."""
    deactivated: set[str] = field(default_factory=set)
    """Keys of the Workloads that are deactivated already."""
    evicted: bool = False
    """Has any pod been evicted yet?"""

    @property
    def singles(self) -> list[str]:
        """UIDs of the victims that are evicted one by one."""
        together = frozenset[str]().union(*(one.uids for one in self.workloads))
        return [uid for uid in self.plan.victims if uid not in together]


@dataclass(slots=True)
class _PlanSearch:
    """One search, and the best that it has found so far."""

    wanting: UnplacedPod
    pod: Pod
    request: PodRequest
    found: Eviction | None = None
    """An eviction without victims."""
    search: VictimSearch | None = None
    workload_search: WorkloadSearch | None = None

    @property
    def single(self) -> Eviction | None:
        """The best plan in which each victim is evicted by itself."""
        return self.found or (self.search.best if self.search is not None else None)

    def _workloads_cost_less(self, cost: Cost) -> bool:
        return self.single is None or cost < self.single.cost

    @property
    def best(self) -> tuple[Eviction, Sequence[BoundWorkload]] | None:
        """The best plan, with the Workloads that it deactivates."""
        if (
            self.workload_search is not None
            and self.workload_search.best is not None
            and self._workloads_cost_less(self.workload_search.best.cost)
        ):
            return self.workload_search.eviction(self.workload_search.best), self.workload_search.best.workloads
        return (self.single, ()) if self.single is not None else None


class EvictionPlanner:
    """`deadline_s` bounds one search; `workloads` is None unless Workloads may be deactivated."""

    def __init__(
        self,
        state: State,
        pods: Cache[Pod],
        candidates: VictimCandidates,
        reservations: PreemptionReservations,
        *,
        clock: Callable[[], float],
        deadline_s: float,
        background: BackgroundWork,
        kueue_pods: KueuePods | None,
        workloads: WorkloadCandidates | None,
    ) -> None:
        self._state, self._pods, self._candidates, self._reservations = state, pods, candidates, reservations
        self._clock, self._deadline_s, self._background = clock, deadline_s, background
        self.kueue_pods, self.workloads = kueue_pods, workloads
        self._waited: set[str] = set()
        """UIDs of pods whose reservation lapsed while other pods were expected to end by themselves."""

    def do_not_wait(self, uid: str) -> None:
        """From now on, plan for this pod as if no pod would end by itself."""
        self._waited.add(uid)

    def forget(self, uid: str) -> None:
        """The pod is bound or gone."""
        self._waited.discard(uid)

    async def plan(
        self, one: UnplacedPod, pod: Pod, request: PodRequest
    ) -> tuple[Eviction, Sequence[BoundWorkload]] | None:
        """The least eviction over all nodes, or over those that the deadline allowed; None if none helps."""
        searching, until_s = _PlanSearch(one, pod, request), self._clock() + self._deadline_s
        if self.kueue_pods is not None:
            await self.kueue_pods.read(self._candidates.touching(one.nodes), self._background, until_s)
        await self._background.run(self._steps(searching, until_s), until_s=until_s)
        return searching.best

    def _steps(self, searching: _PlanSearch, until_s: float) -> Iterator[None]:
        one, request = searching.wanting, searching.request
        leave = dict[str, frozenset[str]]()  # node -> pods that count as gone, because they end by themselves

        def terms(node: str, gone: frozenset[str] = frozenset()) -> EvictionTerms:
            return self._terms(one.uid, request, node, gone | leave.get(node, frozenset()))

        if one.uid not in self._waited:
            for node in one.nodes:
                if gone := self.terminating(one.uid, node):
                    leave[node] = gone
                    if found := self._fitting_after(one.uid, request, node, gone):
                        searching.found = found
                        return
                yield
        rules = EvictionRules(
            priority_of(searching.pod), self._candidates.headroom(), violate=False, may_be_nobody=False
        )
        only, own = self._state.only(request), self._state.allocations.get(one.uid)
        apart = leave.keys() | ({own.node} if own is not None else set())
        searching.search = VictimSearch(
            request, one.nodes, self._candidates.view, rules, only, terms=terms, apart=apart
        )
        singles = searching.search.steps()
        if self.workloads is not None:
            half_s = (self._clock() + until_s) / 2
            yield from takewhile(lambda _: self._clock() < half_s, singles)
            searching.workload_search = WorkloadSearch(
                self.workloads, self._candidates, searching.pod, request, one.nodes, terms, only
            )
            yield from searching.workload_search.steps(searching.single.cost if searching.single is not None else None)
        yield from singles

    async def known_workload(self, key: str) -> tuple[bool, BoundWorkload | None]:
        """Was there time to look at all its pods, and the Workload as it is now; None if it may not be evicted."""
        known: dict[str, BoundWorkload] = {}

        def renew() -> Iterator[None]:
            if self.workloads is not None:
                known.update((yield from self.workloads.known({key})))

        complete = await self._background.run(renew(), until_s=self._clock() + self._deadline_s)
        return complete, known.get(key)

    def fits_now(self, one: UnplacedPod, request: PodRequest, but: str = "") -> bool:
        """Does the request fit a node other than `but` without an eviction? kube-scheduler saw the same event, and will try the pod again."""
        nodes = [name for name in one.nodes if name != but]
        with self._reservations.lifted(one.uid):
            found = self._state.place(request, nodes)
            if isinstance(found, Placement) and self._lacking(one.uid, found.node, request):
                found = self._state.place(
                    request, [name for name in nodes if not self._lacking(one.uid, name, request)]
                )
            return isinstance(found, Placement)

    def still_helps(self, uid: str, request: PodRequest, plan: Eviction, staying: Set[str]) -> bool:
        """Does the pod fit once the plan's victims have ended, without those in `staying`?"""
        gone = (frozenset(plan.victims) - staying) | self.terminating(uid, plan.node)
        return self._fitting_after(uid, request, plan.node, gone) is not None

    def needs(self, uid: str, request: PodRequest, plan: Eviction, victims: Set[str], staying: Set[str]) -> bool:
        """Does one of these victims still run, and does the pod not fit beside them? `staying`: victims for which the answer was no."""
        pods = [self._candidates.pod(victim) for victim in victims]
        if all(pod is None or leaving(pod) for pod in pods):
            return False
        gone = (frozenset(plan.victims) - staying - victims) | self.terminating(uid, plan.node)
        return self._fitting_after(uid, request, plan.node, gone) is None

    def terminating(self, uid: str, node: str) -> frozenset[str]:
        """UIDs of pods that end by themselves, without those on GPUs that are reserved for earlier preemptors."""
        gone, reserved = self._candidates.terminating(node), self._reservations.awaited_before(uid, node)
        allocated = self._state.allocations.on(node) if gone and reserved else {}
        return gone - {one for one in gone if not reserved.isdisjoint(gpu.uuid for gpu in allocated.get(one, ()))}

    def _terms(self, uid: str, request: PodRequest, node: str, gone: frozenset[str]) -> EvictionTerms:
        """Once these pods have ended: the pod's own reservation does not block it, and victims must free what the node lacks beside GPUs."""
        lacking = self._lacking(uid, node, request)
        freed = self._candidates.requests(gone) if lacking else {}
        frees = {name: amount - freed.get(name, 0) for name, amount in lacking.items()}
        return EvictionTerms(frees={name: amount for name, amount in frees.items() if amount > 0}, aside=gone | {uid})

    def _lacking(self, uid: str, node: str, request: PodRequest) -> dict[str, int]:
        """What the node lacks beside GPUs, also for preemptors that reserved before this pod."""
        before = [pod for one in self._reservations.before(uid, node) if (pod := self._pods.get(one.key)) is not None]
        return self._state.lacking(node, request, [requests_of(pod) for pod in before])

    def _fitting_after(self, uid: str, request: PodRequest, node: str, gone: frozenset[str]) -> Eviction | None:
        """The eviction without victims, if the request fits once these pods have ended."""
        rules = EvictionRules(LOWEST, terms={node: self._terms(uid, request, node, gone)})
        only = self._state.only(request)
        return least_eviction(request, [node], self._candidates.view, rules, only)
