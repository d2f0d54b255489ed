"""The swap policy: which container's memory above its guarantee is moved to host memory, when it comes back, and which requests for memory are granted.

It is pure: events report what happened and when; `decide` returns what to do. It never reads a clock, a socket or a GPU, so a recorded list of
events leads to the same decisions again (`vgpu.memory.swap.trace`).

A kernel may touch any page, so a container runs only while all of its memory, on all its GPUs, is there. `paused` names those that must not run.

The rules, in their order
    guarantee  A request within the guarantee never fails for others' sake, and is the first to get memory. So is a container that has fallen back to its
               guarantee while some of its memory was away. Every other container above its guarantee gives way to them at once.
    excess     Only memory above the guarantee moves, only elastic memory, and only as much as is short. A container within its guarantee is never paused.
    victims    The least urgent give way first, then the longest idle, then the last in the order of turns. No container gives way whose part
               those before it can move (`victims`).
    pool       Memory above the guarantee is granted only while the host pool has room for all excess of its GPU. So reclaim never lacks room.
               What the whole pool could not hold was refused before (`vgpu.memory.ceiling`); what waits for room is in `pool_waits`.
    turns      Containers that lack memory above their guarantees come in an order: those that starve, class, level, served least for its weight. A
               container with work gives way to one before it in that order after its quantum, to a more urgent class at once, and an idle one after
               a short time (`turns`). The first that has to wait keeps those behind it from driving others out, so it gets the next
               quantum that ends. Meanwhile they may use free memory.
    starving   A container that has waited for `starve_after_s` gets the next quantum that ends, before every class.
    several    A container with several GPUs is paused on all of them while memory of any is away. It comes back only when all will have room.
    growth     A request above the guarantee gets free memory at once, or others' memory as if its container came back. It waits for at most its own
               `wait_s`, then for what is free at that moment. A container that cannot swap gets none; until it is known, the request waits (`able_within_s`).
    ends       A container that does not give way is over its limit, or unable to swap; one that cannot come back is stranded (`ends`).

Bounds of waiting, where all can swap. n containers of one class and level with equal weights on one GPU: 2 (n - 1) of the longest quantum and change
of places, because none is served more than a quantum ahead of another. Any others: `starve_after_s`, and a quantum and a change of places for each
container that starves already and each that still has its quantum. A latency-critical container has the memory of less urgent ones after one change of
places, or after the quantum of one that starved. A container that can never fit beside the guarantees of others waits for ever, and is stranded.

Memory that leaves and memory that comes back move at the same time: `SwapIn` is ordered once enough is free or leaving, and `room_bytes` limits
what is made before it has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.memory.swap.actions import Action, Report
from vgpu.memory.swap.container import ContainerState
from vgpu.memory.swap.events import (
    Able,
    Announced,
    Changed,
    ContainerEvent,
    Decided,
    Event,
    Failed,
    GpuSeen,
    Idle,
    Joined,
    Left,
    MemoryContract,
    PoolSeen,
    Progress,
    Requested,
    Stalled,
    Suspended,
    SwappedIn,
    SwappedOut,
    Unable,
    Used,
    Withdrawn,
    Working,
)
from vgpu.memory.swap.plan import PRECISION_S, Plan
from vgpu.memory.swap.room import GpuRoom, MemoryRequest, PoolWait
from vgpu.memory.swap.settings import SwapSettings
from vgpu.memory.swap.timeouts import Timeouts
from vgpu.memory.swap.turns import Turns

MEASURED_LEAST_BYTES: Final = 256 * 2**20
"""The least that a speed is measured by. Guessed: below it the fixed cost of a swap counts more than its copies."""
EWMA: Final = 0.3
"""Weight of a new measurement of the speed. Guessed: swaps are rare, and three should be enough to know another machine."""


class SwapPolicy:
    """The containers of a node and their memory. See the module."""

    def __init__(self, settings: SwapSettings | None = None) -> None:
        self._settings = settings if settings is not None else SwapSettings()
        self._states: dict[str, ContainerState] = {}
        self._rooms: dict[str, GpuRoom] = {}
        self._requests: dict[str, MemoryRequest] = {}
        self._turns = Turns(self._settings, self._rooms)
        self._timeouts = Timeouts(self._settings, self._rooms)
        self._reports: list[Action] = []
        self._room: dict[str, dict[str, int]] = {}
        self.pool_waits: Mapping[str, PoolWait] = {}
        """Containers with a request that waits for room in the host pool, since the last decision."""
        self._now_s = -inf
        self._again_s = inf

    def apply(self, event: Event | Decided) -> None:
        """Record an event. Events of unknown containers are ignored: the container left before they arrived. GPUs are reported before their containers;
        raises BadDocument for a container on another GPU."""
        if isinstance(event, Stalled):
            self._now_s = max(self._now_s, min(event.at_s, self._now_s + event.seconds))
        self._advance(event.at_s)
        match event:
            case GpuSeen():
                room = self._rooms.setdefault(event.gpu, GpuRoom(self._settings.bytes_per_s))
                room.capacity = event.capacity_bytes
            case PoolSeen():
                if (known := self._rooms.get(event.gpu)) is not None:
                    known.pool, known.ready = event.free_bytes + self._away_bytes(event.gpu), event.ready
            case Withdrawn():
                self._withdraw(event.id)
            case Joined() if event.name not in self._states:
                self._check_gpus(event.name, event.contract)
                self._states[event.name] = ContainerState(event.name, event.contract, event.at_s)
            case Decided() | Stalled():
                pass
            case _ if event.name in self._states:
                self._apply_to(self._states[event.name], event)

    def decide(self, now_s: float) -> list[Action]:
        """What to do now. Cost: O(containers x log) for each request and each container that has to wait for others."""
        self._advance(now_s)
        plan = Plan(self._states, self._rooms, self._requests, self._settings, self._turns, now_s)
        ends = self._timeouts.decide(self._states.values(), plan)
        self._room, self._again_s, self.pool_waits = plan.room, plan.again_s, plan.pool_waits
        for state in self._states.values():
            self._again_s = min(self._again_s, self._next_s(state))
        reports, self._reports = self._reports, []
        return [*reports, *plan.actions, *ends]

    def deadline_s(self) -> float | None:
        """When `decide` is to be called without a further event, or None. Valid until the next event."""
        return None if self._again_s == inf else max(self._again_s, self._now_s + PRECISION_S)

    def paused(self) -> frozenset[str]:
        """The containers that must not run: some of their memory is away or moves."""
        return frozenset(name for name, state in self._states.items() if state.paused)

    def room_bytes(self, name: str, gpu: str) -> int:
        """How much a container that comes back may take of a GPU now. Valid from `decide` until the next event."""
        return self._room.get(name, {}).get(gpu, 0)

    def wants(self, name: str) -> bool:
        """Whether a container would run, or go on, if it had the memory."""
        return name in self._states and self._states[name].wants(self._now_s)

    def is_over_limit(self, name: str) -> bool:
        """Whether `OverLimit` of a container still applies."""
        return name in self._states and self._states[name].is_over_limit

    def is_stranded(self, name: str) -> bool:
        """Whether `Stranded` of a container still applies."""
        return name in self._states and self._states[name].is_stranded

    def _apply_to(self, state: ContainerState, event: ContainerEvent) -> None:
        match event:
            case Joined() | Changed():
                self._check_gpus(state.name, event.contract)
                state.become(event.contract)
            case Left():
                del self._states[state.name]
                self._requests = {key: one for key, one in self._requests.items() if one.name != state.name}
            case Used():
                self._used(state, event)
            case Requested() if event.id not in self._requests:
                until_s = event.at_s + event.wait_s
                self._requests[event.id] = MemoryRequest(
                    event.id, state.name, event.gpu, event.bytes, event.elastic, until_s, event.at_s
                )
                state.pending += 1
            case Working() if not state.working:
                self._turns.catch_up(state, self._states.values(), event.at_s)
                state.working = True
            case Idle():
                state.working, state.idle_since_s = False, event.at_s
            case Announced():
                self._turns.catch_up(state, self._states.values(), event.at_s)
                due_s = event.at_s + event.in_s
                state.announced_from_s = max(event.at_s, due_s - self._turns.change_s(state))
                state.announced_until_s = due_s + self._settings.announced_hold_s
            case Able():
                state.able = True
            case Unable():
                self._unable(state, event.reason)
            case Failed():
                self._fail(state, f"GPU {event.gpu}: {event.reason}")
            case Suspended() if state.direction == "out" and state.suspended_at_s is None:
                state.suspended_at_s = event.at_s
            case Progress():
                self._progress(state, event)
            case SwappedOut() if state.direction == "out":
                self._measure(state, event)
                self._complete(state, event.gpu)
            case SwappedIn() if state.direction == "in":
                self._complete(state, event.gpu)

    def _check_gpus(self, name: str, contract: MemoryContract) -> None:
        if unknown := contract.gpus.keys() - self._rooms.keys():
            raise BadDocument(f"container {name} on GPU {min(unknown)}: {len(self._rooms)} other GPUs were reported")

    def _withdraw(self, id_: str) -> None:
        request = self._requests.pop(id_, None)
        if request is not None:
            self._states[request.name].pending -= 1

    def _used(self, state: ContainerState, event: Used) -> None:
        one = state.memory.get(event.gpu)
        if one is None:
            return
        before = state.has_excess
        one.resident, one.elastic = event.resident_bytes, event.elastic_bytes
        one.away = min(event.away_bytes, event.elastic_bytes)
        if not before:
            self._turns.catch_up(state, self._states.values(), event.at_s)

    def _unable(self, state: ContainerState, reason: str) -> None:
        state.able = False
        if state.direction is None:
            self._reports.append(Report(state.name, reason))
        else:
            self._fail(state, reason)

    def _fail(self, state: ContainerState, reason: str) -> None:
        """The order ended. It is not repeated at once."""
        state.end_order()
        state.retry_at_s = self._now_s + self._settings.retry_s
        self._reports.append(Report(state.name, reason))

    def _progress(self, state: ContainerState, event: Progress) -> None:
        one = state.memory.get(event.gpu)
        if one is None:
            return
        if event.direction == "in":
            one.away = max(0, one.away - event.bytes)
            return
        one.away = min(one.elastic, one.away + event.bytes)
        one.leaving = max(0, one.leaving - event.bytes)
        one.moved_out += event.bytes
        one.first_out = one.first_out or (event.at_s, event.bytes)
        self._timeouts.moved_out(state, event.bytes)

    def _complete(self, state: ContainerState, gpu: str) -> None:
        """The order is complete on one GPU; with the last one its quantum begins, if it came back or may stay after all."""
        state.whole = state.whole and state.memory[gpu].leaving == 0
        state.memory[gpu].leaving = 0
        state.moving.discard(gpu)
        if state.moving:
            return
        if state.direction == "out" and state.whole and not state.cancelled:
            self._timeouts.gave_way(state)
        if state.direction == "in" or (state.has_turn and not state.is_away):
            state.came_in_s, state.waits_since_s = self._now_s, None
        state.end_order()

    def _measure(self, state: ContainerState, event: SwappedOut) -> None:
        """The speed of a GPU's copies, by what left it after the first part: what comes before that is no copy."""
        one = state.memory[event.gpu]
        if one.first_out is None:
            return
        first_s, first_bytes = one.first_out
        moved = one.moved_out - first_bytes
        if moved < MEASURED_LEAST_BYTES or event.at_s <= first_s:
            return
        speed = max(self._settings.bytes_per_s_least, moved / (event.at_s - first_s))
        self._rooms[event.gpu].bytes_per_s += EWMA * (speed - self._rooms[event.gpu].bytes_per_s)

    def _away_bytes(self, gpu: str) -> int:
        return sum(state.memory[gpu].away for state in self._states.values() if gpu in state.memory)

    def _advance(self, now_s: float) -> None:
        """Record the time that passed, by the state until now."""
        passed_s = now_s - self._now_s if self._now_s > -inf else 0.0
        self._now_s = max(self._now_s, now_s)
        for state in self._states.values() if passed_s > 0 else ():
            if state.busy(now_s) and not state.paused and state.has_excess:
                state.served += passed_s / state.contract.weight
            self._timeouts.pass_time(state, passed_s, now_s)

    def _next_s(self, state: ContainerState) -> float:
        """When this container alone requires a new decision. Notes since when it waits, too."""
        now_s = self._now_s
        waits = state.paused and state.wants(now_s)
        if not waits:
            state.waits_since_s = None
        elif state.waits_since_s is None:
            state.waits_since_s = now_s
        times = [state.announced_from_s, state.announced_until_s, self._timeouts.next_s(state, now_s)]
        if state.waits_since_s is not None:
            times.append(state.waits_since_s + self._settings.starve_after_s)
        return min((at_s for at_s in times if at_s > now_s), default=inf)
