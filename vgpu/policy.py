"""Which of the nodes that fit is best: one function a policy, lower is better.

To add a policy, write a function of `Outcome` that returns (nodes,) int64 and name it in `POLICIES`.
Ties are broken by node name, never at random: the same fleet and ask give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.fleet import Ints

Scores: TypeAlias = npt.NDArray[np.int64]

SHIFT: Final = np.int64(32)
"""Room for the second key below the first: free MiB of a node stay below 2**32."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the candidate nodes would look after the pod is placed on them. Columns are candidates."""

    free_mib: Ints
    """(cards, nodes) left after the pod, 0 on cards that it may not use."""
    loosest_mib: Ints
    """(nodes,) left after the pod on the roomiest card that it would take; a card taken whole counts with its size."""


Policy: TypeAlias = Callable[[Outcome], Scores]


def binpack(outcome: Outcome) -> Scores:
    """The tightest GPU; among equals the node that is left with least."""
    node_free = outcome.free_mib.clip(min=0).sum(axis=0, dtype=np.int64)
    scores: Scores = (outcome.loosest_mib.astype(np.int64) << SHIFT) + node_free
    return scores


POLICIES: Final[Mapping[str, Policy]] = {"binpack": binpack}
"""Every policy a pod may name in its placement annotation."""
