"""Which of the nodes that fit is best, and which of a node's GPUs: the table of policies.

To add a policy, write a file in `vgpu/scheduling/policies` with a function of `PlacementOutcome` that returns keys, (nodes,) each, lower is better,
and give it a row here. Ties are broken by node name, never at random: the same fleet and request give the same answer.

The pod's own preferences for its node (`preferences`) decide among nodes that are equally good for the GPU. What counts as equal is
the policy's grade: its first key, or a coarser form of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy.typing as npt

from vgpu.scheduling.fleet import Columns
from vgpu.scheduling.policies.binpack import binpack
from vgpu.scheduling.policies.cool import cool
from vgpu.scheduling.policies.fragmentation import fragmentation
from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores
from vgpu.scheduling.policies.scheduler import scheduler
from vgpu.scheduling.policies.spread import spread
from vgpu.scheduling.policies.topology import topology

Order = Literal["tightest", "emptiest", "linked", "coolest"]
"""Which GPUs of a node a share takes: those left with least, those left with most, those with the best links, or of those that are about equally
full the coolest. A pod of whole GPUs alone takes the coolest too."""


Grade = npt.NDArray[Any]
"""(nodes,) lower is better."""

GRADES_OF_A_GPU: Final = 4
"""Leftovers in the same quarter of a GPU count as equal. Guessed: coarse enough that replicas spread,
fine enough that none of them opens an idle GPU while one in use has enough free."""


def first_key(_: PlacementOutcome, scores: Scores, __: Columns) -> Grade:
    """For policies whose first key is coarse as it is."""
    grade: Grade = scores[0]
    return grade


def quarters(outcome: PlacementOutcome, scores: Scores, fit: Columns) -> Grade:
    """For policies whose first key is memory: in quarters of the largest GPU of the nodes that fit.

    The step is the same for all of them, so the grade never contradicts the key: the node that is best by the key is in the best
    grade. Steps of each node's own largest GPU would not do: 1 MiB left of 3 is less than a half, 0 MiB left of 2 is nothing.
    """
    before, _ = outcome.gpus
    largest = max(int(before.total_mib[:, fit].max(initial=0)), 1)
    grade: Grade = scores[0] * GRADES_OF_A_GPU // largest
    return grade


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """A row of the table."""

    score: Callable[[PlacementOutcome], Scores]
    order: Order = "tightest"
    """Of pods with one container that requests GPUs; those with several take the tightest, which always fit."""
    grade: Callable[[PlacementOutcome, Scores, Columns], Grade] = first_key
    """What must be equal before the pod's own preferences count, of the nodes that fit: a function of the first key that never falls when the
    key rises. Computed for pods with preferences only."""
    lists: bool = False
    """Are all nodes that fit answered, and kube-scheduler's own preferences decide?"""


POLICIES: Final[Mapping[str, PlacementPolicy]] = {
    "binpack": PlacementPolicy(binpack, grade=quarters),
    "spread": PlacementPolicy(spread, "emptiest", quarters),
    "fragmentation": PlacementPolicy(fragmentation),
    "topology": PlacementPolicy(topology, "linked"),
    "cool": PlacementPolicy(cool, "coolest"),
    "scheduler": PlacementPolicy(scheduler, lists=True),
}
"""Every policy a pod may name in its placement annotation."""
