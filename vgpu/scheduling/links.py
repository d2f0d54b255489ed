"""How near a node's GPUs are to each other, and which set of them is nearest.

Cost of a pair: NVLink 0, the same NUMA node 1, unknown 2, different NUMA nodes 3. NVML's inventory names NVLinks and NUMA
nodes and not PCIe switches, so GPUs behind one switch count as on one NUMA node. A set costs the sum over its pairs.

Units and shapes: costs (GPUs, GPUs, nodes) int32; rows of a set (GPUs of it, nodes).
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.api.inventory import Gpu, Inventory

Ints: TypeAlias = npt.NDArray[np.int32]

NVLINK, SAME_NUMA, UNSAID, CROSS = range(4)

_NOT: Final = 10_000
"""Cost of a GPU that cannot be taken: above that of any set of real ones."""


def pair(one: Gpu, other: Gpu) -> int:
    """Cost of two different GPUs of a node."""
    if one.nvlinks.get(other.uuid) or other.nvlinks.get(one.uuid):
        return NVLINK
    if one.numa < 0 or other.numa < 0:
        return UNSAID
    return SAME_NUMA if one.numa == other.numa else CROSS


def costs_of(inventory: Inventory, rows: int) -> Ints:
    """(rows, rows) of a node's pairs; 0 on the diagonal and where there is no GPU."""
    costs: Ints = np.zeros((rows, rows), np.int32)
    for row, one in enumerate(inventory.gpus):
        for column, other in enumerate(inventory.gpus):
            if row != column:
                costs[row, column] = pair(one, other)
    return costs


def nearest(costs: Ints, can: npt.NDArray[np.bool_], gpus: int) -> tuple[npt.NDArray[np.intp], Ints]:
    """Rows of a near set of GPUs that can be taken, and its cost, (nodes,).

    From every GPU on, the GPU nearest to those taken is added; the best of these sets is the answer. One GPU costs how near
    the other free ones are to it: taking a well linked GPU leaves a worse set.
    """
    rows, nodes = can.shape
    every = np.arange(nodes)
    if gpus == 1:
        hurt = np.where(can, ((CROSS - costs) * can[np.newaxis]).sum(axis=1), np.int32(_NOT))
        chosen = hurt.argmin(axis=0)
        return chosen[np.newaxis, :], hurt[chosen, every].astype(np.int32)
    best = np.full(nodes, np.iinfo(np.int32).max, np.int32)
    best_rows = np.zeros((gpus, nodes), np.intp)
    for first in range(rows):
        taken = [np.full(nodes, first, np.intp)]
        total = np.where(can[first], 0, _NOT).astype(np.int32)
        to_set = np.where(can, costs[first], np.int32(_NOT))
        to_set[first] = 2 * _NOT
        for _ in range(gpus - 1):
            nearest_row = to_set.argmin(axis=0)
            total += to_set[nearest_row, every]
            to_set += costs[nearest_row, :, every].T
            to_set[nearest_row, every] = 2 * _NOT
            taken.append(nearest_row)
        better = total < best
        best = np.where(better, total, best)
        best_rows[:, better] = np.array(taken)[:, better]
    return best_rows, best
