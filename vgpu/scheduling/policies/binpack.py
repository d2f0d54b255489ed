"""Pack: the tightest GPU, so that large pieces stay whole; among equals the node that is left with least."""

from __future__ import annotations

from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores


def binpack(outcome: PlacementOutcome) -> Scores:
    """Keys: MiB left on the loosest GPU taken, then MiB left on the node."""
    return outcome.loosest_mib, outcome.node_free_mib
