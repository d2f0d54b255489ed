"""The pools of GPUs by a check of each node, and the steps by which tests compare the fleet with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import pytest
from hypothesis import strategies as st

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling import scarcity
from vgpu.scheduling.demand.displacement import GpuNeed
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import ANYWHERE, LabelRequirement, NodeConstraints, Taint, Term, Toleration

Step = tuple[str, object, object]

SIZES = {"small": 40, "large": 100}
PROFILES = ("1g.10gb", "2g.20gb")
KEYS, VALUES = ("zone", "disk"), ("a", "b")
conditions = st.builds(
    LabelRequirement, st.sampled_from(KEYS), st.sampled_from(("In", "NotIn", "Exists", "DoesNotExist")),
    st.sets(st.sampled_from(VALUES), min_size=1).map(lambda some: tuple(sorted(some))),
)  # fmt: skip
named = st.builds(
    lambda names: LabelRequirement("metadata.name", "In", tuple(sorted(names)), by_name=True), st.sets(st.sampled_from(("n0", "n1")))
)  # fmt: skip
terms = st.lists(conditions | named, max_size=2).map(lambda some: Term(tuple(some)))
taints = st.builds(
    Taint, st.sampled_from(("team", "gpu")), st.sampled_from(("", "x")), st.sampled_from(("NoSchedule", "NoExecute"))
)
tolerations = st.builds(
    Toleration, st.sampled_from(("", "team", "gpu")), st.sampled_from(("", "Equal", "Exists", "Unknown")), st.sampled_from(("", "x")),
    st.sampled_from(("", "NoSchedule", "NoExecute")),
)  # fmt: skip
plain = st.builds(
    lambda key, value, tolerations: NodeConstraints(((Term((LabelRequirement(key, "In", (value,)),)),),), tuple(tolerations)),
    st.sampled_from(KEYS), st.sampled_from(VALUES), st.lists(tolerations, max_size=1),
)  # fmt: skip
odd = st.builds(
    NodeConstraints, st.lists(st.lists(terms, max_size=2).map(tuple), max_size=2).map(tuple), st.lists(tolerations, max_size=2).map(tuple)
)  # fmt: skip
constraints = st.just(ANYWHERE) | plain | plain | odd
shares = st.builds(
    lambda gpus, mib: GpuRequest("s", "share", gpus, mib=mib), st.integers(1, 2), st.sampled_from((1, 10, 40, 80))
)
wholes = st.builds(lambda gpus: GpuRequest("w", "whole", gpus, core_percent=100), st.integers(1, 2))
migs = st.builds(lambda profile: GpuRequest(profile, "mig", 1, profile=profile), st.sampled_from(PROFILES))
requests = st.builds(
    lambda parts, models: PodRequest(tuple(parts), models=frozenset(models)),
    st.lists(shares | wholes | migs, min_size=1, max_size=3), st.sets(st.sampled_from(tuple(SIZES)), max_size=1),
)  # fmt: skip
gpus = st.lists(st.tuples(st.sampled_from(tuple(SIZES)), st.lists(st.sampled_from(PROFILES), max_size=3)), max_size=3)
names = st.sampled_from([f"n{number}" for number in range(7)])
labels = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES))
fleets = st.lists(gpus, min_size=7, max_size=7).map(
    lambda built: [("node", f"n{at}", each) for at, each in enumerate(built)]
)
requested = st.tuples(st.just("requested"), requests, constraints)
labelled = st.tuples(st.just("labelled"), names, st.tuples(labels, st.lists(taints, max_size=1)))
use = st.tuples(st.just("use"), names, st.integers(1, 40))
changes = st.one_of(
    labelled,
    labelled,
    st.tuples(st.just("node"), names, gpus),
    st.tuples(st.just("gone"), names, st.none()),
    requested,
    use,
)
reported = st.builds(
    lambda *parts: [*chain(*parts)],
    fleets, st.lists(labelled, max_size=5), st.lists(use, max_size=5), st.lists(requested, min_size=2, max_size=5),
)  # fmt: skip
later = st.lists(changes, min_size=3, max_size=12)


def inventory(name: str, built: list[tuple[str, list[str]]]) -> Inventory:
    """A GPU with profiles is in MIG mode."""
    return Inventory(tuple(
        Gpu(f"{name}-{row}", row, model, SIZES[model], mig=bool(profiles), instances=tuple(
            MigInstance(f"{name}-{row}-{at}", profile, 10, at, 0) for at, profile in enumerate(profiles)
        ))
        for row, (model, profiles) in enumerate(built)
    ))  # fmt: skip


@dataclass
class SlowPools:
    """Nodes and pods as the watch reported them, and nothing that is worked out before it is read."""

    fleet: Fleet = field(default_factory=Fleet)
    reported: dict[str, tuple[Mapping[str, str], list[Taint]]] = field(default_factory=dict)
    seen: list[tuple[PodRequest, NodeConstraints]] = field(default_factory=list)
    learnt: int = 0
    """How many of these the fleet has made tables of."""

    def do(self, what: str, one: object, other: object) -> None:
        fleet = self.fleet
        match what, one, other:
            case "node", str(name), list(built):
                fleet.set_node(name, inventory(name, built))
            case "labelled", str(name), (dict(of_node), list(tainted)):
                self.reported[name] = of_node, tainted
                fleet.set_labels(name, of_node, tainted)
            case "gone", str(name), _:
                fleet.remove_node(name)
            case "requested", PodRequest() as request, NodeConstraints() as its:
                self.seen.append((request, its))
                fleet.record(request, its)
            case "use", str(name), int(mib) if name in fleet and fleet.inventory[name].gpus:
                gpu = fleet.inventory[name].gpus[0]
                if gpu.instances:
                    first = gpu.instances[0]
                    fleet.debit(name, AssignedGpu(first.uuid, 0, 10, 100, "mig", first.profile))
                elif fleet.free_mib[0, fleet.column[name]] >= mib:
                    fleet.debit(name, AssignedGpu(gpu.uuid, 0, mib, 0))

    def admits(self, its: NodeConstraints, node: str) -> bool:
        of_node, tainted = self.reported.get(node, ({}, []))
        gpus = self.fleet.inventory[node].gpus
        return (
            all(any(term.conditions and all(true(one, node, of_node) for one in term.conditions) for term in group) for group in its.required)
            and all(any(one.tolerates(taint) for one in its.tolerations) for taint in tainted)
            and all(any(profile == one.profile for gpu in gpus for one in gpu.instances) for profile in its.profiles)
            and (not its.shared or any(gpu.shareable for gpu in gpus))
        )  # fmt: skip

    def needs(self, profile: str) -> Counter[GpuNeed]:
        """GPUs requested, or instances, pod by pod."""
        found = Counter[GpuNeed]()
        for request, its in self.seen:
            models, migs = (
                tuple(request.models),
                sorted({part.profile for part in request.containers if part.kind == "mig"}),
            )
            rest = [part for part in request.containers if part.kind != "mig"]
            if profile in migs:
                others = tuple(one for one in migs if one != profile)
                its = replace(its, profiles=others, shared=bool(rest)) if others or rest else its
                found[GpuNeed(-1, 100, models, its)] += sum(
                    part.gpus for part in request.containers if part.profile == profile
                )
            elif not profile and rest:
                largest = max(rest, key=lambda part: (part.kind == "whole", part.gpus, part.mib))
                whole = largest.kind == "whole"
                need = GpuNeed(
                    -1 if whole else largest.mib, 100 if whole else 0, models, replace(its, profiles=tuple(migs))
                )
                found[need] += largest.gpus
        return found

    def rooms(self, profile: str) -> Iterator[tuple[str, int, str, int, float]]:
        """(node, row, model, MiB of the GPU, free GPUs), or of instances: their number, each of 1 MiB."""
        fleet = self.fleet
        for node, at in fleet.column.items():
            for row, gpu in enumerate(fleet.inventory[node].gpus):
                if profile and any(one.profile == profile for one in gpu.instances):
                    yield node, row, gpu.model, 1, float(fleet.mig[profile].free[row, at])
                elif not profile and gpu.shareable:
                    yield node, row, gpu.model, gpu.mib, fleet.free_mib[row, at] / gpu.mib

    def displaced(self, profile: str, chosen: tuple[NodeConstraints, ...]) -> dict[tuple[str, int], float]:
        """The definition, one request and one GPU after another. Constraints that are not among the chosen keep a request off no node."""
        rooms = list(self.rooms(profile))
        lost = {(node, row): 0.0 for node, row, *_ in rooms}
        for need, wanted in self.needs(profile).items():
            times = {}
            for node, row, model, size, _ in rooms:
                can = (not need.models or model in need.models) and size >= max(need.mib, 1)
                can = can and (need.constraints not in chosen or self.admits(need.constraints, node))
                by_time = 100 / need.percent if need.percent else math.inf
                times[node, row] = min(1.0 if need.mib < 0 else size / need.mib, by_time) if can else 0.0
            left = sum(times[node, row] * free for node, row, _, _, free in rooms)
            usable = sum(free for node, row, _, _, free in rooms if times[node, row])
            for at in lost if left > 0 else ():
                lost[at] += wanted * (usable / left) * times[at] / left
        free = sum(free for *_, free in rooms)
        total = sum(lost[node, row] * free for node, row, _, _, free in rooms)
        return {
            (node, row): lost[node, row] * free / total / size if total else 1 / size for node, row, _, size, _ in rooms
        }

    def beyond(self, chosen: tuple[NodeConstraints, ...]) -> dict[tuple[str, int], float]:
        """What each MiB displaces, in tenths of the average of its model's free ones."""
        displaced, found = self.displaced("", chosen), {}
        for node, row, model, *_ in self.rooms(""):
            same = [
                (displaced[one, at], size * free) for one, at, other, size, free in self.rooms("") if other == model
            ]
            average = sum(each * mib for each, mib in same) / max(sum(mib for _, mib in same), 1)
            found[node, row] = 10 * displaced[node, row] / (average if average > 0 else 1)
        return found


