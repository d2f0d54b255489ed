"""What the cluster's pods request, and how much of an idle GPU such pods could not use.

Counted from the pods seen, each as often as it was seen; nothing is assumed before. The typical requests are the most frequent ones
up to `SHARE` of the pods. They are made into tables once in a while, so that evaluating 10,000 nodes is a look-up by GPU.

A request cannot use a GPU with too little memory or compute time free, one of a model that it does not allow, any GPU of a node
with too little CPU, nor any of a node with fewer such GPUs than it requests. The result is in GPUs: a GPU idle by half and of no
use to any request counts 0.5. (F of FGD, Weng et al., USENIX ATC '23, with expected shares of GPUs.)

Beside that, `stranded` looks further ahead: idle GPUs of a node beyond those that its free CPU serves when pods request as much
CPU to a GPU as they do on average. F sees a lack of CPU only when it is there. And `displaced` measures how scarce the GPUs of each pool are
(`displacement`). F knows models and no other constraints of nodes: what a label or taint keeps from a request counts as usable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.api.request import FULL_CORE_PERCENT, PodRequest, peak
from vgpu.scheduling.arrays import GpuArrays, GpusOfNodes
from vgpu.scheduling.demand.displacement import INSTANCE, Demand, GpuNeed
from vgpu.scheduling.demand.node_cache import NodeCache
from vgpu.scheduling.nodes.constraints import ANYWHERE, NodeConstraints
from vgpu.scheduling.nodes.selectors import Bools

if TYPE_CHECKING:
    from vgpu.scheduling.demand.pool_capacity import PoolCapacity
    from vgpu.scheduling.demand.pools import Pools

SHARE: Final = 0.95
"""Part of the pods that typical requests make up. From the paper."""
MOST_REQUESTS: Final = 64
"""Typical requests at most. Guessed: bounds the tables."""
LEARN_EVERY: Final = 256
"""Pods seen between two makings of the tables; more often at the beginning, at every power of two."""

FORGET_AT: Final = 65_536
"""Pods counted at which all counts are halved: what pods requested long ago counts less and less, and rare requests are forgotten. Guessed."""

MOST_CONSTRAINTS: Final = 1024
"""Different constraints of nodes that are counted; those of further pods count as none until others are forgotten. Guessed."""

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, order=True)
class Typical:
    """A request as far as the measure knows it."""

    gpus: int
    """0: no GPU, so it can use none."""
    mib: int
    """On each GPU; -1: the GPU must be whole."""
    percent: int
    cpu_milli: int
    models: tuple[str, ...]
    """Allowed; empty: any."""
    instances: tuple[tuple[str, int], ...] = ()
    """MIG instances by profile."""
    constraints: NodeConstraints = ANYWHERE
    """Of the pod's node."""

    def needs(self) -> dict[str, tuple[GpuNeed, int]]:
        """By profile, GPUs of which "" is for: what each must have, and how many are requested."""
        profiles = tuple(profile for profile, _ in self.instances)
        if not profiles:
            return (
                {"": (GpuNeed(self.mib, self.percent, self.models, self.constraints), self.gpus)} if self.gpus else {}
            )
        parts: dict[str, tuple[GpuNeed, int]] = {}
        if self.gpus:
            beside = replace(self.constraints, profiles=profiles)
            parts[""] = GpuNeed(self.mib, self.percent, self.models, beside), self.gpus
        for profile, wanted in self.instances:
            others = tuple(one for one in profiles if one != profile)
            beside = replace(self.constraints, profiles=others, shared=self.gpus > 0)
            parts[profile] = replace(INSTANCE, models=self.models, constraints=beside), wanted
        return parts


@dataclass(frozen=True, slots=True)
class _Tables:
    mib: npt.NDArray[np.int64]
    percent: npt.NDArray[np.int64]
    cpu: npt.NDArray[np.int64]
    """Distinct needs, ascending."""
    useless: Floats
    """[CPU level, model, GPU level] how probably the next request cannot use the GPU, seen alone."""
    requested_cpu_milli: float
    requested_mib: float
    requested_whole: float
    """Of the typical pods that request GPUs, expected: CPU, MiB of shares, GPUs taken whole."""
    needs: Mapping[str, Mapping[GpuNeed, int]]
    """By profile, GPUs of which "" is for: how many were requested, by need. Of all pods seen, the rare ones too: a rare pool may be requested
    by few."""
    instances: Mapping[str, int]
    """MIG profile -> instances of these needs."""
    constraints: tuple[NodeConstraints, ...]
    """Of these needs, those for most GPUs first."""
    sets: tuple[tuple[int, Floats, npt.NDArray[np.bool_]], ...]
    """Of requests several GPUs: GPUs, probability by [CPU level, model], whether a GPU is usable by [GPU level]."""


