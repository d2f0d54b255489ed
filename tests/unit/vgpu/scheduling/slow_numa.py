"""The kubelet's alignment, the obvious slow way: every device and CPU is there, every hint is made, and every combination of hints is tried.

Rules as in k8s.io/kubernetes v1.36.3, pkg/kubelet/cm. Where the kubelet takes any of several devices or CPUs, `pick` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from vgpu.api.numa import ContainerNeeds


@dataclass(frozen=True)
class Hint:
    """`nodes` None: any."""

    nodes: frozenset[int] | None
    preferred: bool


@dataclass
class Things:
    """One resource: CPUs, or the devices of one plugin."""

    node_of: Mapping[str, int]
    """Each of them, and its NUMA node."""
    free: set[str]
    reusable: set[str] = field(default_factory=set)

    def hints(self, wanted: int) -> list[Hint]:
        """Smallest sets first."""
        nodes = sorted(set(self.node_of.values()))
        least, found = len(nodes), []
        for size in range(1, len(nodes) + 1):
            for some in combinations(nodes, size):
                if sum(node in some for node in self.node_of.values()) >= wanted:
                    least = min(least, size)
                if any(self.node_of[one] not in some for one in self.reusable):
                    continue
                if len(self.reusable) + sum(self.node_of[one] in some for one in self.free) >= wanted:
                    found.append(frozenset(some))
        return [Hint(some, len(some) == least) for some in found]


Closer = Callable[[frozenset[int]], float]


def best_hint(everywhere: frozenset[int], all_hints: Sequence[Sequence[Hint]], closeness: Closer) -> Hint:
    """Of all combinations."""
    narrowest = [min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0) for hints in all_hints]
    enough = max(narrowest, default=0)
    best: Hint | None = None
    for combination in product(*all_hints):
        sets = [hint.nodes for hint in combination if hint.nodes is not None]
        same = all(one == sets[0] for one in sets)
        candidate = Hint(everywhere.intersection(*sets), same and all(hint.preferred for hint in combination))
        if candidate.nodes and (best is None or _better(candidate, best, enough, closeness)):
            best = candidate
    return best or Hint(everywhere, False)


def _better(candidate: Hint, best: Hint, enough: int, closeness: Closer) -> bool:
    assert candidate.nodes is not None
    assert best.nodes is not None
    if candidate.preferred != best.preferred:
        return candidate.preferred
    fitter = _key(candidate.nodes, closeness) < _key(best.nodes, closeness)
    if candidate.preferred:
        return fitter
    new, old = len(candidate.nodes), len(best.nodes)
    if old > enough or new == old:
        return fitter
    return old < new <= enough


def _key(nodes: frozenset[int], closeness: Closer) -> tuple[int, float, int]:
    return len(nodes), closeness(nodes), sum(1 << node for node in nodes)


@dataclass
class SlowKubelet:
    """A machine. `things`: resource -> what there is of it; resources without NUMA nodes are left out."""

    policy: str
    everywhere: frozenset[int]
    things: dict[str, Things]
    pick: Callable[[Iterable[str]], list[str]]
    """Puts them in an order, any one."""
    closeness: Closer

    def admit(
        self, needs: Sequence[ContainerNeeds], scope: str, whole: ContainerNeeds
    ) -> dict[str, frozenset[int]] | None:
        """Container -> NUMA nodes to which it is aligned; None: the pod is refused. `whole`: the pod as one."""
        for_all = self._align(whole) if scope == "pod" else None
        if scope == "pod" and for_all is None:
            return None
        masks: dict[str, frozenset[int]] = {}
        for one in needs:
            nodes = for_all if scope == "pod" else self._align(one)
            if nodes is None:
                return None
            masks[one.container] = nodes
            for resource, wanted in _amounts(one).items():
                if resource in self.things:
                    self._take(self.things[resource], resource == "cpu", wanted, nodes, init=one.init)
        return masks

    def _align(self, one: ContainerNeeds) -> frozenset[int] | None:
        hints: list[list[Hint]] = []
        for resource, wanted in _amounts(one).items():
            known = self.things.get(resource)
            made = [Hint(None, True)] if known is None else known.hints(wanted)
            hints.append(made or [Hint(None, False)])
        if self.policy == "single-numa-node":
            hints = [[h for h in some if h.preferred and (h.nodes is None or len(h.nodes) == 1)] for some in hints]
        best = best_hint(self.everywhere, hints, self.closeness)
        return best.nodes if best.preferred else None

    def _take(self, things: Things, cpus: bool, wanted: int, nodes: frozenset[int], *, init: bool) -> None:
        near = [one for one in self.pick(things.free) if things.node_of[one] in nodes]
        far = [one for one in self.pick(things.free) if things.node_of[one] not in nodes]
        again = self.pick(things.reusable)
        if cpus:  # aligned ones first, reusable or not
            near = self.pick([*near, *(one for one in again if things.node_of[one] in nodes)])
            order = [*near, *far]
        else:
            order = [*again, *near, *far]
        taken = set(order[:wanted])
        assert len(taken) == wanted
        things.free -= taken
        things.reusable = things.reusable | taken if init else things.reusable - taken


def _amounts(one: ContainerNeeds) -> dict[str, int]:
    return ({"cpu": one.cpus} if one.cpus else {}) | dict(one.devices)
