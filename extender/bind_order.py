"""Whose turn it is to be bound: two pods of one size that are to have different GPUs of a node start one after the other.

With access mode cdi the devices come from Allocate, and the kubelet tells pods apart by their sizes alone: until a pod has started, none of
its size may be bound to other GPUs of the node. `allocations.only` keeps most pods out of that by placing them on the same GPU. Who is to
be on the emptiest GPU is placed there, and waits here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from extender.state import State


class Turns:
    """`patience_s` is how long a bind call may wait; 0 = not at all."""

    def __init__(self, state: State, patience_s: float) -> None:
        self._state, self.patience_s = state, patience_s
        self._changed = asyncio.Event()
        state.allocations.on_started = self._changed.set

    def blocked(self, uid: str) -> bool:
        """Is a pod of its size on the way to another GPU of its node?"""
        return any(map(self._on_its_way, self._state.allocations.mistakable(uid)))

    async def come(self, uid: str) -> bool:
        """Return when nobody is in the way of this pod, or patience has ended. Answers whether it may be bound."""
        if self.patience_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.patience_s):
                    while self.blocked(uid):
                        self._changed.clear()
                        await self._changed.wait()
        return not self.blocked(uid)

    def _on_its_way(self, uid: str) -> bool:
        """Bound, or perhaps about to be. Room that is set aside, and what is only reserved, no kubelet knows of."""
        reservation = self._state.reservations.get(uid)
        return reservation.firm if reservation is not None else self._state.allocations.place_of(uid) is not None
