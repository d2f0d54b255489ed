"""Fragmentation: cost the cluster's own pods least of the capacity that they could still use, in coarse steps; among equals, pack.

Three costs, in GPUs, are added up:

    unusable    the share of idle GPUs that a pod like those seen could not use, expected over the mix of pods: the measure of FGD
                (Weng et al., USENIX ATC '23)
    stranded    idle GPUs that the node's CPU will not suffice for
    displaced   the GPUs and MIG instances that the pod takes, each counted by how scarce its pool (the model, on nodes with the same
                labels and taints as far as pods name them) is for the pods that can go nowhere else

Small differences are noise of the mix, and following them leaves many GPUs half full: steps of a good part of a GPU and a packing
key below them do better (bench/placement/openb.csv). But a small share costs less than a step wherever it goes. So of nodes in the same step
those come first whose labels and taints make them less scarce than others with the same models (bench/placement/pools.csv).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores

STEP_GPUS: Final = 0.2
"""Costs that differ by less than this count as equal. Measured on the openb lists."""


def fragmentation(outcome: PlacementOutcome) -> Scores:
    """Keys: cost, in steps; how scarce the GPUs' pools are among those of their models; then as `binpack`; then the least CPU left."""
    before, after = outcome.gpus
    distribution = outcome.distribution
    unusable, stranded = distribution.wasted(after, outcome.kind)
    unusable_before, stranded_before = distribution.wasted(before)
    wasted = unusable - unusable_before + stranded - stranded_before
    displaced, beyond = outcome.displace(outcome.gpus)
    return (
        np.rint((wasted + displaced) / STEP_GPUS),
        beyond,
        outcome.loosest_mib,
        outcome.node_free_mib,
        after.cpu_milli,
    )
