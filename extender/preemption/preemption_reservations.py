"""Preemption reservations: GPU capacity for a pod for which other pods are evicted, until it is bound, gone, or the reservation lapses.

The capacity comes free part by part, as one victim after the other ends. A preemption reservation takes each part at that moment, never more
than is free and never more than its pod will need: so no other pod gets it, and no GPU is assigned twice. While the pod itself has a
scheduling reservation, its preemption reservation takes nothing; it takes the capacity back if the scheduling reservation lapses.

`vgpu.scheduling.reservations` defines when one ends; this module reserves and releases its capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

from extender.accounting import Allocation
from extender.state import State
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.reservations import Reservation


class PreemptionReservations:
    """By UID of the preemptor."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.reservations.of("preemption"))

    def __contains__(self, uid: str) -> bool:
        return self.get(uid) is not None

    def get(self, uid: str) -> Reservation | None:
        """The reservation of a preemptor."""
        return self._state.reservations.get(uid, "preemption")

    def is_complete(self, uid: str) -> bool:
        """Has all of the capacity that is reserved for a pod come free?"""
        reservation, allocation = self.get(uid), self._state.allocations.get(uid)
        if reservation is None or reservation.assignment is None or allocation is None or allocation.own:
            return False
        return tuple(allocation.assignment.held()) == tuple(reservation.assignment.held())

    def put(self, uid: str, key: str, node: str, assignment: Assignment, *, nominated: bool = False) -> None:
        """Reserve from now on, in place of an earlier preemption or nomination reservation of this pod."""
        self._release(uid)
        now_s = self._state.clock()
        reservation = self._state.reservations.put(
            "preemption", uid, key, node, now_s, assignment=assignment, nominated=nominated
        )
        self._allocate_free(reservation)

    def end(self, uid: str) -> Reservation | None:
        """End the reservation of this pod. Returns it, None if there was none."""
        return self._state.end_reservation(uid, "preemption")

    def refresh(self, node: str = "") -> None:
        """Take what came free on this node (or on any), and release what is not needed any more. The earliest reservation takes first."""
        for reservation in self._state.reservations.of("preemption").values():
            if not node or reservation.node == node:
                self._allocate_free(reservation)

    def before(self, uid: str, node: str) -> list[Reservation]:
        """Reservations on this node that are earlier than this pod's, made or still to be made, of pods that are not placed yet."""
        earlier = takewhile(lambda one: one.uid != uid, self._state.reservations.of("preemption").values())
        return [one for one in earlier if one.node == node and self._state.allocations.place_of(one.uid) is None]

    def awaited_before(self, uid: str, node: str) -> set[str]:
        """UUIDs of GPUs and MIG instances for which those earlier reservations still wait."""
        waiting = [one.assignment for one in self.before(uid, node) if one.assignment and not self.is_complete(one.uid)]
        return {gpu.uuid for one in waiting for gpu in one.held()}

    @contextmanager
    def lifted(self, uid: str) -> Iterator[None]:
        """The pod's own reservation does not block it meanwhile. Do not await inside."""
        if self.get(uid) is None:
            yield
            return
        self._release(uid)
        try:
            yield
        finally:
            reservation = self.get(uid)
            if reservation is not None:
                self._allocate_free(reservation)

    def lapsed(self) -> list[str]:
        """UIDs whose reservation has lapsed. The caller ends them now."""
        return self._state.lapsed("preemption")

    def _release(self, uid: str) -> None:
        if self._state.allocations.place_of(uid) is None:
            self._state.release(uid)

    def _allocate_free(self, reservation: Reservation) -> None:
        allocations = self._state.allocations
        self._release(reservation.uid)
        fleet, node, assignment = allocations.fleet, reservation.node, reservation.assignment
        if allocations.place_of(reservation.uid) is not None or node not in fleet or assignment is None:
            return
        wanted = (_free_part(fleet, node, assigned) for assigned in assignment.held())
        free_parts = tuple(assigned for assigned in wanted if assigned is not None)
        if free_parts:
            part = Allocation(node, Assignment({"reserved": free_parts}), {}, reservation.key, own=False)
            allocations.allocate(reservation.uid, part)


def _free_part(fleet: Fleet, node: str, assigned: AssignedGpu) -> AssignedGpu | None:
    """The free part of an assigned GPU, None if nothing of it is free."""
    if assigned.kind == "mig":
        return assigned if fleet.is_free(node, assigned.uuid) else None
    rows = [row for row, gpu in enumerate(fleet.inventory[node].gpus) if gpu.uuid == assigned.uuid]
    if not rows:
        return None
    row, at = rows[0], fleet.column[node]
    if assigned.kind == "whole" and not fleet.containers[row, at]:
        return assigned
    mib = min(assigned.mib, int(fleet.free_mib[row, at]))
    percent = min(assigned.core_percent, max(0, int(fleet.free_percent[row, at])))
    return replace(assigned, mib=mib, core_percent=percent, kind="share") if mib > 0 else None
