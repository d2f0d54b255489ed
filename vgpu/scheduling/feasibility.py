"""Try one pod on every candidate node at once.

What is guaranteed
    A candidate fits exactly when its GPUs have capacity for the pod, for pods of up to `EXACT_CONTAINERS` containers with a share and
    any number with whole GPUs or MIG instances. Largest requests first, each on the tightest GPUs that fit it; where that
    fails `packing` finds another way if there is one. With more containers with shares only the first is tried.

    Where an init container requests a share too, all shares of the pod lie on one set of GPUs: the kubelet hands an init
    container's devices on to the app containers, so anything else would make its records differ from ours.

How it is kept short
    Most pods have one share. For them the fleet's own arrays are read as they are and nothing is written; which GPUs they
    are is looked up for the chosen node only. Everything else is tried on copies, of the nodes only that sums do not rule out.

Units and shapes as in `fleet`; a column is a node in `view`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.request import FULL_CORE_PERCENT, PodRequest, peak
from vgpu.scheduling import scarcity
from vgpu.scheduling.arrays import GpuArrays, GpusOfNodes
from vgpu.scheduling.bundles import bundles_of, deal
from vgpu.scheduling.fleet import Bools, CandidateNodes, Columns, Fleet, Ints
from vgpu.scheduling.links import nearest, nearest_of_kinds
from vgpu.scheduling.mig_fit import assigned_mig, fits_mig
from vgpu.scheduling.packing import FreeGpus, GpuSet, pack
from vgpu.scheduling.policies.outcome import Displaced, PlacementOutcome
from vgpu.scheduling.policies.registry import Order
from vgpu.scheduling.ranking import NEVER, among_equals, quarters, smallest, tightest
from vgpu.scheduling.usable_gpus import UsableGpus

EXACT_CONTAINERS: Final = 4
"""Containers with a share up to which fitting is exact: the work grows as 3 to this power. Guessed."""


class FeasibilityTable:
    """The nodes in view, and what placing the pod on each would mean.

    names       by node in view; longer than the arrays if the fleet has columns to spare
    is_candidate (nodes,) whether the node is a candidate: the arrays mean nothing for the others
    fits        (nodes,) whether the pod fits
    fits_mig    (nodes,) whether its MIG instances alone do
    """

    def __init__(
        self,
        fleet: Fleet,
        request: PodRequest,
        candidates: CandidateNodes,
        only: Mapping[str, Set[str]] | None = None,
        *,
        emptied: bool = False,
        order: Order = "tightest",
        limited: bool = True,
    ) -> None:
        """`emptied`, `limited`: as in `UsableGpus`. `order`: which GPUs a pod with one share takes."""
        self._order = order
        self.fleet, self.request = fleet, request
        self.view = UsableGpus(fleet, request, candidates, only or {}, emptied=emptied, limited=limited)
        self.names, self.is_candidate = self.view.names, self.view.is_candidate
        self._bundles = bundles_of([part for part in request.containers if part.kind == "share"])
        self._wholes = [part for part in request.containers if part.kind == "whole"]
        self._profiles = {
            part.profile: peak(request.of_profile(part.profile), lambda one: one.gpus)
            for part in request.containers
            if part.kind == "mig"
        }
        self._counts = {profile: self.view.instances(profile) for profile in self._profiles}
        self.fits_mig = fits_mig(self.view, self._profiles, self._counts)
        self._left: Ints | None = None
        """(GPUs, nodes) left on each GPU after the pod, of a pod that is one share."""
        self._loosest_mib: Ints = np.zeros(len(self.is_candidate), np.int32)
        self._node_free_mib: Ints | None = None
        self._live: Columns = np.zeros(0, np.intp)
        """Nodes in view that other pods were tried on."""
        self._rows: list[Columns] = []
        """Per bundle, then for the whole GPUs: (GPUs taken, live nodes)."""
        self._instances: dict[str, Ints] = {}
        """(GPUs, live nodes) MIG instances taken, by profile."""
        self._free_gpus = self.view.free_gpus(untouched=bool(self._wholes))
        if len(self._bundles) == 1 and not self._wholes and not self._profiles:
            self.fits = self._place_one(self._free_gpus, self._bundles[0].need)
        else:
            self.fits = self._place_several(self._free_gpus)

    def outcome(self) -> PlacementOutcome:
        """What the policy sees."""
        node_free = self._node_free_mib if self._node_free_mib is not None else self._free_after()
        return PlacementOutcome(
            self.request, self._loosest_mib, node_free, self.fleet.distribution, self._displaced, self._link_cost, self._fullness_and_heat, self._before_and_after
        )  # fmt: skip

    def _free_after(self) -> Ints:
        """(nodes,) what is left of a node's memory after a pod that is one share."""
        need = self._bundles[0].need
        return _node_free(self._free_gpus) - np.int32(need.mib * need.gpus)

    def assignment(self, at: int) -> Assignment:
        """The GPUs of every container on node `at` in view, which must fit."""
        gpus = self.fleet.inventory[self.names[at]].gpus
        taken = self._taken(at)
        given: dict[str, tuple[AssignedGpu, ...]] = {}
        for bundle, rows in zip(self._bundles, taken, strict=False):
            for request in bundle.requests:
                given[request.container] = tuple(
                    AssignedGpu(gpus[row].uuid, gpus[row].index, request.mib, request.core_percent) for row in rows
                )
        if self._wholes:
            assigned = [
                AssignedGpu(gpus[row].uuid, gpus[row].index, gpus[row].mib, FULL_CORE_PERCENT, "whole")
                for row in taken[-1]
            ]
            given |= deal(assigned, self._wholes)
        for profile, assigned in assigned_mig(self.view, self.names[at], self._profiles).items():
            given |= deal(assigned, self.request.of_profile(profile))
        ordered = {request.container: given[request.container] for request in self.request.containers}
        init = frozenset(request.container for request in self.request.containers if request.init)
        return Assignment(ordered, init, self.request.service_class, self.request.level)

    def _taken(self, at: int) -> list[list[int]]:
        """Per bundle, then for the whole GPUs: the rows taken on a node. Of GPUs that are alike to the policy, those with the best links."""
        if self._left is not None and self._order == "linked":
            return [self._nearest(np.array([at]), self._left != NEVER, self._bundles[0].need.gpus)[0][:, 0].tolist()]
        if self._left is not None:
            order = self._ranked(self._left[:, at]).argsort(kind="stable")
            return [self._linked(at, order[: self._bundles[0].need.gpus].tolist(), self._left[:, at] != NEVER)]
        live = int(np.searchsorted(self._live, at))
        taken = [rows[:, live].tolist() for rows in self._rows]
        if self._wholes:
            can = self._free_gpus.untouched[:, at].copy()
            can[[row for rows in taken[:-1] for row in rows]] = False
            taken[-1] = self._linked(at, taken[-1], can)
        return taken

    def _linked(self, at: int, taken: list[int], can: Bools) -> list[int]:
        """The GPUs with the best links among those that can be taken on a node and are alike: of one model, with as much free and promised."""
        if len(taken) == 1:
            return taken
        column = self.view.in_fleet(np.array([at]))[0]
        facts = [self.fleet.model, self.fleet.pool, self.fleet.total_mib, self.fleet.limits.excess_mib]
        facts += [self.fleet.heat] if self._order == "coolest" else []
        free = (self._free_gpus.free_mib[:, at], self._free_gpus.free_percent[:, at])
        kinds = [*zip(*(one[:, column].tolist() for one in facts), *(one.tolist() for one in free), strict=True)]
        costs = self.fleet.link_costs([self.names[at]])[:, :, 0]
        return nearest_of_kinds(costs, [kind if may else None for kind, may in zip(kinds, can, strict=True)], taken)

    def _place_one(self, free_gpus: FreeGpus, need: GpuSet) -> Bools:
        """One share. Returns (nodes,) whether it fits."""
        can = free_gpus.allowed & (free_gpus.free_mib >= need.mib) & (free_gpus.free_percent >= need.percent)
        left = np.where(can, free_gpus.free_mib - np.int32(need.mib), NEVER)
        if self._order == "coolest":
            keys = quarters(np.where(can, left, np.int32(0)), self._total_mib), self._heat
            left = np.where(among_equals(can, keys, need.gpus), left, NEVER)
        self._left = left
        if need.gpus > len(left):
            return np.zeros(len(self.is_candidate), np.bool_)
        kth = need.gpus - 1
        if self._order == "emptiest":
            self._loosest_mib = np.where(can, left, np.int32(-1)).max(axis=0)
            roomy: Bools = np.count_nonzero(can, axis=0) >= need.gpus
            return roomy
        self._loosest_mib = left.min(axis=0) if kth == 0 else np.partition(left, kth, axis=0)[kth]
        fits: Bools = self._loosest_mib != NEVER
        return fits

    @property
    def _total_mib(self) -> Ints:
        return self.fleet.total_mib[:, self.view.columns]

    @property
    def _heat(self) -> Ints:
        return self.fleet.heat[:, self.view.columns]

    def _fullness_and_heat(self) -> tuple[Ints, Ints]:
        """(nodes,) the most quarters left on a GPU that the pod takes a part of, and the highest heat class of the GPUs that it takes."""
        total_mib, heat = self._total_mib, self._heat
        if self._left is not None:
            rows, every = self._share_rows, np.arange(len(self.is_candidate))
            left = np.where(self._left == NEVER, np.int32(0), self._left)[rows, every]
            return quarters(left, total_mib[rows, every]).max(axis=0, initial=0), heat[rows, every].max(
                axis=0, initial=0
            )
        fullest, hottest = (np.zeros(len(self.is_candidate), np.int32) for _ in range(2))
        _, after = self._before_and_after()
        for rows in self._rows:
            left = quarters(after.free_mib[rows, self._live], total_mib[rows, self._live])
            fullest[self._live] = np.maximum(fullest[self._live], left.max(axis=0))
            hottest[self._live] = np.maximum(hottest[self._live], heat[rows, self._live].max(axis=0))
        for profile, wanted in self._profiles.items():
            taken, left = self._counts[profile].at(self._live).take(wanted)
            for worst, of_gpus in ((fullest, quarters(left, total_mib[:, self._live])), (hottest, heat[:, self._live])):
                worst[self._live] = np.maximum(worst[self._live], np.where(taken > 0, of_gpus, 0).max(axis=0))
        return fullest, hottest

    def _link_cost(self) -> npt.NDArray[np.int64]:
        """(nodes,) of the GPUs that one share or whole GPUs alone take; 0 for other pods."""
        cost, fit = np.zeros(len(self.is_candidate), np.int64), np.flatnonzero(self.fits)
        if self._left is not None:
            cost[fit] = self._nearest(fit, self._left != NEVER, self._bundles[0].need.gpus)[1]
        elif self._links_wholes:
            cost[fit] = self._nearest(fit, self._free_gpus.untouched, len(self._rows[-1]))[1]
        return cost

    @property
    def _links_wholes(self) -> bool:
        """Whether links choose the pod's whole GPUs: it has no share, whose GPUs a choice by links could take."""
        return self._order == "linked" and bool(self._wholes) and not self._bundles

    def _nearest(self, at: Columns, can: Bools, gpus: int) -> tuple[Columns, Ints]:
        """The set of GPUs with the best links on nodes `at`, and its cost. `can`: (GPUs, nodes in view) which may be taken."""
        costs = self.fleet.link_costs(self.names[node] for node in at.tolist())
        return nearest(costs, can[:, at], gpus)

    def _ranked(self, left: Ints) -> Ints:
        """Leftovers as numbers of which the smallest are taken first."""
        return np.where(left == NEVER, left, -left) if self._order == "emptiest" else left

    @cached_property
    def _share_rows(self) -> Columns:
        """(GPUs taken, nodes) ascending, of a pod that is one share; none where a node has too few GPUs."""
        left, wanted = self._left, self._bundles[0].need.gpus
        if left is None or wanted > len(left):
            return np.zeros((0, len(self.is_candidate)), np.intp)
        rows: Columns = np.sort(smallest(self._ranked(left), wanted), axis=0)
        return rows

    def _before_and_after(self) -> tuple[GpusOfNodes, GpusOfNodes]:
        """The GPUs before and after the pod, for a policy that evaluates them."""
        before = gpus_of(self.fleet, self.view.columns)
        if self._left is not None:
            return before, self._with_share(before, self._share_rows)
        after = self._without_cpu(before)
        for rows, need_or_whole in zip(self._rows, [*(b.need for b in self._bundles), None], strict=False):
            _debit(after, need_or_whole, rows, self._live)
        return before, after

    def _with_share(self, before: GpuArrays, rows: Columns) -> GpuArrays:
        """The same nodes when a pod that is one share has these rows."""
        after = self._without_cpu(before)
        _debit(after, self._bundles[0].need, rows, np.arange(rows.shape[1]))
        return after

    def _without_cpu(self, before: GpuArrays) -> GpuArrays:
        """A copy in which the CPU that the pod requests is no longer free."""
        mib, percent, cpu = before.free_mib.copy(), before.free_percent.copy(), np.int32(self.request.cpu_milli)
        return replace(before, free_mib=mib, free_percent=percent, cpu_milli=before.cpu_milli - cpu)

    def _displaced(self, gpus: tuple[GpusOfNodes, GpusOfNodes]) -> Displaced:
        """What the pod takes with it, by the GPUs before and after it."""
        (before, after), columns = gpus, self.view.columns
        shares, beyond = np.zeros(len(self.is_candidate)), np.zeros(len(self.is_candidate), np.int64)
        if self._bundles or self._wholes:
            weights, tenths = scarcity.of_gpus(self.fleet)
            pool = self.fleet.pool[:, columns]
            if self._left is not None:  # of one share only the GPUs that it takes are looked up
                pool = pool[self._share_rows, np.arange(pool.shape[1])]
                mib = np.full_like(pool, self._bundles[0].need.mib)
            else:
                mib = before.free_mib - after.free_mib
            shares = (mib * weights[pool]).sum(axis=0)
            if tenths is not None:
                beyond = ((mib > 0) * tenths[pool]).sum(axis=0)
        for profile, instances in self._instances.items():
            weights = scarcity.of_instances(self.fleet, profile)[self.fleet.pool[:, columns][:, self._live]]
            lost = self._counts[profile].lost
            each = weights if lost is None else weights + lost[:, self._live]
            shares[self._live] += (instances * each).sum(axis=0)
        return Displaced(shares, beyond)

    def _place_several(self, before: FreeGpus) -> Bools:
        """Shares, whole GPUs and MIG instances, on the nodes that no sum rules out. Returns (nodes,) whether all fit."""
        needs = [bundle.need for bundle in self._bundles]
        wholes = peak(self._wholes, lambda request: request.gpus)
        live = self._live = np.flatnonzero(self.fits_mig & _plausible(before, needs, wholes))
        free_gpus = before.at(live)
        after = FreeGpus(
            free_gpus.free_mib.copy(), free_gpus.free_percent.copy(), free_gpus.allowed, free_gpus.untouched
        )
        live_fits = self._take_tightest(after, needs, wholes)
        if len(self._rows) > 1 and len(needs) <= EXACT_CONTAINERS:
            stuck = np.flatnonzero(~live_fits)
            live_fits[stuck] = self._take_exactly(free_gpus.at(stuck), after, needs, wholes, stuck)
        loosest, node_free = self._loosest(after), _node_free(after)
        for profile, wanted in self._profiles.items():
            taken, left_mib = self._counts[profile].at(live).take(wanted)
            self._instances[profile] = taken
            np.maximum(loosest, np.where(taken > 0, left_mib, 0).max(axis=0, initial=0), out=loosest)
            node_free += left_mib.sum(axis=0, dtype=np.int32)
        fits: Bools = np.zeros(len(self.is_candidate), np.bool_)
        self._node_free_mib = np.zeros(len(self.is_candidate), np.int32)
        fits[live], self._loosest_mib[live], self._node_free_mib[live] = live_fits, loosest, node_free
        return fits

    def _take_tightest(self, after: FreeGpus, needs: Sequence[GpuSet], wholes: int) -> Bools:
        """Each need on the tightest GPUs that fit it. Returns (live nodes,) whether all fit."""
        fits: Bools = np.ones(len(self._live), np.bool_)
        every, whole_rows = np.arange(len(self._live)), []
        if wholes:
            untouched = after.untouched
            if self._order == "coolest" and not needs:  # beside shares the choice could keep the pod from fitting
                untouched = among_equals(untouched, (self._heat[:, self._live],), wholes)
            rows, found = tightest(np.where(untouched, self._total_mib[:, self._live], NEVER), wholes)
            if self._links_wholes and found.any():
                rows[:, found] = self._nearest(self._live, self._free_gpus.untouched, wholes)[0][:, found]
            _debit(after, None, rows, every)
            whole_rows, fits = [rows], fits & found
        for need in needs:
            can = after.allowed & (after.free_mib >= need.mib) & (after.free_percent >= need.percent)
            rows, found = tightest(np.where(can, after.free_mib - np.int32(need.mib), NEVER), need.gpus)
            _debit(after, need, rows, every)
            self._rows.append(rows)
            fits &= found
        self._rows += whole_rows
        return fits

    def _take_exactly(
        self, free_gpus: FreeGpus, after: FreeGpus, needs: Sequence[GpuSet], wholes: int, stuck: Columns
    ) -> Bools:
        """Place again where the tightest GPUs led nowhere. Returns (stuck nodes,) where there was another way."""
        if not len(stuck):
            return np.zeros(0, np.bool_)
        fits, ways = pack(free_gpus, needs, wholes)
        after.free_mib[:, stuck], after.free_percent[:, stuck] = free_gpus.free_mib, free_gpus.free_percent
        wanted: list[GpuSet | None] = [*needs, None]
        for known, rows, need in zip(self._rows, ways, wanted, strict=False):
            known[:, stuck] = rows
            _debit(after, need, rows, stuck)
        return fits

    def _loosest(self, after: FreeGpus) -> Ints:
        """(live nodes,) left on the emptiest GPU taken; a GPU taken whole counts with its size."""
        loosest: Ints = np.zeros(len(self._live), np.int32)
        every = np.arange(len(self._live))
        for at, rows in enumerate(self._rows):
            free = after.free_mib if at < len(self._bundles) else self._total_mib[:, self._live]
            left = free[rows, every]
            np.maximum(loosest, left.max(axis=0), out=loosest)
        return loosest


