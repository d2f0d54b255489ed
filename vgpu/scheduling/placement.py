"""Choose a node and its GPUs for one pod.

This is the only module that decides where a pod is placed. It is pure: it reads a `Fleet`, answers with a `Placement` or the
reason why not, and never touches Kubernetes, NVML, the clock or a random number. The same fleet and request give the same answer.

All candidates are tried at once, on copies of their columns (`feasibility`). The best is the one with the lowest keys of the
pod's policy, then the one with the smallest name; a pod with preferences of its own takes, of those in the best grade, one that
it prefers (`policies.registry`). `feasibility` documents what is guaranteed about fitting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.api.grant import Assignment
from vgpu.api.request import PodRequest
from vgpu.scheduling.feasibility import FeasibilityTable
from vgpu.scheduling.fleet import Bools, CandidateNodes, Columns, Fleet
from vgpu.scheduling.mig_stock import NONE
from vgpu.scheduling.nodes.name_index import Quoted
from vgpu.scheduling.nodes.nodes_by_column import NodesByColumn
from vgpu.scheduling.policies.outcome import Scores
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.policies.scheduler import BEST, scheduler
from vgpu.scheduling.preferences import Preferences, liking
from vgpu.scheduling.table_cache import empty_of, empty_of_all, table_of_all

NO_INVENTORY: Final = "node has no GPUs that Tangram shares"
TOO_LARGE: Final = "no GPU of the node is large enough or of an allowed model"
TOO_FEW: Final = "node has too few GPUs that are large enough and of an allowed model"
NO_SINGLE_GPU: Final = "no single GPU has enough free gpu-mem and gpu-core"
NO_WHOLE: Final = "too few GPUs are wholly free"
NO_MIG: Final = "too few free MIG instances of the profile"
NO_MIG_ROOM: Final = "no GPU has room for another MIG instance of the profile beside those in use"
NO_MIG_EVER: Final = "node has no such MIG instances"
WITHDRAWN: Final = "a GPU of the node is cordoned or withdrawn, and the pod does not fit the others"
IN_MIG_MODE: Final = (
    "a GPU of the node is in MIG mode and is neither shared nor given whole, and the pod does not fit the others"
)
WHOLE_ONLY: Final = "a GPU of the node has coherent memory, on which no memory limit is enforced, and is given whole only, and the pod does not fit the others"
LIMITS: Final = (
    "on each GPU that has room for the guarantee, memory limits would add up to more than burst.overcommit allows"
)
SWAP_RISK: Final = "a pod of the same size is starting on another GPU of the node"

UNRESOLVABLE: Final = frozenset({NO_INVENTORY, WITHDRAWN, IN_MIG_MODE, WHOLE_ONLY, TOO_LARGE, TOO_FEW, NO_MIG_EVER})
"""Reasons that no eviction can help against: the pod would not fit if the node were empty."""

GUESSES: Final = 4
"""Nodes that are looked for among the candidates before all candidates are looked up. Guessed: each takes a tenth of that."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod is placed."""

    node: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class NoFit:
    """Why a pod fits nowhere."""

    nodes: dict[str, Sequence[str]] = field(default_factory=dict)
    """One of the constant reasons above -> the nodes that it applies to, each once."""

    @property
    def reasons(self) -> dict[str, str]:
        """Node -> reason."""
        return {node: reason for reason, nodes in self.nodes.items() for node in nodes}


