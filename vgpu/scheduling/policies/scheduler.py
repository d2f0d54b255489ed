"""Scheduler: kube-scheduler's own preferences decide among all nodes that fit; how full GPUs are is one score among them."""

from __future__ import annotations

from typing import Final

import numpy as np

from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores

BEST: Final = 10
"""The highest rating that an extender may give a node. Specified by kube-scheduler (MaxExtenderPriority)."""


def scheduler(outcome: PlacementOutcome) -> Scores:
    """Keys: tenths that stay free, half of the emptiest GPU taken and half of the node's GPUs; then as `binpack`."""
    before, _ = outcome.gpus
    largest, node = before.total_mib.max(axis=0), before.total_mib.sum(axis=0)
    free = outcome.loosest_mib / np.maximum(largest, 1) + outcome.node_free_mib / np.maximum(node, 1)
    return np.clip(np.rint(free * BEST / 2), 0, BEST), outcome.loosest_mib, outcome.node_free_mib
