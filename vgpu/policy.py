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
    """How the nodes would look after the pod is placed on them. What it says of a node that does not fit means nothing."""

    loosest_mib: Ints
    """(nodes,) left after the pod on the roomiest card that it would take; a card taken whole counts with its size."""
    node_free_mib: Ints
    """(nodes,) left after the pod on all cards that it may use."""


Policy: TypeAlias = Callable[[Outcome], Scores]


def binpack(outcome: Outcome) -> Scores:
    """The tightest GPU; among equals the node that is left with least."""
    scores: Scores = (outcome.loosest_mib.astype(np.int64) << SHIFT) + outcome.node_free_mib
    return scores


POLICIES: Final[Mapping[str, Policy]] = {"binpack": binpack}
"""Every policy a pod may name in its placement annotation."""
