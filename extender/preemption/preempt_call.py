"""Choose the victims of one /preempt call: on which of kube-scheduler's candidate nodes, and which pods there.

kube-scheduler proposes nodes and victims by node totals, which do not show single GPUs, and it evicts what the answer names without a
check of its own. Therefore the victims of a node are chosen anew, among the pods that are known to run there with a lower priority. A node
is left out if it is unknown, if a proposed victim is not on it, or if no pod has to be evicted there: kube-scheduler treats an empty list
as an error.

The answer names one node, the least by the keys of `vgpu.scheduling.victims.eviction_cost`. kube-scheduler knows no service classes: left to
choose, it would rather evict one standard pod than two best-effort ones. With one node in the answer the extender also knows where capacity
is being freed, and reserves it before the first victim has ended.

A pod that a queue admitted as part of a Workload is no victim, with or without a GPU: a node where it would have to be evicted is left out.

kube-scheduler proposes victims without a GPU for CPU, memory or ports. They stay in the answer. If a proposed victim with a GPU is left
out, the pods evicted instead free at least as much of every other resource. If the pod has constraints that are no sums (ports, affinity
to other pods), all of kube-scheduler's own victims stay in the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

import structlog

from extender.preemption.victim_candidates import VictimCandidates, priority_of
from extender.protocol import MetaPod, MetaVictims, PreemptionArgs, PreemptionResult
from extender.state import State
from kube.objects import Pod
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms
from vgpu.scheduling.victims.eligibility import LOWEST, PODS, is_lower
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.victim_search import VictimSearch

log = structlog.get_logger("extender.preemption.preempt_call")


class PreemptCall:
    """The choice for one call. Raises BadRequest."""

    def __init__(self, state: State, candidates: VictimCandidates, args: PreemptionArgs) -> None:
        self._state, self._candidates = state, candidates
        self.pod, self._proposed = args.pod, args.proposed()
        self.request = state.request_to_set_aside(self.pod)
        self._all_of = bool(self.request) and args.needs_more_than_sums
        """Must all of kube-scheduler's own victims be evicted?"""
        self._others: dict[str, Pod] = {}
        """UID -> proposed victim without a GPU."""
        self._search: VictimSearch | None = None

    def finding(self) -> Iterator[None]:
        """Find the proposed victims without a GPU, in steps."""
        beside = set[str]()
        for node, wanted in self._proposed.items():
            allocated = self._state.allocations.on(node)
            beside.update(uid for uid in _uids(wanted) if uid not in allocated)
            yield
        for pod in self._candidates.find(beside) if beside else ():
            if pod is not None:
                self._others[pod.uid] = pod
            yield

    def touching(self) -> Iterator[None]:
        """Visit every pod that might be evicted, in steps, so that the controllers that are not known yet are read from then on."""
        yield from self.finding()
        for node, wanted in self._proposed.items():
            self._candidates.view(node)
            for pod in filter(None, map(self._others.get, _uids(wanted))):
                self._candidates.alone(pod)
            yield

    def steps(self, aside: Mapping[str, Set[str]]) -> Iterator[None]:
        """The search, in steps. `aside`: node -> UIDs of reservations that do not block this pod. Each step reads the state as it then is."""
        yield from self.finding()
        self._search = self._search_of(self._proposed, aside)
        yield from self._search.steps()

    def _search_of(self, nodes: Iterable[str], aside: Mapping[str, Set[str]]) -> VictimSearch:
        rules = EvictionRules(priority_of(self.pod), self._candidates.headroom(), may_be_nobody=False)
        only = self._state.only(self.request)
        return VictimSearch(
            self.request, nodes, self._candidates.view, rules, only,
            terms=lambda node: self._terms(node, frozenset(aside.get(node, ()))), apart=aside.keys(),
        )  # fmt: skip

    def _terms(self, node: str, aside: frozenset[str]) -> EvictionTerms | None:
        """What victims there must free; None if kube-scheduler's proposal does not match the known pods."""
        allocated, wanted = self._state.allocations.on(node), self._proposed[node]
        ours = [uid for uid in _uids(wanted) if uid in allocated]
        beside = [uid for uid in _uids(wanted) if uid not in allocated]
        if not self._all_there(node, beside):
            return None
        pods = [self._others[uid] for uid in beside]
        return EvictionTerms(
            must_go=frozenset(ours) if self._all_of else frozenset(),
            frees={} if self._all_of else self._candidates.frees(ours) | self._pods_too_many(node, ours, beside),
            aside=aside,
            beside_violations=self._of_others(wanted, ours) if beside else 0,
            beside_highest=max(map(priority_of, pods), default=LOWEST),
            beside=len(beside),
        )

    def _pods_too_many(self, node: str, ours: Collection[str], beside: Collection[str]) -> dict[str, int]:
        """How many pods with a GPU kube-scheduler evicts because the node has reached its pod limit."""
        wanted = min(len(ours), self._state.lacking(node, self.request).get(PODS, 0) - len(beside))
        return {PODS: wanted} if wanted > 0 else {}

    def _all_there(self, node: str, uids: Collection[str]) -> bool:
        """Are all these pods on the node, of lower priority, and of no Workload?"""
        for uid in uids:
            pod = self._others.get(uid)
            if pod is None or pod.spec.node_name != node or not is_lower(priority_of(pod), priority_of(self.pod)):
                log.warning("a proposed victim is not on the node, or not of lower priority", node=node, uid=uid[:80])
                return False
            if not self._candidates.alone(pod):
                return False
        return True

    def _of_others(self, wanted: MetaVictims, ours: Collection[str]) -> int:
        """Budget violations by victims without a GPU: what kube-scheduler counted beyond those with one."""
        return max(0, wanted.violations - self._candidates.violations(ours))

    @property
    def best(self) -> Eviction | None:
        """The least eviction found so far."""
        return self._search.best if self._search is not None else None

    def is_unchanged(self, aside: Mapping[str, Set[str]]) -> bool:
        """Is everything on the best eviction's node as it was when the search found it?"""
        search, best = self._search, self.best
        if search is None or best is None or self._candidates.view(best.node) is not search.seen:
            return False
        terms = self._terms(best.node, frozenset(aside.get(best.node, ())))
        return terms == search.rules.on(best.node) and self._candidates.headroom() == search.rules.headroom

    def proved(self, node: str) -> Eviction | None:
        """The least set on this node as the state is now."""
        return self._search_of([node], {}).whole()

    def answer(self, found: Eviction) -> PreemptionResult:
        """The answer to kube-scheduler."""
        wanted, allocated = self._proposed[found.node], self._state.allocations.on(found.node)
        beside = [uid for uid in _uids(wanted) if uid not in allocated]
        victims = MetaVictims(tuple(MetaPod(uid) for uid in (*found.victims, *beside)), found.cost[0])
        return PreemptionResult({found.node: victims})

    def as_proposed(self) -> PreemptionResult:
        """For a pod that requests no GPU: the nodes where no pod of a Workload would be evicted."""
        return PreemptionResult({node: wanted for node, wanted in self._proposed.items() if self._all_alone(wanted)})

    def _all_alone(self, wanted: MetaVictims) -> bool:
        return all(self._candidates.alone(self._others.get(uid) or self._candidates.pod(uid)) for uid in _uids(wanted))


def _uids(wanted: MetaVictims) -> tuple[str, ...]:
    return tuple(one.uid for one in wanted.pods or ())
