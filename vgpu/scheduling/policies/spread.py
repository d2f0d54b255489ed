"""Spread: the emptiest GPU of the emptiest node, so that neighbours disturb each other least and a lost node costs least."""

from __future__ import annotations

from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores


def spread(outcome: PlacementOutcome) -> Scores:
    """Keys: the most MiB left on the GPU taken, then the most on the node."""
    return -outcome.loosest_mib, -outcome.node_free_mib
