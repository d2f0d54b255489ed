"""Fit several containers onto the GPUs of many nodes at once, exactly.

Taking the tightest GPU for one container after another is quick and packs well, and sometimes ends without a solution:
on GPUs with 60 and 40 free, requests of 30, 40 and 30 go to 40, 60 and nowhere. `pack` finds a way whenever there is one. It
knows numbers only: no names, no policies, and not which of several ways is best.

It walks the GPUs once. Before each GPU a state counts the GPUs that each container still needs; a GPU serves a set of the
containers, or is taken whole. Each state carries one bool per node, so that all nodes are walked together. The states number
(GPUs + 1) ** containers at most, which is why `placement` calls it for few containers only.

Units and shapes
    mib, percent    as in `fleet`
    arrays          (GPUs, nodes)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from vgpu.scheduling.fleet import Bools, Columns, Ints

Wanted: TypeAlias = tuple[int, ...]
"""GPUs that each need still lacks, and last the number of whole GPUs still lacking."""


@dataclass(frozen=True, slots=True)
class GpuSet:
    """GPUs wanted, all different, and what is wanted of each."""

    gpus: int
    mib: int
    percent: int


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """What is free on the nodes in question."""

    free_mib: Ints
    free_percent: Ints
    allowed: Bools
    """The pod may have a share of it."""
    untouched: Bools
    """The pod may have all of it, and no pod has any of it."""

    def at(self, columns: Columns) -> FreeGpus:
        """A copy, of these nodes only."""
        return FreeGpus(
            self.free_mib[:, columns], self.free_percent[:, columns],
            self.allowed[:, columns], self.untouched[:, columns],
        )  # fmt: skip


def pack(free_gpus: FreeGpus, needs: Sequence[GpuSet], wholes: int) -> tuple[Bools, list[Columns]]:
    """GPUs for every need, and `wholes` untouched GPUs besides that no need shares.

    Returns (nodes,) whether there is a way; and per need, then for the wholes, the rows (GPUs of it, nodes), which mean
    something where there is a way. Two needs may share a GPU that has enough free for both.
    """
    gpus, nodes = free_gpus.free_mib.shape
    serves = _serves(free_gpus, needs)
    want: Wanted = (*(need.gpus for need in needs), wholes)
    layers = _walk(serves, want, gpus, nodes)
    done = (0,) * len(want)
    fits: Bools = layers[-1].get(done, np.zeros(nodes, np.bool_))
    taken = _walk_back(serves, layers, {done: fits})
    return fits, [_rows(taken[at], count) for at, count in enumerate(want)]


def _serves(free_gpus: FreeGpus, needs: Sequence[GpuSet]) -> dict[Wanted, Bools]:
    """What one GPU may serve (0 or 1 of each need, or one whole) -> (GPUs, nodes) whether it can. Most served first."""
    serves: dict[Wanted, Bools] = {(*(0 for _ in needs), 1): free_gpus.untouched}
    for part in sorted(product((0, 1), repeat=len(needs)), key=lambda part: (-sum(part), part)):
        mib = sum(need.mib for need, served in zip(needs, part, strict=True) if served)
        percent = sum(need.percent for need, served in zip(needs, part, strict=True) if served)
        if any(part):
            serves[*part, 0] = free_gpus.allowed & (free_gpus.free_mib >= mib) & (free_gpus.free_percent >= percent)
        else:
            serves[*part, 0] = np.ones_like(free_gpus.allowed)
    return {served: can for served, can in serves.items() if can.any()}


def _walk(serves: dict[Wanted, Bools], want: Wanted, gpus: int, nodes: int) -> list[dict[Wanted, Bools]]:
    """Before each GPU and after the last: the states that can be reached, with (nodes,) where."""
    layers: list[dict[Wanted, Bools]] = [{want: np.ones(nodes, np.bool_)}]
    for row in range(gpus):
        after: dict[Wanted, Bools] = {}
        for state, reached in layers[-1].items():
            for served, left in _steps(serves, state, gpus - row - 1):
                reach = reached & serves[served][row]
                if reach.any():
                    after[left] = after[left] | reach if left in after else reach
        layers.append(after)
    return layers


def _steps(serves: dict[Wanted, Bools], state: Wanted, gpus_left: int) -> Iterator[tuple[Wanted, Wanted]]:
    """(what the GPU serves, what is still wanted then), where the GPUs left can still give it."""
    for served in serves:
        left = tuple(wanted - part for wanted, part in zip(state, served, strict=True))
        if min(left) >= 0 and left[-1] + max(left[:-1], default=0) <= gpus_left:
            yield served, left


def _walk_back(
    serves: dict[Wanted, Bools], layers: list[dict[Wanted, Bools]], ends: dict[Wanted, Bools]
) -> list[Bools]:
    """One way from the first layer to `ends`. Returns per part of the state (GPUs, nodes) whether the GPU serves it."""
    gpus, nodes = len(layers) - 1, len(next(iter(layers[0].values())))
    taken: list[Bools] = [np.zeros((gpus, nodes), np.bool_) for _ in next(iter(layers[0]))]
    for row in range(gpus - 1, -1, -1):
        before: dict[Wanted, Bools] = {}
        for state, here in ends.items():
            rest = here
            for served in serves:
                came_from = tuple(wanted + part for wanted, part in zip(state, served, strict=True))
                if came_from not in layers[row]:
                    continue
                took = rest & layers[row][came_from] & serves[served][row]
                rest = rest & ~took
                before[came_from] = before[came_from] | took if came_from in before else took
                for at in np.flatnonzero(served):
                    taken[at][row] |= took
        ends = before
    return taken


def _rows(taken: Bools, count: int) -> Columns:
    """The rows of the `count` GPUs taken on each node, (count, nodes)."""
    if count > len(taken):
        return np.zeros((count, taken.shape[1]), np.intp)
    rows: Columns = np.argsort(~taken, axis=0, kind="stable")[:count]
    return rows