def true(one: LabelRequirement, node: str, of_node: Mapping[str, str]) -> bool:
    value = node if one.by_name else of_node.get(one.key)
    match one.operator:
        case "In":
            return value in one.values
        case "NotIn":
            return value not in one.values
        case "Exists":
            return value is not None
        case _:
            return value is None


def compare(slow: SlowPools) -> None:
    fleet = slow.fleet
    if len(slow.seen) > slow.learnt:
        slow.learnt = len(slow.seen)
        fleet.distribution.renew()
    of_gpus, tenths = scarcity.of_gpus(fleet)
    if not slow.seen:
        return
    chosen = fleet.pools.constraints
    for profile in ("", *PROFILES):
        if profile and profile not in fleet.mig:
            continue
        weights = scarcity.of_instances(fleet, profile) if profile else of_gpus
        for (node, row), expected in slow.displaced(profile, chosen).items():
            found = weights[fleet.pool[row, fleet.column[node]]]
            assert found == pytest.approx(expected, rel=1e-4), (profile, node, row)
    if tenths is not None:
        for (node, row), expected in slow.beyond(chosen).items():
            assert tenths[fleet.pool[row, fleet.column[node]]] == pytest.approx(expected, abs=0.51), (node, row)


def report(slow: SlowPools, reported: list[Step], later: list[Step]) -> Iterator[None]:
    """A fleet of seven, and then a read after each change."""
    for what, one, other in reported:
        slow.do(what, one, other)
    compare(slow)
    for what, one, other in later:
        slow.do(what, one, other)
        if what != "requested":
            compare(slow)
            yield
