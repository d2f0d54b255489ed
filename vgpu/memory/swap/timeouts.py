"""The time-outs of waiting: a container that does not give way, and one whose memory cannot come back.

over limit  A container above its guarantee is late while another waits for memory within that other's guarantee on the same GPU, and it either was ordered
            to give way, is suspended and has not given way, or cannot swap and the others' excess is not enough. Nor can memory be swapped
            that is above the guarantee and not elastic. After `reclaim_timeout_s` of such time it is over its limit. Time without a ready
            copier and pool does not count, unless they could move nothing of it, nor does the time in which it moved memory, at `bytes_per_s_least`: slow progress is progress, but a block now and then is not.
            Nor does the time until it is suspended, or until a failed order is repeated, but the time before is kept: an order that is tried
            again and again is one failure. The time begins anew once nobody waits, or once all that was ordered has left.
unable      If only another's excess waits, it keeps its memory after that time, and counts as unable to swap until it reports that it can.
stranded    A container with work whose memory is away is stranded after `stranded_after_s` of time in which the guarantees that others use, and wait
            for, leave no room for it. The same if it is above its guarantee and memory of others that cannot be moved leaves no room, also what
            they have above their guarantees: they keep that until a guarantee waits for it. Waiting for a turn, a copier, a pool or a container
            that does not give way does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from vgpu.memory.swap.actions import Action, CancelSwapOut, OverLimit, Report, Stranded
from vgpu.memory.swap.container import ContainerState, GpuMemory, Late
from vgpu.memory.swap.plan import Plan
from vgpu.memory.swap.room import GpuRoom
from vgpu.memory.swap.settings import SwapSettings


class Timeouts:
    """Counts the times of the module for the containers of one node."""

    def __init__(self, settings: SwapSettings, rooms: Mapping[str, GpuRoom]) -> None:
        self._settings, self._rooms = settings, rooms

    def pass_time(self, state: ContainerState, passed_s: float, now_s: float) -> None:
        """Count the time until `now_s` by the state of the last decision."""
        if not self._counts(state):
            return
        if state.late_runs:
            state.late_s += passed_s
        if state.lacks_room and state.busy(now_s):
            state.no_room_s += passed_s

    def moved_out(self, state: ContainerState, moved_bytes: int) -> None:
        """It gives way."""
        state.late_s = max(0.0, state.late_s - moved_bytes / self._settings.bytes_per_s_least)

    def gave_way(self, state: ContainerState) -> None:
        """All that it was ordered to move has left."""
        state.late_s, state.is_over_limit = 0.0, False

    def decide(self, states: Iterable[ContainerState], plan: Plan) -> list[Action]:
        """What has ended, after a decision."""
        actions: list[Action] = []
        for state in states:
            late_for = self._late_for(state, plan)
            state.late_runs = late_for is not None
            if late_for is None and state.late_for == "guarantee" and _wanted_by_others(state, plan):
                late_for = "guarantee"
            if late_for != state.late_for:
                state.late_for, state.late_s, state.is_over_limit = late_for, 0.0, False
            taken_by = _taken_by(state, plan)
            state.lacks_room = bool(taken_by)
            if not state.lacks_room:
                state.no_room_s, state.is_stranded = 0.0, False
            actions += self._over(state)
            if state.no_room_s >= self._settings.stranded_after_s and not state.is_stranded:
                state.is_stranded = True
                actions.append(Stranded(state.name, f"{taken_by} no room for its memory"))
        return actions

    def next_s(self, state: ContainerState, now_s: float) -> float:
        """When the next of its times ends; inf = none runs."""
        if not self._counts(state):
            return inf
        late_s = stranded_s = inf
        if state.late_runs and not state.is_over_limit:
            late_s = now_s + self._settings.reclaim_timeout_s - state.late_s
        if state.lacks_room and state.busy(now_s) and not state.is_stranded:
            stranded_s = now_s + self._settings.stranded_after_s - state.no_room_s
        return min(late_s, stranded_s)

    def _counts(self, state: ContainerState) -> bool:
        if not state.late_runs and not state.lacks_room:
            return False
        return all(self._rooms[gpu].ready or _stays(one) for gpu, one in state.memory.items() if one.excess)

    def _late_for(self, state: ContainerState, plan: Plan) -> Late | None:
        if state.direction != "out" and not plan.short:
            return None
        wanted_by_others = _wanted_by_others(state, plan)
        if state.direction == "out":
            if state.suspended_at_s is None or state.moving.isdisjoint(_above(state)):
                return None
            if not state.moving.isdisjoint(wanted_by_others):
                return "guarantee"
            return None if state.cancelled else "excess"
        lacking = plan.short.intersection(wanted_by_others)
        cannot = any(not state.able or _stays(state.memory[gpu]) for gpu in lacking)
        return "guarantee" if cannot else None

    def _over(self, state: ContainerState) -> list[Action]:
        if state.late_for is None or state.late_s < self._settings.reclaim_timeout_s or state.is_over_limit:
            return []
        after = f"{self._settings.reclaim_timeout_s:g} s"
        if state.late_for == "guarantee":
            state.is_over_limit = True
            return [
                OverLimit(state.name, f"above its guarantee, it did not give way to another's guarantee within {after}")
            ]
        state.able, state.late_for, state.late_runs = False, None, False
        state.cancel()
        return [CancelSwapOut(state.name), Report(state.name, f"it did not give way within {after}")]


def _taken_by(state: ContainerState, plan: Plan) -> str:
    """What leaves no room for memory that is away, however others take turns, with its verb; empty: there is room, or nothing is away."""
    if state.direction is not None or not state.is_away:
        return ""
    away = [gpu for gpu, one in state.memory.items() if one.away]
    if not all(plan.budget.guarantees_leave_room(state, gpu) for gpu in away):
        return "the guarantees of others leave"
    if not state.within_guarantee and not all(plan.budget.could_fit(state, gpu) for gpu in away):
        return "memory of other containers that cannot be moved leaves"
    return ""


def _stays(one: GpuMemory) -> bool:
    """Whether more than its guarantee is memory that no swap moves: of a program that goes around the library, or of contexts."""
    return one.resident > one.guarantee


def _above(state: ContainerState) -> list[str]:
    """GPUs on which it has more than its guarantee."""
    return [gpu for gpu, one in state.memory.items() if one.present > one.guarantee]


def _wanted_by_others(state: ContainerState, plan: Plan) -> list[str]:
    """Those of them on which others wait for memory within their guarantees."""
    return [gpu for gpu in _above(state) if plan.guaranteed.get(gpu, set()) - {state.name}]
