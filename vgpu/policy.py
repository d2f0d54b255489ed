"""Which of the nodes that fit is best, and which of a node's cards: the table of policies.

To add a policy, write a file in `vgpu/policies` with a function of `Outcome` that returns keys, (nodes,) each, lower is better,
and give it a row here. Ties are broken by node name, never at random: the same fleet and ask give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vgpu.outcome import Outcome, Scores
from vgpu.policies.binpack import binpack
from vgpu.policies.fragmentation import fragmentation
from vgpu.policies.spread import spread
from vgpu.policies.topology import topology

Order = Literal["tightest", "roomiest", "linked"]
"""Which cards of a node a share takes: those left with least, those left with most, or those with the best links."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A row of the table."""

    score: Callable[[Outcome], Scores]
    order: Order = "tightest"
    """Of pods with one container that asks for GPUs; those with several take the tightest, which always fit."""


POLICIES: Final[Mapping[str, Policy]] = {
    "binpack": Policy(binpack),
    "spread": Policy(spread, "roomiest"),
    "fragmentation": Policy(fragmentation),
    "topology": Policy(topology, "linked"),
}
"""Every policy a pod may name in its placement annotation."""
