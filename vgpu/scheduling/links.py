"""How near a node's GPUs are to each other, and which set of them is nearest.

Cost of a pair: NVLink 0, the same NUMA node 1, unknown 2, different NUMA nodes 3. NVML's inventory names NVLinks and NUMA
nodes and not PCIe switches, so GPUs behind one switch count as on one NUMA node. A set costs the sum over its pairs.

All sets are compared where a node's GPUs have at most `SETS_LIMIT` of the wanted size: any number of 8 GPUs, 2 of 16. Else the set grows from
each GPU, and may cost more than the best one.

Units and shapes: costs (GPUs, GPUs, nodes) int32; rows of a set (GPUs of it, nodes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import chain, combinations, product
from math import comb, prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.api.inventory import Gpu, Inventory

Ints: TypeAlias = npt.NDArray[np.int32]

NVLINK, SAME_NUMA, UNSAID, CROSS = range(4)

_NOT: Final = 10_000
"""Cost of a GPU that cannot be taken: above that of any set of real ones."""
SETS_LIMIT: Final = 128
"""Sets of GPUs of one size that are all compared. Guessed: 8 GPUs have 70 of four."""


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
    """Rows of the nearest set of GPUs that can be taken, and its cost, (nodes,). The cost of a node with fewer of them means nothing.

    Of equally near sets the one with the lowest rows. One GPU costs how near the other free ones are to it: taking a well linked GPU leaves a worse set.
    """
    if gpus == 1:
        hurt = np.where(can, ((CROSS - costs) * can[np.newaxis]).sum(axis=1), np.int32(_NOT))
        chosen = hurt.argmin(axis=0)
        return chosen[np.newaxis, :], hurt[chosen, np.arange(can.shape[1])].astype(np.int32)
    return (_of_all if comb(len(can), gpus) <= SETS_LIMIT else _grown)(costs, can, gpus)


def nearest_of_kinds(costs: Ints, kinds: Sequence[Hashable], taken: Sequence[int]) -> list[int]:
    """The nearest set of one node's GPUs with as many of each kind as `taken` has, rows ascending. `taken` itself if there are too many such sets.

    `costs`: (GPUs, GPUs). `kinds`: by row; equal for GPUs of which either may be taken; None = it cannot be taken.
    """
    wanted = Counter(kinds[row] for row in taken)
    rows = {kind: [row for row, its in enumerate(kinds) if its == kind] for kind in wanted}
    if len(taken) == 1 or prod(comb(len(rows[kind]), count) for kind, count in wanted.items()) > SETS_LIMIT:
        return list(taken)
    of_each_kind = (combinations(rows[kind], count) for kind, count in wanted.items())
    sets = (sorted(chain.from_iterable(parts)) for parts in product(*of_each_kind))
    return min(sets, key=lambda some: (sum(int(costs[pair_of]) for pair_of in combinations(some, 2)), some))


@lru_cache(maxsize=64)
def _sets(rows: int, gpus: int) -> npt.NDArray[np.intp]:
    """(sets, GPUs of a set) every set of rows."""
    return np.array(list(combinations(range(rows), gpus)), np.intp).reshape(-1, gpus)


def _of_all(costs: Ints, can: npt.NDArray[np.bool_], gpus: int) -> tuple[npt.NDArray[np.intp], Ints]:
    """The nearest of all sets."""
    sets = _sets(len(can), gpus)
    total = (~can[sets]).sum(axis=1, dtype=np.int32) * np.int32(_NOT)
    for one, other in combinations(range(gpus), 2):
        total += costs[sets[:, one], sets[:, other]]
    best = total.argmin(axis=0)
    return sets[best].T, total[best, np.arange(can.shape[1])]


def _grown(costs: Ints, can: npt.NDArray[np.bool_], gpus: int) -> tuple[npt.NDArray[np.intp], Ints]:
    """From every GPU on, the GPU nearest to those taken is added; the best of these sets is the answer."""
    rows, nodes = can.shape
    every = np.arange(nodes)
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
