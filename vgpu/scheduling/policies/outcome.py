"""What a policy reads: the nodes' state with the pod on them. It ranks nothing itself.

Its values for a node that does not fit mean nothing. Units and shapes as in `fleet`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.arrays import GpusOfNodes
from vgpu.scheduling.demand.request_distribution import RequestDistribution
from vgpu.scheduling.fleet import Ints

Scores: TypeAlias = tuple[npt.NDArray[Any], ...]
"""Keys by node, (nodes,) each, the most important first; lower is better."""


class Displaced(NamedTuple):
    """What the pod takes of the capacity for future requests (`scarcity`)."""

    gpus: npt.NDArray[np.float64]
    """(nodes,) GPUs and MIG instances."""
    beyond: npt.NDArray[np.int64]
    """(nodes,) how scarce the pools of the GPUs taken are among those of their models, summed over GPUs, in tenths of the average."""


@dataclass(frozen=True)
class PlacementOutcome:
    """The nodes' state after the pod is placed on them."""

    kind: Hashable
    """Equal for pods that take the same GPUs of the same nodes: what a policy works out for one may serve the next."""
    loosest_mib: Ints
    """(nodes,) left after the pod on the emptiest GPU that it would take; a GPU taken whole counts with its size."""
    node_free_mib: Ints
    """(nodes,) left after the pod on all GPUs that it may use."""
    distribution: RequestDistribution
    """What the cluster's pods request."""
    displace: Callable[[tuple[GpusOfNodes, GpusOfNodes]], Displaced]
    """By the GPUs before and after the pod."""
    link_cost: Callable[[], npt.NDArray[np.int64]]
    """(nodes,) how badly the GPUs taken are linked, or how much their loss hurts the others: see `links`."""
    fullness_and_heat: Callable[[], tuple[Ints, Ints]]
    """(nodes,) each: the most quarters of its memory that stay free on a GPU of which the pod takes a part, and the highest heat class
    (its number in `HEAT_CLASSES`) of the GPUs taken."""
    before_and_after: Callable[[], tuple[GpusOfNodes, GpusOfNodes]]
    """The GPUs before and after the pod. Copies, so made only for the policies that read them."""

    @cached_property
    def gpus(self) -> tuple[GpusOfNodes, GpusOfNodes]:
        """Before and after."""
        return self.before_and_after()
