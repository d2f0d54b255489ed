"""GPUs of each model: how many may be shared out, how large they are, and how much of them is free.

Kept beside the arrays of `fleet`, change by change, so that nobody has to add up 80,000 GPUs for one pod.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass
class Capacity:
    """By the fleet's code of the model. Memory in MiB."""

    gpus: list[int] = field(default_factory=list)
    total_mib: list[int] = field(default_factory=list)
    free_mib: list[int] = field(default_factory=list)

    def know(self, model: int) -> None:
        """There is such a model, perhaps on no GPU that may be shared out."""
        short = model + 1 - len(self.gpus)
        for counts in (self.gpus, self.total_mib, self.free_mib):
            counts.extend([0] * short)

    def add(self, model: int, total_mib: int) -> None:
        """A GPU that is wholly free, of a known model."""
        self.gpus[model] += 1
        self.total_mib[model] += total_mib
        self.free_mib[model] += total_mib

    def remove(self, model: int, total_mib: int, free_mib: int) -> None:
        """A GPU that is no longer there; `free_mib` of it were free."""
        self.gpus[model] -= 1
        self.total_mib[model] -= total_mib
        self.free_mib[model] -= free_mib

    def debit(self, model: int, mib: int) -> None:
        """So much is no longer free; less than nothing is given back."""
        self.free_mib[model] -= mib

    def gpu_mib(self) -> Floats:
        """(models,) memory of a GPU, 0 where there is none."""
        size: Floats = np.array(self.total_mib, float) / np.maximum(np.array(self.gpus, float), 1)
        return size

    def free_gpus(self) -> Floats:
        """(models,) free memory in GPUs: two that are half free count as one."""
        free: Floats = np.maximum(np.array(self.free_mib, float), 0) / np.maximum(self.gpu_mib(), 1)
        return free