def gpus_of(fleet: Fleet, columns: slice | Columns) -> GpuArrays:
    """As policies see them: those that may not be shared have nothing."""
    shared = fleet.shareable[:, columns]
    return GpuArrays(
        fleet.free_mib[:, columns] * shared, fleet.free_percent[:, columns], fleet.total_mib[:, columns] * shared,
        fleet.model[:, columns], fleet.free_cpu_milli[columns],
    )  # fmt: skip


def _node_free(free_gpus: FreeGpus) -> Ints:
    """(nodes,) free MiB on the GPUs that the pod may use."""
    counts = free_gpus.allowed & (free_gpus.free_mib > 0)
    free: Ints = np.add.reduce(np.where(counts, free_gpus.free_mib, np.int32(0)), axis=0, dtype=np.int32)
    return free


def _debit(after: FreeGpus | GpuArrays, need: GpuSet | None, rows: Columns, at: Columns) -> None:
    """Take the rows of a need, or whole GPUs, off the records of nodes `at`."""
    if need is None:
        after.free_mib[rows, at], after.free_percent[rows, at] = 0, 0
    else:
        after.free_mib[rows, at] -= np.int32(need.mib)
        after.free_percent[rows, at] -= np.int32(need.percent)


def _plausible(free_gpus: FreeGpus, needs: Sequence[GpuSet], wholes: int) -> Bools:
    """(nodes,) no sum rules the needs out: most nodes that are full are found here, cheaply."""
    plausible: Bools = _node_free(free_gpus) >= sum(need.mib * need.gpus for need in needs)
    if any(need.percent for need in needs):
        percent = np.where(free_gpus.allowed, free_gpus.free_percent, np.int32(0)).clip(min=0).sum(axis=0)
        plausible &= percent >= sum(need.percent * need.gpus for need in needs)
    if wholes:
        plausible &= np.count_nonzero(free_gpus.untouched, axis=0) >= wholes
    for need in needs:
        can = free_gpus.allowed & (free_gpus.free_mib >= need.mib) & (free_gpus.free_percent >= need.percent)
        plausible &= np.count_nonzero(can, axis=0) >= need.gpus
    return plausible
