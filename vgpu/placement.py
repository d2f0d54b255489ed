"""Choose a node and its cards for one pod.

This is the only module that decides where anything goes. It is pure: it reads a `Fleet`, answers with a `Placement` or the
reason why not, and never touches Kubernetes, NVML, the clock or a random number. The same fleet and ask give the same answer.

All candidates are tried at once, on copies of their columns (`table`). The best is the one with the lowest score of the
pod's policy, then the one with the smallest name. What is promised about fitting stands in `table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vgpu.fleet import Fleet
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
    """Why a pod goes nowhere: node -> one of the constant reasons above."""

    reasons: dict[str, str] = field(default_factory=dict)


def place(
    fleet: Fleet, ask: PodAsk, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> Placement | NoRoom:
    """The best node among `candidates` and the cards there, or why there is none.

    `only` narrows a node's cards to the UUIDs given: a pod of the same size is starting there, and the kubelet may swap
    the two pods' devices (contract.md section 3).
    """
    asked = list(candidates)
    names, _ = fleet.columns_of(asked)
    table = Table(fleet, ask, asked, only)
    if not table.fits.any():
        return NoRoom(_strangers(fleet, asked) | _reasons(table, only))
    scores = POLICIES[ask.policy](table.outcome())
    best = scores[table.fits].min()
    at = min(np.flatnonzero(table.fits & (scores == best)).tolist(), key=names.__getitem__)
    return Placement(names[at], table.assignment(at))


def explain(
    fleet: Fleet, ask: PodAsk, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> dict[str, str]:
    """Per candidate that cannot take the pod, the reason; those that can are left out."""
    asked = list(candidates)
    return _strangers(fleet, asked) | _reasons(Table(fleet, ask, asked, only), only)


def _strangers(fleet: Fleet, asked: list[str]) -> dict[str, str]:
    return {name: NO_INVENTORY for name in asked if name not in fleet or not fleet.inventory[name].cards}


def _reasons(table: Table, only: Mapping[str, Set[str]] | None) -> dict[str, str]:
    """Per known candidate that does not fit, the reason that helps most."""
    fleet, ask = table.fleet, table.ask
    full = [table.names[at] for at in np.flatnonzero(~table.fits) if fleet.inventory[table.names[at]].cards]
    if not full:
        return {}
    empty = Table(fleet, ask, full, emptied=True)
    waiting = [name for name in full if name in (only or {})]
    now = Table(fleet, ask, full)
    swaps = set(waiting) & {name for name, fits in zip(full, now.fits.tolist(), strict=True) if fits}
    busy = NO_WHOLE if any(part.kind == "whole" for part in ask.containers) else NO_ROOM
    reasons = {}
    for at, name in enumerate(full):
        if not empty.fits[at]:
            reasons[name] = TOO_LARGE if empty.fits_mig[at] else NO_MIG_EVER
        elif name in swaps:
            reasons[name] = SWAP_RISK
        else:
            reasons[name] = busy if now.fits_mig[at] else NO_MIG
    return reasons