def place(
    fleet: Fleet,
    request: PodRequest,
    candidates: Iterable[str],
    only: Mapping[str, Set[str]] | None = None,
    preferences: Preferences | None = None,
) -> Placement | NoFit:
    """The best node among `candidates` and the GPUs there, or why there is none.

    `only` narrows a node's GPUs to the UUIDs given: a pod of the same size is starting there, and the kubelet may swap
    the two pods' devices.
    """
    every_node = None
    if not preferences and isinstance(candidates, Quoted):
        found = _best_if_named(fleet, request, candidates, only)
        if isinstance(found, Placement):
            return found
        every_node = found
    policy, looked_up = POLICIES[request.policy], _look_up(fleet, candidates)
    if every_node is not None and 2 * len(looked_up.columns) >= fleet.width:
        return _no_fit(every_node, looked_up, only)
    table = FeasibilityTable(fleet, request, looked_up, only, order=policy.order)
    if not table.fits.any():
        return _no_fit(table, looked_up, only)
    fit, outcome = np.flatnonzero(table.fits), table.outcome()
    scores = policy.score(outcome)
    if preferences:
        fit = _lowest(policy.grade(outcome, scores, fit), fit)
        if len(fit) > 1:  # else nothing is to be weighed
            liked = liking(preferences, fleet, table.view.in_fleet(fit))
            fit = fit[liked == liked.max()]
    best = _best(table, scores, fit)
    return Placement(table.names[best], table.assignment(best))


def _best_if_named(
    fleet: Fleet, request: PodRequest, candidates: Quoted, only: Mapping[str, Set[str]] | None
) -> Placement | FeasibilityTable | None:
    """The best candidate, looked for from the other end: of all nodes the best, or one of the next, is mostly a candidate.

    Finding every name takes as long as everything else. Names that are not in the call are not read, so that a list which is none in other
    places is answered too. If the pod fits no node at all, the answer is the table of all nodes. None where this does not settle it.
    """
    every_node, policy = fleet.all_if_most(candidates), POLICIES[request.policy]
    if every_node is None:
        return None
    table = None if only else table_of_all(fleet, request, policy.order)
    if table is None:
        table = FeasibilityTable(fleet, request, every_node, only, order=policy.order)
    fit = np.flatnonzero(table.fits)
    if not len(fit):
        return table
    scores = policy.score(table.outcome())
    for _ in range(min(GUESSES, len(fit))):
        best = _best(table, scores, fit)
        if candidates.contains_literally(table.names[best]):
            return Placement(table.names[best], table.assignment(best))
        fit = fit[fit != best]
    return None


def _best(table: FeasibilityTable, scores: Scores, fit: Columns) -> int:
    """Of some nodes, the one with the lowest scores and then the smallest name."""
    for key in scores:
        fit = _lowest(key, fit)
    best: int = min(fit.tolist(), key=table.names.__getitem__)
    return best


