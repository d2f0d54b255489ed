"""The preempt verb: which of the scheduler's candidates really help, and whom to evict there.

The scheduler proposes nodes and victims by node totals, which say nothing of single GPUs; what is answered it carries out unseen. So:
the victims of a node are chosen anew, from the pods known to be on it and of lower priority; a node that we do not know, or whose
victims are not all on it, is left out; so is one where nobody has to go, since the scheduler takes an empty list for an error.

Of the nodes that help one is answered, the least by the keys of `vgpu.scheduling.victims.choice`. The scheduler knows no classes: left the choice, it
would rather evict one standard pod than two best-effort ones. And with no choice left to it we know where room is being made, and
can keep it before the first victim is gone; the scheduler's word comes after that.

A pod that a queue admitted as part of a whole is no victim, whether it holds a GPU or not: a node where it would have to go is left out.

Victims without a GPU were proposed for processors, memory or ports. They stay on the list, and those of ours that are spared must be
made up for: what goes instead frees at least as much of every other resource. Where the pod has needs that are no sums (ports, other
pods near or far) the scheduler's own victims all stay on the list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import msgspec
import structlog

from extender.preemption.candidates import Candidates, priority_of
from extender.state import State
from kube.objects import Pod
from vgpu.scheduling.victims.allocated_pod import LOWEST, PODS
from vgpu.scheduling.victims.bounds import Rules, Terms
from vgpu.scheduling.victims.choice import Search
from vgpu.scheduling.victims.node_search import Eviction

log = structlog.get_logger("extender.preemption.verb")


class MetaPod(msgspec.Struct, frozen=True):
    """MetaPod: a pod by UID."""

    uid: str = msgspec.field(name="UID", default="")


class MetaVictims(msgspec.Struct, frozen=True):
    """MetaVictims."""

    pods: tuple[MetaPod, ...] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class _Victims(msgspec.Struct, frozen=True):
    """Victims: whole pods, from a scheduler without nodeCacheCapable."""

    pods: tuple[Pod, ...] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class PreemptionArgs(msgspec.Struct, frozen=True):
    """ExtenderPreemptionArgs. One of the two maps is null."""

    raw_pod: msgspec.Raw = msgspec.field(name="Pod")
    by_pods: dict[str, _Victims | None] | None = msgspec.field(name="NodeNameToVictims", default=None)
    by_uids: dict[str, MetaVictims | None] | None = msgspec.field(name="NodeNameToMetaVictims", default=None)

    @property
    def pod(self) -> Pod:
        """The preemptor."""
        return msgspec.json.decode(self.raw_pod, type=Pod)

    @property
    def needs_more_than_sums(self) -> bool:
        """Might a node be unfit for it for another reason than that something is used up?"""
        spec = msgspec.json.decode(self.raw_pod, type=_Placed).spec
        ports = any(port.get("hostPort") for one in (*spec.containers, *spec.init_containers) for port in one.ports)
        near = spec.affinity is not None and (spec.affinity.near or spec.affinity.far)
        return bool(ports or near or spec.spread or any("persistentVolumeClaim" in one for one in spec.volumes))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the scheduler proposes to evict."""
        return tuple(self.by_uids if self.by_uids is not None else self.by_pods or ())

    def proposed(self) -> dict[str, MetaVictims]:
        """Node -> victims that the scheduler proposes."""
        if self.by_uids is not None:
            return {name: one or MetaVictims() for name, one in self.by_uids.items()}
        return {
            name: MetaVictims(tuple(MetaPod(pod.uid) for pod in one.pods or ()), one.violations)
            if one
            else MetaVictims()
            for name, one in (self.by_pods or {}).items()
        }


class PreemptionResult(msgspec.Struct, frozen=True):
    """ExtenderPreemptionResult. There is no Error in it: no nodes means that nobody is evicted."""

    nodes: dict[str, MetaVictims] = msgspec.field(name="NodeNameToMetaVictims", default_factory=dict)


class _Affinity(msgspec.Struct):
    near: Any = msgspec.field(name="podAffinity", default=None)
    far: Any = msgspec.field(name="podAntiAffinity", default=None)


class _Container(msgspec.Struct):
    ports: list[dict[str, Any]] = []


class _Spec(msgspec.Struct):
    affinity: _Affinity | None = None
    containers: list[_Container] = []
    init_containers: list[_Container] = msgspec.field(name="initContainers", default_factory=list)
    spread: list[Any] = msgspec.field(name="topologySpreadConstraints", default_factory=list)
    volumes: list[dict[str, Any]] = []


class _Placed(msgspec.Struct):
    """What of a pod says where it may be, beyond what it uses up."""

    spec: _Spec = msgspec.field(default_factory=_Spec)