@dataclass
class RequestDistribution:
    """Counts the requests seen, and judges GPUs by them."""

    seen: Counter[Typical] = field(default_factory=Counter)
    pods: int = 0
    _tables: _Tables | None = None
    _due: bool = False
    _models: dict[str, int] = field(default_factory=dict)
    _models_then: dict[str, int] = field(default_factory=dict)
    _recall: NodeCache = field(default_factory=NodeCache, compare=False)
    _constraints: set[NodeConstraints] = field(default_factory=set)
    """Of the pods counted."""
    _demands: dict[str, Demand] = field(default_factory=dict, compare=False)
    """By profile, GPUs of which "" is for."""
    _demands_for: tuple[_Tables, int] | None = field(default=None, compare=False)
    """The tables and the version of the pools that they follow from."""

    def record(self, request: PodRequest, models: dict[str, int], constraints: NodeConstraints = ANYWHERE) -> None:
        """Count a pod. `models` is the fleet's own table of codes."""
        if constraints not in self._constraints:
            if len(self._constraints) < MOST_CONSTRAINTS:
                self._constraints.add(constraints)
            else:
                constraints = ANYWHERE
        self.seen[typical(request, constraints)] += 1
        self.pods += 1
        self._models = models
        often = self.pods < LEARN_EVERY and self.pods & (self.pods - 1) == 0
        self._due |= often or self.pods % LEARN_EVERY == 0
        if self.pods >= FORGET_AT:
            self.seen = Counter({one: times // 2 for one, times in self.seen.items() if times > 1})
            self.pods = sum(self.seen.values())
            self._constraints = {one.constraints for one in self.seen}

    def restore(self, seen: Mapping[Typical, int], models: dict[str, int]) -> None:
        """Go on from what another has seen. `models` as for `record`."""
        self.seen, self.pods, self._models, self._due = Counter(seen), sum(seen.values()), models, True
        self._constraints = {one.constraints for one in seen}

    def renew(self) -> None:
        """Make the tables anew before they are read next: they then follow from `seen` alone."""
        self._due = True

    def _known(self) -> _Tables | None:
        """The tables, made anew if that is due: only a caller that reads them spends that time."""
        if self._due or self._models_then != self._models:
            self._models_then, self._due = dict(self._models), False
            self._tables = _tables(self.typical(), self._needs(), self._models_then) if self.pods else None
            self._recall.forget()
        return self._tables

    def typical(self) -> dict[Typical, float]:
        """The typical requests and how probable each is."""
        known, chosen = Counter[Typical](), dict[Typical, int]()
        for one, times in self.seen.items():
            plain = not one.instances and one.constraints is ANYWHERE
            known[one if plain else replace(one, instances=(), constraints=ANYWHERE)] += times
        for one, times in sorted(known.items(), key=lambda item: (-item[1], item[0])):
            if sum(chosen.values()) >= SHARE * self.pods or len(chosen) == MOST_REQUESTS:
                break
            chosen[one] = times
        return {one: times / sum(chosen.values()) for one, times in chosen.items()}

    def _needs(self) -> dict[str, Counter[GpuNeed]]:
        needs: dict[str, Counter[GpuNeed]] = {"": Counter()}
        for one, times in self.seen.items():
            for profile, (need, wanted) in one.needs().items():
                needs.setdefault(profile, Counter())[need] += times * wanted
        return needs

    def constraints(self) -> tuple[NodeConstraints, ...]:
        """What the requests require of their nodes, those for most GPUs first. The same object until the tables are made anew."""
        known = self._known()
        return () if known is None else known.constraints

    def instances(self) -> Mapping[str, int]:
        """MIG profile -> instances that the pods seen requested."""
        known = self._known()
        return {} if known is None else known.instances

    def displaced(self, pools: Pools, capacity: PoolCapacity) -> Weights:
        """(pools + 1,) GPUs' worth of capacity for future requests that each MiB takes with it, where `capacity` is what the whole fleet has free.

        The last is that of rows without a GPU, which are -1.
        """
        known = self._known()
        if known is None:
            return np.zeros(len(pools) + 1, np.float32)
        by_mib = self._demand("", known, pools).displaced(capacity) / np.maximum(capacity.gpu_mib(), 1)
        weights: Weights = np.append(by_mib, 0.0).astype(np.float32)
        return weights

    def displaced_instances(self, profile: str, pools: Pools, count: Callable[[], PoolCapacity]) -> Weights:
        """(pools + 1,) as `displaced`, of MIG instances. `count`: those of the whole fleet, counted only if it matters."""
        known = self._known()
        demand = None if known is None else self._demand(profile, known, pools)
        by_pool = np.ones(len(pools)) if demand is None or demand.allowed.all() else demand.displaced(count())
        weights: Weights = np.append(by_pool, 0.0).astype(np.float32)
        return weights

    def _demand(self, profile: str, known: _Tables, pools: Pools) -> Demand:
        """Made anew when the tables or the pools are others."""
        before = self._demands_for
        if before is None or before[0] is not known or before[1] != pools.version:
            self._demands, self._demands_for = {}, (known, pools.version)
        if profile not in self._demands:
            allows = _allows(pools, list(self._models_then))
            self._demands[profile] = Demand.of(known.needs.get(profile, {}), len(pools), allows)
        return self._demands[profile]

    def unusable(self, gpus: GpusOfNodes, kind: Hashable = None) -> Floats:
        """(nodes,) GPUs that are idle and not usable by the next request, expected. Not to be written to. `kind`: as in `NodeCache.of`."""
        return self.wasted(gpus, kind)[0]

    def wasted(self, gpus: GpusOfNodes, kind: Hashable = None) -> tuple[Floats, Floats]:
        """(nodes,) twice: `unusable`, and stranded: GPUs that are idle and that the node's CPU will not suffice for, 0 where nothing reported
        the CPU."""
        known = self._known()
        nothing = np.zeros(len(gpus.cpu_milli), np.float32)
        if known is None:
            return nothing, nothing
        unusable, idle = self._recall.of(kind, gpus, partial(_judge, known))
        if not known.requested_cpu_milli:
            return unusable, nothing
        milli_per_gpu = known.requested_cpu_milli / (known.requested_mib / gpus.gpu_mib + known.requested_whole)
        return unusable, np.maximum(0, idle - gpus.cpu_milli / np.float32(milli_per_gpu))


def _judge(known: _Tables, gpus: GpuArrays) -> Floats:
    """(2, nodes) GPUs that are idle and not usable by the next request, expected; and GPUs that are idle."""
    cpu = np.searchsorted(known.cpu, gpus.cpu_milli, side="right")
    level = _level(known, gpus)
    idle = np.maximum(gpus.free_mib, 0) / np.maximum(gpus.total_mib, 1).astype(np.float32)
    wasted = _over_gpus(idle * known.useless[cpu, gpus.model, level])
    for wanted, probable, usable in known.sets:
        can = usable[level]
        too_few = np.count_nonzero(can & (gpus.total_mib > 0), axis=0) < wanted
        wasted += _over_gpus(idle * can) * too_few * probable[cpu, gpus.model[0]]
    found: Floats = np.stack((wasted, _over_gpus(idle)))
    return found


def _over_gpus(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(nodes,) sums, added up GPU by GPU: numpy's own order, and with it the last digit, may differ with the number of nodes."""
    total: npt.NDArray[Any] = np.zeros_like(values[0])
    for row in values:
        total += row
    return total


def _allows(pools: Pools, models: Sequence[str]) -> Callable[[GpuNeed], Bools]:
    """(pools,) which pools a need can use, if their GPUs are large enough. `models`: names by code."""
    of_pool = np.array(pools.models, np.intp)

    @cache
    def by_model(allowed: tuple[str, ...]) -> Bools:
        named: Bools = np.array([not allowed or model in allowed for model in models], np.bool_)[of_pool]
        return named

    admits = cache(pools.admits)
    return lambda need: by_model(need.models) & admits(need.constraints)


def typical(request: PodRequest, constraints: NodeConstraints = ANYWHERE) -> Typical:
    """What the measure knows of a pod: its largest request shares or whole GPUs, and its MIG instances."""
    parts = [part for part in request.containers if part.kind != "mig"]
    largest = max(parts, key=lambda part: (part.kind == "whole", part.gpus, part.mib), default=None)
    models = tuple(sorted(request.models - request.not_models))
    profiles = sorted({part.profile for part in request.containers if part.kind == "mig"})
    instances = tuple((profile, peak(request.of_profile(profile), lambda part: part.gpus)) for profile in profiles)
    if largest is None:
        return Typical(0, 0, 0, request.cpu_milli, models, instances, constraints)
    whole = largest.kind == "whole"
    return Typical(
        largest.gpus, -1 if whole else largest.mib, FULL_CORE_PERCENT if whole else largest.core_percent,
        request.cpu_milli, models, instances, constraints,
    )  # fmt: skip


def _level(known: _Tables, gpus: GpuArrays) -> Indices:
    """(GPUs, nodes) the level of each GPU: by memory, compute time, and whether it is whole."""
    by_mib = np.searchsorted(known.mib, gpus.free_mib, side="right")
    whole = (gpus.free_mib == gpus.total_mib) & (gpus.total_mib > 0)
    if len(known.percent) == 1 and known.percent[0] == 0:
        by_percent: Any = 1  # no pod requests compute time
    else:
        by_percent = np.searchsorted(known.percent, gpus.free_percent, side="right")
        whole &= gpus.free_percent == FULL_CORE_PERCENT
    level: Indices = (by_mib * (len(known.percent) + 1) + by_percent) * 2 + whole
    return level


def _tables(requests: dict[Typical, float], needs: Mapping[str, Counter[GpuNeed]], models: dict[str, int]) -> _Tables:
    mib, percent, cpu = (
        np.unique(np.array([getattr(one, what) for one in requests], np.int64))
        for what in ("mib", "percent", "cpu_milli")
    )
    at_mib, at_percent, whole = np.meshgrid(
        np.arange(len(mib) + 1), np.arange(len(percent) + 1), np.arange(2), indexing="ij"
    )
    levels = at_mib.size
    useless = np.zeros((len(cpu) + 1, len(models) + 1, levels), np.float32)
    sets = []
    for one, probability in requests.items():
        allowed = np.array([not one.models or model in one.models for model in models] + [False])
        enough_cpu = np.arange(len(cpu) + 1) > np.searchsorted(cpu, one.cpu_milli)
        reachable = enough_cpu[:, np.newaxis] & allowed
        usable = (at_mib > np.searchsorted(mib, one.mib)) & (at_percent > np.searchsorted(percent, one.percent))
        usable = ((usable & ((one.mib >= 0) | (whole == 1))) if one.gpus else np.zeros_like(usable)).reshape(-1)
        useless += np.float32(probability) * ~(reachable[:, :, np.newaxis] & usable)
        if one.gpus > 1:
            sets.append((one.gpus, (probability * reachable).astype(np.float32), usable))
    with_gpus = [(one, probability) for one, probability in requests.items() if one.gpus]
    return _Tables(
        mib,
        percent,
        cpu,
        useless,
        requested_cpu_milli=sum(probability * one.cpu_milli for one, probability in with_gpus),
        requested_mib=sum(probability * one.gpus * one.mib for one, probability in with_gpus if one.mib >= 0),
        requested_whole=sum(probability * one.gpus for one, probability in with_gpus if one.mib < 0),
        needs=needs,
        instances={profile: sum(counted.values()) for profile, counted in needs.items() if profile},
        constraints=_ranked(needs.values()),
        sets=_merged(sets),
    )


def _ranked(needs: Iterable[Counter[GpuNeed]]) -> tuple[NodeConstraints, ...]:
    """Constraints, those for most GPUs first."""
    gpus = Counter[NodeConstraints]()
    for counted in needs:
        for need, wanted in counted.items():
            gpus[need.constraints] += wanted
    return tuple(sorted(gpus, key=lambda one: (-gpus[one], one)))


def _merged(
    sets: list[tuple[int, Floats, npt.NDArray[np.bool_]]],
) -> tuple[tuple[int, Floats, npt.NDArray[np.bool_]], ...]:
    """Sets that want the same of the same GPUs, as one."""
    merged: dict[tuple[int, bytes], tuple[int, Floats, npt.NDArray[np.bool_]]] = {}
    for wanted, probable, usable in sets:
        key = (wanted, usable.tobytes())
        merged[key] = (wanted, merged[key][1] + probable if key in merged else probable, usable)
    return tuple(merged.values())
