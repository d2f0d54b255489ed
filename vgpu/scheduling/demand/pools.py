"""Node pools as the pods to come see them: GPUs that the same requests can use.

A pool is a model on the nodes of one class. Two nodes are of one class when every typical request that can use one of them can use the
other: no label that a request names distinguishes them, no taint that a request does not tolerate, no MIG profile that it needs
beside its GPU. So what is worked out by pool is true of each node of it, and a fleet whose requests name nothing has one class.

    requests -> constraints, the most demanded first -> class of each node -> pool of each GPU (`Fleet.pool`)

Nodes that changed are classified again at the next read. What is not bounded by the cluster is bounded here: constraints that
are left out count as if every node met them.

Units and shapes as in `fleet`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, reduce
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.nodes.constraints import ANYWHERE, REPELS, NodeConstraints, Taint, Term, Toleration
from vgpu.scheduling.nodes.labels import Labels
from vgpu.scheduling.nodes.selectors import Bools, Columns, matches

Ints = npt.NDArray[np.int32]
Masks = npt.NDArray[np.uint64]

MOST_CONSTRAINTS: Final = 64
"""That distinguish nodes: one bit each."""
MOST_CLASSES: Final = 256
"""Of nodes. Guessed: bounds the work of each placement, 0.1 ms for 512 requests."""
MOST_KEYS: Final = 64
"""Of labels that the constraints together may name. Guessed: a key that no pod has named yet takes 0.4 ms for 10,000 nodes."""
MOST_TAINTS: Final = 64
"""Different sets of taints. A node with another counts as without taints. Guessed: bounds the comparisons with tolerations."""
PASSING: Final = "node.kubernetes.io/"
"""Prefix of taints that the node controller sets and removes with the node's condition: they make no pool."""


class Offers(Protocol):
    """What the fleet reports of its nodes' GPUs."""

    def offers(self, profile: str, columns: Columns) -> Bools:
        """(columns,) which of the nodes have MIG instances of the profile, in use or not."""

    def shares(self, columns: Columns) -> Bools:
        """(columns,) which of the nodes have a GPU that may be shared out."""