class Choosing:
    """One call: whom to evict where. Raises BadAsk."""

    def __init__(self, state: State, candidates: Candidates, args: PreemptionArgs) -> None:
        self._state, self._candidates = state, candidates
        self.pod, self._proposed = args.pod, args.proposed()
        self.request = state.request_of(self.pod)
        self._all_of = bool(self.request) and args.needs_more_than_sums
        """Must the scheduler's own victims go whatever else does?"""
        self._others: dict[str, Pod] = {}
        """UID -> victim that holds no GPU."""
        self._search: Search | None = None

    def finding(self) -> Iterator[None]:
        """Find what is known of the scheduler's victims that hold no GPU, in steps."""
        beside = set[str]()
        for node, wanted in self._proposed.items():
            held = self._state.allocations.on(node)
            beside.update(uid for uid in _uids(wanted) if uid not in held)
            yield
        for pod in self._candidates.find(beside) if beside else ():
            if pod is not None:
                self._others[pod.uid] = pod
            yield

    def touching(self) -> Iterator[None]:
        """Look at every pod that might be evicted, in steps: whose controllers are to be read, theirs are from then on."""
        yield from self.finding()
        for node, wanted in self._proposed.items():
            self._candidates.view(node)
            for pod in filter(None, map(self._others.get, _uids(wanted))):
                self._candidates.alone(pod)
            yield

    def steps(self, aside: Mapping[str, Set[str]]) -> Iterator[None]:
        """The search, in steps. `aside`: node -> UIDs of claims that make way for this pod. Each step reads the state as it then is."""
        yield from self.finding()
        self._search = self._searching(self._proposed, aside)
        yield from self._search.steps()

    def _searching(self, nodes: Iterable[str], aside: Mapping[str, Set[str]]) -> Search:
        rules = Rules(priority_of(self.pod), self._candidates.headroom(), may_be_nobody=False)
        only = self._state.allocations.only(self.request, self._state.names)
        return Search(
            self.request, nodes, self._candidates.view, rules, only,
            terms=lambda node: self._terms(node, frozenset(aside.get(node, ()))), apart=aside.keys(),
        )  # fmt: skip

    def _terms(self, node: str, aside: frozenset[str]) -> Terms | None:
        """What victims there must make up for; None where the scheduler goes by another cluster than we."""
        held, wanted = self._state.allocations.on(node), self._proposed[node]
        ours = [uid for uid in _uids(wanted) if uid in held]
        beside = [uid for uid in _uids(wanted) if uid not in held]
        if not self._all_there(node, beside):
            return None
        pods = [self._others[uid] for uid in beside]
        return Terms(
            must_go=frozenset(ours) if self._all_of else frozenset(),
            frees={} if self._all_of else self._candidates.frees(ours) | self._pods_too_many(node, ours, beside),
            aside=aside,
            beside_violations=self._of_others(wanted, ours) if beside else 0,
            beside_highest=max(map(priority_of, pods), default=LOWEST),
            beside=len(beside),
        )

    def _pods_too_many(self, node: str, ours: Collection[str], beside: Collection[str]) -> dict[str, int]:
        """How many of ours the scheduler evicts because the node runs as many pods as it may."""
        wanted = min(len(ours), self._state.lacking(node, self.request).get(PODS, 0) - len(beside))
        return {PODS: wanted} if wanted > 0 else {}

    def _all_there(self, node: str, uids: Collection[str]) -> bool:
        """Are all these pods on the node, of lower priority, and part of no whole?"""
        for uid in uids:
            pod = self._others.get(uid)
            if pod is None or pod.spec.node_name != node or priority_of(pod) >= priority_of(self.pod):
                log.warning("a proposed victim is not on the node, or not of lower priority", node=node, uid=uid[:80])
                return False
            if not self._candidates.alone(pod):
                return False
        return True

    def _of_others(self, wanted: MetaVictims, ours: Collection[str]) -> int:
        """Violations by victims that hold no GPU: what the scheduler counted beyond those that do."""
        return max(0, wanted.violations - self._candidates.violations(ours))

    @property
    def best(self) -> Eviction | None:
        """So far."""
        return self._search.best if self._search is not None else None

    def still_holds(self, aside: Mapping[str, Set[str]]) -> bool:
        """Is everything on the node of the best as it was when that was found?"""
        search, best = self._search, self.best
        if search is None or best is None or self._candidates.view(best.node) is not search.seen:
            return False
        terms = self._terms(best.node, frozenset(aside.get(best.node, ())))
        return terms == search.rules.on(best.node) and self._candidates.headroom() == search.rules.headroom

    def proved(self, node: str) -> Eviction | None:
        """The least set on this node as the state is now."""
        return self._searching([node], {}).whole()

    def answer(self, found: Eviction) -> PreemptionResult:
        """What is told the scheduler."""
        wanted, held = self._proposed[found.node], self._state.allocations.on(found.node)
        beside = [uid for uid in _uids(wanted) if uid not in held]
        victims = MetaVictims(tuple(MetaPod(uid) for uid in (*found.victims, *beside)), found.cost[0])
        return PreemptionResult({found.node: victims})

    def as_proposed(self) -> PreemptionResult:
        """For a pod that requests nothing of ours: the nodes where no part of a whole would go."""
        return PreemptionResult({node: wanted for node, wanted in self._proposed.items() if self._all_alone(wanted)})

    def _all_alone(self, wanted: MetaVictims) -> bool:
        return all(self._candidates.alone(self._others.get(uid) or self._candidates.pod(uid)) for uid in _uids(wanted))


def _uids(wanted: MetaVictims) -> tuple[str, ...]:
    return tuple(one.uid for one in wanted.pods or ())
