"""Which GPUs of a node a pod takes, as rows: the tightest, or among GPUs that are about equally full the coolest.

Units and shapes as in `fleet`. `wanted` is how many GPUs of one node are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from vgpu.scheduling.fleet import Bools, Columns, Ints

NEVER: Final = np.int32(np.iinfo(np.int32).max)
"""Leftover of a GPU that cannot take the request. Larger than any real leftover."""

QUARTERS: Final = 4
"""GPUs with the same number of quarters left count as equally full for `cool`. Guessed, as `GRADES_OF_A_GPU`: coarse enough that a cooler GPU is
mostly among them, fine enough that no idle GPU is opened while one in use has enough free."""


def smallest(ranked: Ints, wanted: int) -> Columns:
    """Rows of the smallest per node, (wanted, nodes), ties by row."""
    rows: Columns = (
        ranked.argmin(axis=0)[np.newaxis, :] if wanted == 1 else ranked.argsort(axis=0, kind="stable")[:wanted]
    )
    return rows


def tightest(left: Ints, wanted: int) -> tuple[Columns, Bools]:
    """Rows of the smallest of `left` per node, (wanted, nodes), ties by row; and (nodes,) whether all are real."""
    if wanted > len(left):
        return np.zeros((wanted, left.shape[1]), np.intp), np.zeros(left.shape[1], np.bool_)
    if wanted == 1:
        return left.argmin(axis=0)[np.newaxis, :], left.min(axis=0) != NEVER
    rows = left.argsort(axis=0, kind="stable")[:wanted]
    found: Bools = left[rows[-1], np.arange(left.shape[1])] != NEVER
    return rows, found


def quarters(left_mib: Ints, total_mib: Ints) -> Ints:
    """How many whole quarters of each GPU are left."""
    found: Ints = left_mib * np.int32(QUARTERS) // np.maximum(total_mib, np.int32(1))
    return found


def among_equals(can: Bools, keys: Sequence[Ints], wanted: int) -> Bools:
    """(GPUs, nodes) those of `can` among which `wanted` may be chosen freely, so that the highest value of each key is as low as possible.

    The first key decides before the second. A node with fewer than `wanted` keeps what it has.
    """
    if wanted > len(can):
        return can
    for key in keys:
        ranked = np.where(can, key, NEVER)
        kth = wanted - 1
        highest = ranked.min(axis=0) if kth == 0 else np.partition(ranked, kth, axis=0)[kth]
        can = can & (ranked <= highest)
    return can
