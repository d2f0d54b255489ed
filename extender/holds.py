"""Room that is kept for a pod for which others were evicted, until it is bound, gone, or time is up.

The room comes free bit by bit, as one victim after the other ends. A hold takes each bit in the same moment, never more than is free
nor more than its pod will need: so nobody slips in between, and no card is booked twice. Once the pod itself is placed (`State`
reserves as for every pod) its hold takes nothing, and takes the room back should that reservation lapse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from extender.claims import Claim
from extender.state import State
from vgpu.fleet import Fleet
from vgpu.grant import Assignment, Slice

PREFIX: Final = "hold:"
"""Of the UID under which a hold has its claim: no UID of the API has a colon."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Room that is kept."""

    key: str
    node: str
    assignment: Assignment
    """What the pod would be given."""
    until_s: float
    nominated: bool = False
    """Did this extender write status.nominatedNodeName?"""


class Holds:
    """By UID of the pod that they are for."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_uid: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def get(self, uid: str) -> Hold | None:
        """What is kept for a pod."""
        return self._by_uid.get(uid)

    def is_whole(self, uid: str) -> bool:
        """Has all of the room that is kept for a pod come free?"""
        hold, claim = self._by_uid.get(uid), self._state.claims.get(PREFIX + uid)
        return (
            hold is not None and claim is not None and tuple(claim.assignment.held()) == tuple(hold.assignment.held())
        )

    def put(self, uid: str, hold: Hold) -> None:
        """Keep room from now on, in place of what was kept for this pod before."""
        self.drop(uid)
        self._by_uid[uid] = hold
        self._take(uid, hold)

    def drop(self, uid: str) -> Hold | None:
        """Keep nothing for this pod any more. Answers what was kept."""
        self._state.claims.release(PREFIX + uid)
        return self._by_uid.pop(uid, None)

    def refresh(self, node: str = "") -> None:
        """Take what came free on this node (or on any), and give back what is needed no more. The first to come takes first."""
        for uid, hold in self._by_uid.items():
            if not node or hold.node == node:
                self._take(uid, hold)

    @contextmanager
    def lifted(self, uid: str) -> Iterator[None]:
        """The pod's own hold is out of its way meanwhile. Do not await inside."""
        hold = self._by_uid.get(uid)
        if hold is None:
            yield
            return
        self._state.claims.release(PREFIX + uid)
        try:
            yield
        finally:
            if uid in self._by_uid:
                self._take(uid, self._by_uid[uid])

    def lapsed(self, now_s: float) -> list[str]:
        """UIDs whose time is up. They stay until they are dropped."""
        return [uid for uid, hold in self._by_uid.items() if hold.until_s <= now_s]

    def _take(self, uid: str, hold: Hold) -> None:
        claims = self._state.claims
        claims.release(PREFIX + uid)
        if claims.get(uid) is not None or hold.node not in claims.fleet:
            return
        wanted = (_free_part(claims.fleet, hold.node, piece) for piece in hold.assignment.held())
        pieces = tuple(piece for piece in wanted if piece is not None)
        if pieces:
            claims.hold(PREFIX + uid, Claim(hold.node, Assignment({"hold": pieces}), {}, hold.key))


def _free_part(fleet: Fleet, node: str, piece: Slice) -> Slice | None:
    """What of a slice nobody has, None when that is nothing."""
    if piece.kind == "mig":
        offered = {one.uuid for card in fleet.inventory[node].cards for one in card.offered_instances}
        return piece if piece.uuid in offered and piece.uuid not in fleet.mig_tenants[node] else None
    rows = [row for row, card in enumerate(fleet.inventory[node].cards) if card.uuid == piece.uuid]
    if not rows:
        return None
    row, at = rows[0], fleet.column[node]
    if piece.kind == "whole" and not fleet.tenants[row, at]:
        return piece
    mib = min(piece.mib, int(fleet.free_mib[row, at]))
    percent = min(piece.core_percent, max(0, int(fleet.free_percent[row, at])))
    return replace(piece, mib=mib, core_percent=percent, kind="share") if mib > 0 else None
