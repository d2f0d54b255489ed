"""Room that is kept for a pod for which others were evicted, until it is bound, gone, or time is up.

The room comes free bit by bit, as one victim after the other ends. A hold takes each bit in the same moment, never more than is free
nor more than its pod will need: so nobody slips in between, and no GPU is booked twice. Once the pod itself is placed (`State`
reserves as for every pod) its hold takes nothing, and takes the room back should that reservation lapse.

The reservations of kind `preemption` (`vgpu.scheduling.reservations`), and how they take their room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

from extender.accounting import Allocation
from extender.state import State
from vgpu.api.grant import Assignment, Slice
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.reservations import Reservation


class PreemptionReservations:
    """By UID of the pod that they are for."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.reservations.of("preemption"))

    def get(self, uid: str) -> Reservation | None:
        """What is kept for a pod."""
        return self._state.reservations.get(uid, "preemption")

    def is_whole(self, uid: str) -> bool:
        """Has all of the room that is kept for a pod come free?"""
        hold, allocation = self.get(uid), self._state.allocations.get(uid)
        if hold is None or hold.assignment is None or allocation is None or allocation.own:
            return False
        return tuple(allocation.assignment.held()) == tuple(hold.assignment.held())

    def put(self, uid: str, key: str, node: str, assignment: Assignment, *, nominated: bool = False) -> None:
        """Keep room from now on, in place of what was set aside for this pod before."""
        self._release(uid)
        now_s = self._state.clock()
        hold = self._state.reservations.put(
            "preemption", uid, key, node, now_s, assignment=assignment, nominated=nominated
        )
        self._take(hold)

    def drop(self, uid: str) -> Reservation | None:
        """Keep nothing for this pod any more. Returns what was kept."""
        dropped = self._state.reservations.drop(uid, "preemption")
        if dropped is not None:
            self._release(uid)
        return dropped

    def refresh(self, node: str = "") -> None:
        """Take what came free on this node (or on any), and give back what is needed no more. The first to come takes first."""
        for hold in self._state.reservations.of("preemption").values():
            if not node or hold.node == node:
                self._take(hold)

    def before(self, uid: str, node: str) -> list[Reservation]:
        """For pods for which room was kept on this node before it was for this pod, or is to be, and that have no place yet."""
        held = takewhile(lambda one: one.uid != uid, self._state.reservations.of("preemption").values())
        return [one for one in held if one.node == node and self._state.allocations.place_of(one.uid) is None]

    def promised(self, uid: str, node: str) -> set[str]:
        """UUIDs of GPUs and MIG instances that those pods wait for."""
        waiting = [one.assignment for one in self.before(uid, node) if one.assignment and not self.is_whole(one.uid)]
        return {piece.uuid for one in waiting for piece in one.held()}

    @contextmanager
    def lifted(self, uid: str) -> Iterator[None]:
        """The pod's own hold is out of its way meanwhile. Do not await inside."""
        if self.get(uid) is None:
            yield
            return
        self._release(uid)
        try:
            yield
        finally:
            hold = self.get(uid)
            if hold is not None:
                self._take(hold)

    def lapsed(self) -> list[str]:
        """UIDs whose time is up. They are to be dropped now."""
        return self._state.lapsed("preemption")

    def _release(self, uid: str) -> None:
        if self._state.allocations.place_of(uid) is None:
            self._state.give_back(uid)

    def _take(self, hold: Reservation) -> None:
        allocations = self._state.allocations
        self._release(hold.uid)
        if allocations.place_of(hold.uid) is not None or hold.node not in allocations.fleet or hold.assignment is None:
            return
        wanted = (_free_part(allocations.fleet, hold.node, piece) for piece in hold.assignment.held())
        pieces = tuple(piece for piece in wanted if piece is not None)
        if pieces:
            allocations.hold(hold.uid, Allocation(hold.node, Assignment({"hold": pieces}), {}, hold.key, own=False))


def _free_part(fleet: Fleet, node: str, piece: Slice) -> Slice | None:
    """What of a slice nobody has, None when that is nothing."""
    if piece.kind == "mig":
        offered = {one.uuid for gpu in fleet.inventory[node].gpus for one in gpu.offered_instances}
        return piece if piece.uuid in offered and piece.uuid not in fleet.mig_containers[node] else None
    rows = [row for row, gpu in enumerate(fleet.inventory[node].gpus) if gpu.uuid == piece.uuid]
    if not rows:
        return None
    row, at = rows[0], fleet.column[node]
    if piece.kind == "whole" and not fleet.containers[row, at]:
        return piece
    mib = min(piece.mib, int(fleet.free_mib[row, at]))
    percent = min(piece.core_percent, max(0, int(fleet.free_percent[row, at])))
    return replace(piece, mib=mib, core_percent=percent, kind="share") if mib > 0 else None
