"""Fragmentation: waste least of what the cluster's own pods could still use, in coarse steps; among equals, pack.

Waste is what the next pod could not use, and what the node's CPU will not suffice for.

The first measure is that of FGD (Weng et al., USENIX ATC '23): the share of idle GPUs that a pod like those seen could not use,
expected over the mix of pods. Small differences in it are noise of the mix, and following them leaves many cards half full:
steps of a good part of a GPU and a packing key below them do better (bench/placement/openb.csv).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from vgpu.outcome import Outcome, Scores

STEP_GPUS: Final = 0.2
"""Waste that differs by less than this counts as equal. Measured on the openb lists."""


def fragmentation(outcome: Outcome) -> Scores:
    """Keys: waste added, in steps; then as `binpack`; then the least CPU left."""
    before, after = outcome.cards
    mix = outcome.mix
    added = mix.unusable(after) - mix.unusable(before) + mix.stranded(after) - mix.stranded(before)
    return np.rint(added / STEP_GPUS), outcome.loosest_mib, outcome.node_free_mib, after.cpu_milli