def fitting(
    fleet: Fleet, request: PodRequest, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> list[str]:
    """Every candidate that fits."""
    table = FeasibilityTable(fleet, request, _look_up(fleet, candidates), only)
    return list(compress(table.names, table.fits.tolist()))


def rate(
    fleet: Fleet, request: PodRequest, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> dict[str, int]:
    """Candidate that fits -> 0 to 10, how good it is for the GPU, by the policy `scheduler`."""
    table = FeasibilityTable(fleet, request, _look_up(fleet, candidates), only)
    rating = (BEST - scheduler(table.outcome())[0]).astype(int).tolist()
    return {name: rated for name, rated, fits in zip(table.names, rating, table.fits.tolist(), strict=False) if fits}


def spare(fleet: Fleet, candidates: Iterable[str]) -> dict[str, int]:
    """Candidate -> 0 to 10, how good it is for a pod without a GPU: one less for each GPU that such pods may leave without CPU.

    Free pieces of several GPUs add up, and MIG instances count with the memory that they have.
    """
    looked_up = _look_up(fleet, candidates)
    free_mib = np.where(fleet.shareable, fleet.free_mib, 0) + fleet.stock.free_mib()
    gpus = (free_mib / np.maximum(fleet.total_mib, 1)).sum(axis=0)[looked_up.columns]
    rating = np.maximum(BEST - np.ceil(gpus.round(6)), 0).astype(int).tolist()  # tenths need not add up to 1 exactly
    names = [fleet.names[at] for at in looked_up.columns.tolist()]
    return dict.fromkeys(looked_up.unknown, BEST) | dict(zip(names, rating, strict=True))


def _look_up(fleet: Fleet, candidates: Iterable[str]) -> CandidateNodes:
    return fleet.look_up(candidates if isinstance(candidates, Sequence) else tuple(candidates))


def _lowest(key: npt.NDArray[Any], nodes: Columns) -> Columns:
    """Of some nodes, those with the lowest key."""
    keys = key[nodes]
    lowest: Columns = nodes[keys == keys.min()]
    return lowest


def explain(
    fleet: Fleet, request: PodRequest, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> dict[str, str]:
    """Per candidate that cannot take the pod, the reason; those that can are left out."""
    looked_up = _look_up(fleet, candidates)
    return _no_fit(FeasibilityTable(fleet, request, looked_up, only), looked_up, only).reasons


def _among(names: Set[str], fleet: Fleet, table: FeasibilityTable) -> Bools:
    """(nodes in view,) which of them have these names."""
    marked = np.zeros(fleet.width, np.bool_)
    marked[[fleet.column[name] for name in names]] = True
    in_view: Bools = marked[table.view.columns]
    return in_view


def _no_fit(table: FeasibilityTable, looked_up: CandidateNodes, only: Mapping[str, Set[str]] | None) -> NoFit:
    """Per candidate that does not fit, the reason that helps most. The table has the candidates in view, or all columns of the fleet."""
    fleet, request = table.fleet, table.request
    every = 2 * len(looked_up.columns) >= fleet.width
    full, bare = ~table.fits, request
    if every:
        candidate = np.zeros(fleet.width, np.bool_)
        candidate[looked_up.columns] = True
        full &= candidate
    if request.limits_mib:
        bare = replace(request, limits_mib=())
    empty = empty_of_all(fleet, bare) if every else empty_of(fleet, bare, looked_up)
    now = FeasibilityTable(fleet, request, looked_up) if only else table
    unlimited = table if fleet.limits.overcommit is None else FeasibilityTable(fleet, request, looked_up, limited=False)
    most_mib = max((part.mib for part in request.containers), default=0)
    large_enough = {name for name, mib in fleet.in_mig_mode.items() if mib >= most_mib}
    shares = any(part.kind == "share" for part in request.containers)
    unshared = {name for name, mib in fleet.unshared.items() if shares and mib >= most_mib}
    found = [
        (NO_INVENTORY, (fleet.model[:, table.view.columns] < 0).all(axis=0)),
        (WITHDRAWN, ~empty.fits & _among(fleet.withdrawn, fleet, table)),
        (NO_MIG_EVER, ~empty.fits & ~empty.fits_mig),
        (IN_MIG_MODE, ~empty.fits & _among(large_enough, fleet, table)),
        (WHOLE_ONLY, ~empty.fits & _among(unshared, fleet, table)),
        (TOO_LARGE, ~empty.fits & ~empty.fits_largest),
        (TOO_FEW, ~empty.fits),
        (SWAP_RISK, now.fits),
        (LIMITS, unlimited.fits),
        (NO_MIG_ROOM, ~now.fits_mig & (fleet.stock.number[:, table.view.columns] != NONE).any(axis=0)),
        (NO_MIG, ~now.fits_mig),
        (NO_WHOLE if any(part.kind == "whole" for part in request.containers) else NO_SINGLE_GPU, full),
    ]
    nodes: dict[str, Sequence[str]] = {}
    for reason, applies in found:
        here = full & applies
        if here.any():
            nodes[reason] = NodesByColumn(fleet.column_names, table.view.in_fleet(np.flatnonzero(here)))
            full &= ~here
    if looked_up.unknown:
        nodes[NO_INVENTORY] = [*nodes.get(NO_INVENTORY, ()), *dict.fromkeys(looked_up.unknown)]
    return NoFit(nodes)
