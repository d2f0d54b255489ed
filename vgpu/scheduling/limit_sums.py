"""What the memory limits on each GPU add up to, where `burst.overcommit` bounds that (`vgpu.api.overcommit`).

A GPU has free what its guarantees leave, and no more than its limits leave up to the bound: a pod needs both. The part of the first that the
second does not allow is withheld: `Fleet.free_mib` is without it. So whatever reads free memory keeps to the bound. Without a value all is 0.

Units and shapes as in `fleet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vgpu.api.grant import AssignedGpu
from vgpu.api.overcommit import bound_mib, limit_of, withheld_mib

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class LimitSums:
    """Of every GPU of a fleet.

    excess_mib    (GPUs, nodes) by how much limits exceed guarantees
    withheld_mib  (GPUs, nodes) of what guarantees leave, what no pod gets
    """

    def __init__(self, overcommit: float | None, shape: tuple[int, ...]) -> None:
        self.overcommit = overcommit
        self.excess_mib: Ints = np.zeros(shape, np.int32)
        self.withheld_mib: Ints = np.zeros(shape, np.int32)

    def change(self, place: tuple[int, int], total_mib: Ints, free_mib: Ints, mib: int, assigned: AssignedGpu) -> int:
        """A pod has this part of a GPU, of `mib`, or no longer (`mib` < 0). `free_mib`: before that. Returns how many MiB more are withheld."""
        if self.overcommit is None:
            return 0
        if assigned.limit_mib:
            excess_mib = limit_of(assigned) - assigned.mib
            self.excess_mib[place] += excess_mib if mib > 0 else -excess_mib
        before = int(self.withheld_mib[place])
        guarantees_leave = int(free_mib[place]) + before - mib
        now = withheld_mib(int(total_mib[place]), guarantees_leave, int(self.excess_mib[place]), self.overcommit)
        self.withheld_mib[place] = now
        return now - before

    def clear(self, at: int) -> None:
        """A column describes another node, or the same one anew."""
        self.excess_mib[:, at] = self.withheld_mib[:, at] = 0

    def grow(self, axis: int) -> None:
        """Twice as many GPUs or nodes."""
        self.excess_mib, self.withheld_mib = (
            np.concatenate([array, np.zeros_like(array)], axis=axis) for array in (self.excess_mib, self.withheld_mib)
        )

    def left_mib(self, total_mib: Any, free_mib: Any, at: Any) -> Any:
        """MiB that limits may still add up to on GPUs `at`, of which guarantees leave `free_mib`. Negative once the value was lowered."""
        overcommit = self.overcommit or 1.0
        bounds = np.array([bound_mib(mib, overcommit) for mib in np.unique(total_mib).tolist()], np.int64)
        bound = bounds[np.searchsorted(np.unique(total_mib), total_mib)]
        return bound - (np.int64(1) * total_mib - free_mib) - self.excess_mib[at]

    def allow(self, limits_mib: Sequence[int], total_mib: Ints, free_mib: Ints, *, view: Any, emptied: bool) -> Bools:
        """(GPUs, nodes in view) on which containers with these limits keep to the bound, all of them on one GPU.

        A limit that exceeds what guarantees leave counts as that: it is what the container gets. `emptied`: as if no pod had anything.
        """
        left = self.left_mib(total_mib, free_mib, (slice(None), view))
        if emptied:
            left = left + self.excess_mib[:, view]
        need = sum(np.minimum(free_mib.astype(np.int64), limit) for limit in limits_mib)
        allowed: Bools = np.asarray(need <= left)
        return allowed
