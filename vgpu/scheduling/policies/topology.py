"""Topology: several GPUs where they are linked best; one GPU where its loss hurts such sets least. Else it packs."""

from __future__ import annotations

from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores


def topology(outcome: PlacementOutcome) -> Scores:
    """Keys: cost of the links, then as `binpack`."""
    return outcome.link_cost(), outcome.loosest_mib, outcome.node_free_mib
