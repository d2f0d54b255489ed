"""GPUs of each pool (`pools`): how many may be shared out, how large they are, and how much of them is free.

Kept beside the arrays of `fleet`, change by change, so that 80,000 GPUs are not added up for each pod.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass
class PoolCapacity:
    """By number of the pool. Memory in MiB."""

    gpus: list[int] = field(default_factory=list)
    total_mib: list[int] = field(default_factory=list)
    free_mib: list[int] = field(default_factory=list)

    def know(self, pool: int) -> None:
        """There is such a pool, perhaps without a GPU that may be shared out."""
        short = pool + 1 - len(self.gpus)
        for counts in (self.gpus, self.total_mib, self.free_mib):
            counts.extend([0] * short)

    def add(self, pool: int, total_mib: int) -> None:
        """A GPU that is wholly free, of a known pool."""
        self.gpus[pool] += 1
        self.total_mib[pool] += total_mib
        self.free_mib[pool] += total_mib

    def remove(self, pool: int, total_mib: int, free_mib: int) -> None:
        """A GPU that is no longer there; `free_mib` of it were free."""
        self.gpus[pool] -= 1
        self.total_mib[pool] -= total_mib
        self.free_mib[pool] -= free_mib

    def debit(self, pool: int, mib: int) -> None:
        """So much is no longer free; a negative amount is free again."""
        self.free_mib[pool] -= mib

    def count(self, pools: int, pool: Ints, total_mib: Ints, free_mib: Ints) -> None:
        """Begin anew with these GPUs, all that may be shared out. `pools`: how many pools there are."""
        for counts, of_each in ((self.gpus, None), (self.total_mib, total_mib), (self.free_mib, free_mib)):
            counts[:] = np.bincount(pool, of_each, pools).astype(np.int64).tolist()

    def gpu_mib(self) -> Floats:
        """(pools,) memory of a GPU, 0 where there is none."""
        size: Floats = np.array(self.total_mib, float) / np.maximum(np.array(self.gpus, float), 1)
        return size

    def free_gpus(self) -> Floats:
        """(pools,) free memory in GPUs: two that are half free count as one."""
        free: Floats = np.maximum(np.array(self.free_mib, float), 0) / np.maximum(self.gpu_mib(), 1)
        return free
