"""Cool: the GPU that was cooler in the last minutes, among those that are about equally full; else it packs."""

from __future__ import annotations

from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores


def cool(outcome: PlacementOutcome) -> Scores:
    """Keys: quarters left on the emptiest GPU taken, the highest heat class of the GPUs taken, then as `binpack`."""
    fullness, heat = outcome.fullness_and_heat()
    return fullness, heat, outcome.loosest_mib, outcome.node_free_mib
