"""The preempt verb: which of the scheduler's candidates really help, and whom to evict there.

The scheduler proposes nodes and victims by node totals, which say nothing of single GPUs; what is answered it carries out unseen. So:
the victims of a node are chosen anew, from the pods known to be on it and of lower priority; a node that we do not know, or whose
victims are not all on it, is left out; so is one where nobody has to go, since the scheduler takes an empty list for an error.

Of the nodes that help one is answered, the least by the keys of `vgpu.preemption`. The scheduler knows no classes: left the choice, it
would rather evict one standard pod than two best-effort ones. And with no choice left to it we know where room is being made, and
can keep it before the first victim is gone; the scheduler's word comes after that.

Victims without a GPU were proposed for processors, memory or ports. They stay on the list, and those of ours that are spared must be
made up for: what goes instead frees at least as much of every other resource. Where the pod has needs that are no sums (ports, other
pods near or far) the scheduler's own victims all stay on the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from extender.books import Books, leaving, priority_of, requests_elsewhere
from extender.state import State
from kube.objects import Pod
from kube.pod_requests import total_of
from vgpu.preemption import Eviction, Holder, Rules, victims, violations_of

log = structlog.get_logger("extender.preempting")


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """One call, understood."""

    pod: Pod
    all_of: bool
    """Must the scheduler's own victims go whatever else does?"""
    headroom: Mapping[str, int]


def choose(state: State, books: Books, args: PreemptionArgs) -> tuple[PreemptionResult, dict[str, Eviction]]:
    """The answer, and what it means for the GPUs of the node in it. Raises BadAsk."""
    pod, proposed = args.pod, args.proposed()
    ask = state.ask_of(pod)
    if not ask:
        return PreemptionResult(proposed), {}
    if pod.spec.preemption_policy == "Never" or state.claims.get(pod.uid) is not None:
        return PreemptionResult(), {}
    asked = _Asked(pod, args.needs_more_than_sums, books.headroom())
    only = state.claims.only(ask, state.names)
    answer: dict[str, MetaVictims] = {}
    plans: dict[str, Eviction] = {}
    prices: dict[str, tuple[object, ...]] = {}
    others: Mapping[str, Pod] | None = None
    for node, wanted in proposed.items():
        holders = {one.uid: one for one in books.holders(node)}
        named = tuple(one.uid for one in wanted.pods or ())
        beside = [uid for uid in named if uid not in holders]
        if beside:
            others = others if others is not None else books.others()
            if not _all_there(node, beside, others, priority_of(pod)):
                continue
        ours = [uid for uid in named if uid in holders]
        rules = Rules(priority_of(pod), asked.headroom, suffices=_makes_up_for(state, books, ours, all_of=asked.all_of))
        found = victims(state.fleet, ask, [node], {node: list(holders.values())}, rules, only)
        if found is None or not (found.victims or beside):
            continue
        violations = found.violations + (_of_others(wanted, ours, holders, asked.headroom) if beside else 0)
        answer[node] = MetaVictims(tuple(MetaPod(uid) for uid in (*found.victims, *beside)), violations)
        plans[node] = found
        prices[node] = _price(found, violations, [others[uid] for uid in beside] if others else [])
    least = sorted(prices, key=lambda node: prices[node])[:1]
    return PreemptionResult({node: answer[node] for node in least}), {node: plans[node] for node in least}


def _price(found: Eviction, violations: int, beside: Collection[Pod]) -> tuple[object, ...]:
    """The cost of an eviction, with victims that hold no GPU and have no class."""
    _, latency_critical, standard, highest, count, *rest = found.cost
    highest = max([highest, *map(priority_of, beside)])
    return violations, latency_critical, standard, highest, count + len(beside), *rest


def _all_there(node: str, uids: Collection[str], others: Mapping[str, Pod], priority: int) -> bool:
    """Are all these pods on the node, and of lower priority? If not, the scheduler goes by another cluster than we."""
    for uid in uids:
        pod = others.get(uid)
        if pod is None or pod.spec.node_name != node or priority_of(pod) >= priority:
            log.warning("a proposed victim is not on the node, or not of lower priority", node=node, uid=uid[:80])
            return False
    return True


def _makes_up_for(
    state: State, books: Books, ours: Collection[str], *, all_of: bool
) -> Callable[[Collection[str]], bool] | None:
    """Does a set free of everything that is not ours what the proposed victims would have?"""
    if all_of:
        return lambda uids: set(ours) <= set(uids)
    wanted = _freed(state, books, ours)
    if not wanted:
        return None

    def suffices(uids: Collection[str]) -> bool:
        freed = _freed(state, books, uids)
        return all(freed.get(resource, 0) >= amount for resource, amount in wanted.items())

    return suffices


def _freed(state: State, books: Books, uids: Collection[str]) -> dict[str, int]:
    pods = [pod for uid in uids if (pod := books.pod(uid)) is not None and not leaving(pod)]
    return total_of(requests_elsewhere(pod, state.names.ours) for pod in pods)


def _of_others(
    wanted: MetaVictims, ours: Collection[str], holders: Mapping[str, Holder], headroom: Mapping[str, int]
) -> int:
    """Violations by victims that hold no GPU: what the scheduler counted beyond those that do."""
    return max(0, wanted.violations - violations_of((holders[uid] for uid in ours), headroom))
