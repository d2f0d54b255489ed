"""Choose a node and its cards for one pod.

This is the only module that decides where anything goes. It is pure: it reads a `Fleet`, answers with a `Placement` or the
reason why not, and never touches Kubernetes, NVML, the clock or a random number. The same fleet and ask give the same answer.

All candidates are tried at once, on copies of their columns (`table`). The best is the one with the lowest keys of the
pod's policy, then the one with the smallest name. What is promised about fitting stands in `table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from vgpu.fleet import Candidates, Fleet
from vgpu.grant import Assignment
from vgpu.policy import POLICIES
from vgpu.request import PodAsk
from vgpu.table import Table

NO_INVENTORY: Final = "node has no GPUs that Tangram shares"
TOO_LARGE: Final = "no GPU of the node is large enough or of an allowed model"
NO_ROOM: Final = "no single GPU has enough free gpu-mem and gpu-core"
NO_WHOLE: Final = "too few GPUs are wholly free"
NO_MIG: Final = "too few free MIG instances of the profile"
NO_MIG_EVER: Final = "node has no such MIG instances"
SWAP_RISK: Final = "a pod of the same size is starting on another GPU of the node"

UNRESOLVABLE: Final = frozenset({NO_INVENTORY, TOO_LARGE, NO_MIG_EVER})
"""Reasons that no eviction can help against: the pod would not fit if the node were empty."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod goes."""

    node: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a pod goes nowhere."""

    nodes: dict[str, list[str]] = field(default_factory=dict)
    """One of the constant reasons above -> the nodes that it holds for, each once."""

    @property
    def reasons(self) -> dict[str, str]:
        """Node -> reason."""
        return {node: reason for reason, nodes in self.nodes.items() for node in nodes}


def place(
    fleet: Fleet, ask: PodAsk, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> Placement | NoRoom:
    """The best node among `candidates` and the cards there, or why there is none.

    `only` narrows a node's cards to the UUIDs given: a pod of the same size is starting there, and the kubelet may swap
    the two pods' devices (contract.md section 3).
    """
    asked = fleet.look_up(candidates if isinstance(candidates, Sequence) else tuple(candidates))
    table = Table(fleet, ask, asked, only, order=POLICIES[ask.policy].order)
    if not table.fits.any():
        return _no_room(table, asked, only)
    best = np.flatnonzero(table.fits)
    for key in POLICIES[ask.policy].score(table.outcome()):
        keys = key[best]
        best = best[keys == keys.min()]
    at = min(best.tolist(), key=table.names.__getitem__)
    return Placement(table.names[at], table.assignment(at))


def explain(
    fleet: Fleet, ask: PodAsk, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> dict[str, str]:
    """Per candidate that cannot take the pod, the reason; those that can are left out."""
    asked = fleet.look_up(candidates if isinstance(candidates, Sequence) else tuple(candidates))
    return _no_room(Table(fleet, ask, asked, only), asked, only).reasons


def _no_room(table: Table, asked: Candidates, only: Mapping[str, Set[str]] | None) -> NoRoom:
    """Per candidate that does not fit, the reason that helps most."""
    fleet, ask = table.fleet, table.ask
    full = table.asked & ~table.fits
    empty = Table(fleet, ask, asked, emptied=True)
    now = Table(fleet, ask, asked) if only else table
    found = [
        (NO_INVENTORY, (fleet.model[:, table.view] < 0).all(axis=0)),
        (NO_MIG_EVER, ~empty.fits & ~empty.fits_mig),
        (TOO_LARGE, ~empty.fits),
        (SWAP_RISK, now.fits),
        (NO_MIG, ~now.fits_mig),
        (NO_WHOLE if any(part.kind == "whole" for part in ask.containers) else NO_ROOM, full),
    ]
    nodes: dict[str, list[str]] = {}
    for reason, holds in found:
        here = full & holds
        if here.any():
            nodes[reason] = list(compress(table.names, here.tolist()))
            full &= ~here
    if asked.strangers:
        nodes.setdefault(NO_INVENTORY, []).extend(dict.fromkeys(asked.strangers))
    return NoRoom(nodes)