class Pools:
    """The classes of nodes, and the pools.

    version     another number whenever pools, or what constraints admit, may have changed
    class_of    (columns,) class of each node
    """

    def __init__(self, labels: Labels, size: int) -> None:
        self._labels, self._column = labels, labels.column
        self.version = 0
        self.class_of: Ints = np.zeros(size, np.int32)
        self.models: list[int] = []
        """By pool: the fleet's code of its model."""
        self._classes: list[int] = []
        """By pool."""
        self._codes: dict[tuple[int, int], int] = {}
        """(model, class) -> pool."""
        self._masks: list[int] = [0]
        """By class: which constraints admit its nodes, a bit each."""
        self._ranked: Sequence[NodeConstraints] = ()
        self._chosen: dict[NodeConstraints, int] = {}
        """Constraints that distinguish nodes -> bit."""
        self._changed: set[int] = set()
        """Columns."""
        self._taints: dict[str, tuple[Taint, ...]] = {}
        """Of nodes that have some, in the fleet or not."""
        self._sets: dict[tuple[Taint, ...], int] = {(): 0}
        """Different sets of taints -> number."""
        self._set_of: Ints = np.zeros(size, np.int32)
        """(columns,) number of the node's taints."""

    def __len__(self) -> int:
        return len(self.models)

    @property
    def constraints(self) -> tuple[NodeConstraints, ...]:
        """Those that distinguish nodes, by bit."""
        return tuple(self._chosen)

    # --- what the fleet reports ---

    def taint(self, node: str, taints: Iterable[Taint]) -> None:
        """A node has these taints."""
        repel = tuple(sorted(one for one in taints if one.effect in REPELS and not one.key.startswith(PASSING)))
        if self._taints.get(node, ()) == repel:
            return
        if repel:
            self._taints[node] = repel
        else:
            del self._taints[node]
        if node in self._column:
            self.change(node)

    def change(self, node: str) -> None:
        """A node came to its column, or has other labels, taints or GPUs."""
        taints = self._taints.get(node, ())
        if taints not in self._sets:
            self._set_of[self._column[node]] = 0
            if len(self._sets) == MOST_TAINTS and self._some_set_is_unused():
                self._forget_sets()
        self._tainted(node, taints)

    def leave(self, at: int) -> None:
        """A column is empty."""
        self._changed.discard(at)
        self._set_of[at] = 0

    def _tainted(self, node: str, taints: tuple[Taint, ...]) -> None:
        at, known = self._column[node], taints in self._sets or len(self._sets) < MOST_TAINTS
        self._set_of[at] = self._sets.setdefault(taints, len(self._sets)) if known else 0
        if self._chosen or self._taints:
            self._changed.add(at)

    def _some_set_is_unused(self) -> bool:
        """Is a set of taints of no node any more? To number the sets anew takes 5 ms for 10,000 nodes, and this 0.02 ms."""
        return not np.bincount(self._set_of, minlength=len(self._sets))[1:].all()

    def _forget_sets(self) -> None:
        """Number the sets of taints anew."""
        self._sets = {(): 0}
        for node in sorted(self._taints):
            if node in self._column:
                self._tainted(node, self._taints[node])

    def grew(self, size: int) -> None:
        """There are so many columns now."""
        more = np.zeros(size - len(self.class_of), np.int32)
        self.class_of, self._set_of = np.concatenate([self.class_of, more]), np.concatenate([self._set_of, more])

    def pool(self, model: int, at: int) -> int:
        """The pool of a GPU of this model on the node in this column."""
        key = model, int(self.class_of[at])
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = len(self.models)
            self.models.append(model)
            self._classes.append(key[1])
            self.version += 1
        return code

    # --- classes ---

    def classify(self, ranked: Sequence[NodeConstraints], gpus: Offers) -> Collection[int] | None:
        """Bring the classes up to date. `ranked`: constraints of the requests, those for most GPUs first.

        Returns the columns whose class is another one now; None: any may be.
        """
        if ranked is not self._ranked:
            self._ranked, chosen = ranked, _few(ranked)
            if chosen != list(self._chosen):
                return self._all(chosen, gpus)
        if not self._changed:
            return ()
        if 4 * len(self._changed) > len(self._column):
            return self._all(_few(ranked), gpus)
        columns = np.array(sorted(self._changed), np.intp)
        self._changed.clear()
        known, moved = {mask: at for at, mask in enumerate(self._masks)}, []
        for at, mask in zip(columns.tolist(), self._masks_of(columns, gpus).tolist(), strict=True):
            if mask not in known:
                if len(self._masks) == MOST_CLASSES:
                    return self._all(_few(ranked), gpus)
                known[mask] = len(self._masks)
                self._masks.append(mask)
            if self.class_of[at] != known[mask]:
                self.class_of[at] = known[mask]
                moved.append(at)
        return moved

    def _all(self, chosen: Sequence[NodeConstraints], gpus: Offers) -> Collection[int] | None:
        """Every node anew. If there are too many classes, half of the constraints are left out, the least demanded, until there are not."""
        self._changed.clear()
        columns = np.fromiter(self._column.values(), np.intp, len(self._column))
        self._chosen = {one: bit for bit, one in enumerate(chosen)}
        masks = self._masks_of(columns, gpus)
        while len(found := np.unique(masks)) > MOST_CLASSES:
            chosen = chosen[: len(chosen) // 2]
            masks &= np.uint64((1 << len(chosen)) - 1)
        self._chosen = {one: bit for bit, one in enumerate(chosen)}
        was_one, self._masks = len(self._masks) == 1, found.tolist() or [0]
        self.version += 1
        if was_one and len(found) <= 1:
            return ()
        self.class_of[:] = 0
        self.class_of[columns] = np.searchsorted(found, masks)
        return None

    def regroup(self, model: Ints) -> Ints:
        """(GPUs, columns) the pool of each GPU, numbered anew; -1 where there is none. `model`: as `Fleet.model`."""
        classes = len(self._masks)
        keys = model * np.int32(classes) + self.class_of
        there = np.unique(keys[model >= 0])
        self.models, self._classes = (there // classes).tolist(), (there % classes).tolist()
        self._codes = {pair: code for code, pair in enumerate(zip(self.models, self._classes, strict=True))}
        self.version += 1
        return np.where(model >= 0, np.searchsorted(there, keys), -1).astype(np.int32)

    def admits(self, constraints: NodeConstraints) -> Bools:
        """(pools,) whether requests with these constraints can use the nodes of each."""
        bit = self._chosen.get(constraints)
        if bit is None:
            return np.ones(len(self), np.bool_)
        by_class = np.array([mask >> bit & 1 for mask in self._masks], np.bool_)
        admitted: Bools = by_class[self._classes]
        return admitted

    def meets(self, constraints: Sequence[NodeConstraints], columns: Columns) -> Bools:
        """(constraints, columns) whether labels and taints of each node meet each of these."""
        taints, number = list(self._sets), self._set_of[columns]
        met: Bools = np.ones((len(constraints), len(columns)), np.bool_)
        for at, one in enumerate(constraints):
            met[at] = np.array([_tolerates(one.tolerations, each) for each in taints], np.bool_)[number]
            for group in one.required:
                met[at] &= _one_matches(group, self._labels, columns)
        return met

    def _masks_of(self, columns: Columns, gpus: Offers) -> Masks:
        """(columns,) which of the chosen constraints admit each node, a bit each."""
        masks = np.zeros(len(columns), np.uint64)
        for (one, bit), admitted in zip(self._chosen.items(), self.meets(list(self._chosen), columns), strict=True):
            for profile in one.profiles:
                admitted &= gpus.offers(profile, columns)
            if one.shared:
                admitted &= gpus.shares(columns)
            masks |= admitted.astype(np.uint64) << np.uint64(bit)
        return masks


def _few(ranked: Iterable[NodeConstraints]) -> list[NodeConstraints]:
    """Those that may distinguish nodes, within the bounds."""
    few, keys = list[NodeConstraints](), frozenset[str]()
    for one in ranked:
        if one != ANYWHERE and len(few) < MOST_CONSTRAINTS and len(keys | one.keys) <= MOST_KEYS:
            few.append(one)
            keys |= one.keys
    return few


def _one_matches(group: Iterable[Term], labels: Labels, columns: Columns) -> Bools:
    nowhere: Bools = np.zeros(len(columns), np.bool_)
    return reduce(np.logical_or, [matches(term, labels, columns) for term in group], nowhere)


@lru_cache(2 * MOST_CONSTRAINTS * MOST_TAINTS)
def _tolerates(tolerations: tuple[Toleration, ...], taints: tuple[Taint, ...]) -> bool:
    return all(any(one.tolerates(taint) for one in tolerations) for taint in taints)
