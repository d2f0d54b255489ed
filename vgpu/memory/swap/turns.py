"""Turns: which container comes next to a GPU that has no room for all, how long its quantum is, and for which container it has to make room.

order     Those that starve, by their waiting time; then by class; those to which others give way at present; level; then the one served least for its weight.
quantum   A container with work keeps its place for so long that the change of places is `swap_part` of it. A more urgent class does not wait for that.
idleness  An idle container gives way to an equal or more urgent one once it has been idle for as long as a change of places takes: then giving way
          costs at most as much again as the wait, whatever comes next (the rule of ski rental). To a less urgent one it gives way after
          a quantum of idleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf

from vgpu.memory.swap.container import ContainerState
from vgpu.memory.swap.room import GpuRoom
from vgpu.memory.swap.settings import SwapSettings

Place = tuple[float, int, bool, int, float, str]


class Turns:
    """The rules of the module for one node."""

    def __init__(self, settings: SwapSettings, rooms: Mapping[str, GpuRoom]) -> None:
        self._settings, self._rooms = settings, rooms

    def change_s(self, state: ContainerState) -> float:
        """How long it takes to move a container's excess one way. Two that change places move at the same time."""
        copying_s = max(one.excess / self._rooms[gpu].bytes_per_s for gpu, one in state.memory.items())
        return self._settings.overhead_s + copying_s

    def quantum_s(self, state: ContainerState) -> float:
        """How long it keeps its place, once it has it."""
        return max(self._settings.quantum_least_s, self.change_s(state) / self._settings.swap_part)

    def quantum_ends_s(self, state: ContainerState) -> float:
        """When its quantum is over."""
        return state.came_in_s if state.lent else state.came_in_s + self.quantum_s(state)

    def catch_up(self, state: ContainerState, all_: Iterable[ContainerState], now_s: float) -> None:
        """After idleness, or time within its guarantee, it has no accumulated priority."""
        state.served = max(state.served, min((one.served for one in _rivals(state, all_, now_s)), default=0.0))

    def bound_credit(self, state: ContainerState, all_: Iterable[ContainerState], now_s: float) -> None:
        """Its turn begins. However long it lacked room, it is at most the longest quantum of its rivals behind them."""
        rivals = list(_rivals(state, all_, now_s))
        if rivals:
            behind = max(self.quantum_s(one) / one.contract.weight for one in rivals)
            state.served = max(state.served, max(one.served for one in rivals) - behind)

    def starves(self, state: ContainerState, now_s: float) -> bool:
        """Whether it has waited for too long."""
        return state.waits_since_s is not None and now_s >= state.waits_since_s + self._settings.starve_after_s

    def place(self, state: ContainerState, now_s: float) -> Place:
        """Orders the containers that want memory; the least comes first."""
        since_s = state.waits_since_s if state.waits_since_s is not None and self.starves(state, now_s) else inf
        own = state.service_class, not state.has_turn, state.contract.level, state.served, state.name
        return (since_s, *own)

    def worth(self, state: ContainerState, now_s: float) -> tuple[int, int, bool, float, str]:
        """Orders the containers that can give way; the least gives way first: the least urgent, then the longest idle, then the last in the order."""
        busy = state.busy(now_s)
        last = -state.served if busy else state.idle_since_s
        return -state.service_class, -state.contract.level, busy, last, state.name

    def gives_way_s(self, state: ContainerState, to: ContainerState, now_s: float) -> float:
        """From when on a container gives way to another's wish for memory above its guarantee, if nothing changes until then; inf = not before
        its next event. To another's guarantee it gives way at once."""
        ends_s = self.quantum_ends_s(state)
        if to.has_turn and state.has_turn:  # a guarantee took what both were to get
            return -inf if self.place(to, now_s) < self.place(state, now_s) else inf
        if state.fed and state.busy(now_s):
            return inf if state.direction == "in" else ends_s
        if to.service_class < state.service_class:
            return -inf
        if state.direction == "in" or state.has_turn:
            return inf
        if state.is_away:
            return -inf if not state.wants(now_s) or self.place(to, now_s) < self.place(state, now_s) else inf
        if self.starves(to, now_s):
            return ends_s
        if not state.busy(now_s):
            equal = to.service_class == state.service_class
            kept_s = self.change_s(state) if equal else self.quantum_s(state)
            return max(state.idle_since_s, -inf if state.lent else state.came_in_s) + kept_s
        if to.service_class > state.service_class or to.contract.level > state.contract.level:
            return inf
        if to.contract.level < state.contract.level:
            return ends_s
        return max(ends_s, now_s + max(0.0, to.served - state.served) * state.contract.weight)


def _rivals(state: ContainerState, all_: Iterable[ContainerState], now_s: float) -> Iterator[ContainerState]:
    """Those with which it takes turns at present."""
    for one in all_:
        shared = not state.memory.keys().isdisjoint(one.memory)
        if (
            one is not state
            and shared
            and one.has_excess
            and one.wants(now_s)
            and one.service_class == state.service_class
        ):
            yield one
