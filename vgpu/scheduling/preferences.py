"""What a pod prefers of its node, beside a GPU: preferred node affinity and soft topology spreading.

Weighs nodes as kube-scheduler's plugins NodeAffinity and PodTopologySpread do, with their weights in its default profile (2 each), to
the very number: the preferences rank nodes for a pod as kube-scheduler alone would. It never decides whether a pod fits: kube-scheduler has
enforced required constraints before.

Pods counted for spreading are those that the caller names, which request GPUs. Taints do not count nodes out (`nodeTaintsPolicy: Honor`
is read as `Ignore`). A preference for other pods' company (pod affinity) is not read.
Sources: pkg/scheduler/framework/plugins/{nodeaffinity,podtopologyspread,helper} of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.fleet import Bools, Columns, Fleet
from vgpu.scheduling.nodes.constraints import Term
from vgpu.scheduling.nodes.selectors import matches

Liking = npt.NDArray[np.int64]

MOST: Final = 100
"""Of one plugin. Specified by kube-scheduler (MaxNodeScore)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Few pods like this one in the node's domain."""

    key: str
    """Label that names the domain."""
    matching_pods: Mapping[str, int]
    """Node -> pods there that count."""
    max_skew: int = 1
    honors_affinity: bool = True
    """Do only pods on nodes count that this pod may go to?"""


@dataclass(frozen=True, slots=True)
class Preferences:
    """Of one pod. Falsy when it has none."""

    preferred: tuple[Term, ...] = ()
    spreads: tuple[Spread, ...] = ()
    required: tuple[tuple[Term, ...], ...] = field(default=())
    """What its node must have: of each group one term. Read only to find which pods count for spreading."""

    def __bool__(self) -> bool:
        return bool(self.preferred or self.spreads)


def liking(preferences: Preferences, fleet: Fleet, columns: Columns) -> Liking:
    """How well a pod likes each of these nodes, compared with one another: (columns,) 0 to 200, higher is better.

    Half each: both plugins have the same weight.
    """
    total = np.zeros(len(columns), np.int64)
    if preferences.preferred:
        total += _affinity(preferences.preferred, fleet, columns)
    if preferences.spreads:
        total += _spreading(preferences, fleet, columns)
    return total


def _affinity(terms: Sequence[Term], fleet: Fleet, columns: Columns) -> Liking:
    """The weights of the terms that match, in percent of the most."""
    weight = np.zeros(len(columns), np.int64)
    for term in terms:
        weight += term.weight * matches(term, fleet.labels, columns)
    most = int(weight.max(initial=0))
    return weight * MOST // most if most else weight


def _spreading(preferences: Preferences, fleet: Fleet, columns: Columns) -> Liking:
    """The fewer pods that count in a node's domains, the better; a node outside of any domain is worst."""
    codes = {spread.key: fleet.labels.key(spread.key).codes for spread in preferences.spreads}
    placed = _in_all(codes, columns)
    crowd = np.zeros(len(columns))
    for spread in preferences.spreads:
        here = codes[spread.key][columns]
        domains = np.count_nonzero(np.bincount(here[placed]))
        counts = _counts(spread, preferences.required, codes, fleet)
        crowd += counts[here] * np.log(domains + 2) + (spread.max_skew - 1)
    # halves away from zero, as Go rounds
    rounded = np.floor(crowd + 0.5).astype(np.int64)
    if not placed.any():
        return np.zeros(len(columns), np.int64)
    least, most = int(rounded[placed].min()), int(rounded[placed].max())
    liked = MOST * (most + least - rounded) // most if most else np.full(len(columns), MOST, np.int64)
    return np.where(placed, liked, 0)


def _counts(
    spread: Spread, required: Sequence[Sequence[Term]], codes: Mapping[str, npt.NDArray[np.int32]], fleet: Fleet
) -> npt.NDArray[np.float64]:
    """Pods that count, by the number of the domain; the last one is for nodes without a domain, which have -1."""
    column = fleet.column
    at = np.fromiter((column.get(node, -1) for node in spread.matching_pods), np.intp, len(spread.matching_pods))
    pods = np.fromiter(spread.matching_pods.values(), np.float64, len(spread.matching_pods))[at >= 0]
    at = at[at >= 0]
    count = _in_all(codes, at)
    if spread.honors_affinity:
        for group in required:
            count &= reduce(
                np.logical_or, [matches(term, fleet.labels, at) for term in group], np.zeros(len(at), np.bool_)
            )
    domains = len(fleet.labels.key(spread.key).numbers)
    return np.bincount(codes[spread.key][at[count]], pods[count], domains + 1).astype(np.float64)


def _in_all(codes: Mapping[str, npt.NDArray[np.int32]], columns: Columns) -> Bools:
    """Nodes that are in a domain of every kind."""
    found: Bools = np.ones(len(columns), np.bool_)
    for of_key in codes.values():
        found &= of_key[columns] >= 0
    return found
