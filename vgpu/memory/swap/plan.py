"""One decision of the swap policy: the requests within guarantees first, then those that take turns. `vgpu.memory.swap.policy` has the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from vgpu.memory.swap.actions import Action, CancelSwapOut, Grant, Refuse, SwapIn, SwapOut
from vgpu.memory.swap.container import ContainerState
from vgpu.memory.swap.room import Budget, GpuRoom, MemoryRequest, PoolWait
from vgpu.memory.swap.settings import SwapSettings
from vgpu.memory.swap.turns import Turns
from vgpu.memory.swap.victims import choose

PRECISION_S = 1e-6
"""Shorter times are rounding errors. A clock of ten years has steps of 60 ns."""


class Plan:
    """Makes the decision at its creation, and changes the states and the list of requests by it.

    `actions`: what to do. `again_s`: when another decision may differ without a further event. `room`: container that comes back -> GPU -> bytes
    that it may take now. `guaranteed`: GPU -> containers that wait there for memory within their guarantees. `short`: the GPUs on which
    all that can give way is not enough for them. `pool_waits`: containers with a request that waits for room in the host pool.
    """

    def __init__(
        self,
        states: Mapping[str, ContainerState],
        rooms: Mapping[str, GpuRoom],
        requests: dict[str, MemoryRequest],
        settings: SwapSettings,
        turns: Turns,
        now_s: float,
    ) -> None:
        self._states, self._rooms, self._requests = states, rooms, requests
        self._settings, self._turns, self._now_s = settings, turns, now_s
        self.budget = Budget(rooms, states.values())
        self.actions: list[Action] = []
        self.again_s = inf
        self.room: dict[str, dict[str, int]] = {}
        self.guaranteed: dict[str, set[str]] = {}
        self.short: set[str] = set()
        self.pool_waits: dict[str, PoolWait] = {}
        self._blocked: set[str] = set()
        """GPUs on which an earlier one in the order waits until others give way."""
        self._by_worth: list[ContainerState] | None = None
        for state in states.values():
            state.has_turn = state.has_turn and state.keeps_turn(now_s)
        guaranteed, turn_requests = self._sort_requests()
        for gpu, soon in self.budget.soon.items():
            if soon < 0:
                self._make_room(None, {gpu: 0}, within=True)
        self._serve_guarantees(guaranteed)
        self._take_turns(turn_requests)
        self._refuse_late(turn_requests)
        self._cancel_needless()

    def _sort_requests(self) -> tuple[list[MemoryRequest], dict[str, list[MemoryRequest]]]:
        """Those within guarantees, and the others by container, without those that are refused."""
        ahead: dict[tuple[str, str], int] = {}
        guaranteed: list[MemoryRequest] = []
        others: dict[str, list[MemoryRequest]] = {}
        for request in list(self._requests.values()):
            one = self._states[request.name].memory.get(request.gpu)
            if one is None:
                self._refuse(request, f"the container has no GPU {request.gpu}")
                continue
            key = request.name, request.gpu
            if one.used + ahead.get(key, 0) + request.bytes <= one.guarantee:
                ahead[key] = ahead.get(key, 0) + request.bytes
                guaranteed.append(request)
                self.budget.claimed[request.gpu] += request.bytes
            elif why := self._hopeless(request):
                self._refuse(request, why)
            else:
                others.setdefault(request.name, []).append(request)
                self.again_s = min(self.again_s, self._until_s(request))
        return guaranteed, others

    def _hopeless(self, request: MemoryRequest) -> str:
        """Why a request above the guarantee fails now; empty if it may wait."""
        state, one = self._states[request.name], self._states[request.name].memory[request.gpu]
        if one.used + request.bytes > one.limit:
            return f"{one.used} of {one.limit} bytes of GPU {request.gpu} are used"
        if state.able is False:
            return "the container cannot swap, so it gets no more memory above its guarantee"
        return ""

    def _is_late(self, request: MemoryRequest) -> bool:
        return self._now_s >= self._until_s(request)

    def _refuse_late(self, requests: Mapping[str, list[MemoryRequest]]) -> None:
        """After all were served: one that may not wait gets what is free."""
        for request in [one for of in requests.values() for one in of]:
            if request.id in self._requests and self._is_late(request):
                waited = self.pool_waits.pop(request.name, None)
                self._refuse(request, waited.text if waited else "no memory above the guarantee became free in time")

    def _until_s(self, request: MemoryRequest) -> float:
        """When it is refused. Whether a container that has just started can swap is known within a moment: it is waited for in any case."""
        if self._states[request.name].able is None:
            return max(request.until_s, request.came_s + self._settings.able_within_s)
        return request.until_s

    def _more_excess(self, request: MemoryRequest) -> int:
        one = self._states[request.name].memory[request.gpu]
        return max(0, one.used + request.bytes - one.guarantee) - one.excess

    def _refuse(self, request: MemoryRequest, reason: str) -> None:
        self.actions.append(Refuse(request.id, reason))
        self._end(request)

    def _end(self, request: MemoryRequest) -> None:
        del self._requests[request.id]
        self._states[request.name].pending -= 1

    def _serve_guarantees(self, requests: list[MemoryRequest]) -> None:
        """Containers that are within their guarantees come back, and get what they request within them, in the order of arrival."""
        for state in [state for state in self._states.values() if state.paused and state.within_guarantee]:
            self._come_back(state, within=True)
        for request in requests:
            enough = self._make_room(self._states[request.name], {request.gpu: request.bytes}, within=True)
            if self._grant(request):
                continue
            self.guaranteed.setdefault(request.gpu, set()).add(request.name)
            if not enough:
                self.short.add(request.gpu)

    def _grant(self, request: MemoryRequest) -> bool:
        """Grants it if the memory is free now. Reserves the memory in any case."""
        gpu, free = request.gpu, self.budget.now[request.gpu] >= request.bytes
        self.budget.reserve(gpu, request.bytes, request.bytes)
        if free:
            self.budget.pool[gpu] -= self._more_excess(request)
            one = self._states[request.name].memory[gpu]
            if request.elastic:
                one.elastic += request.bytes
            else:
                one.resident += request.bytes
            self.actions.append(Grant(request.id))
            self._end(request)
        return free

    def _take_turns(self, requests: Mapping[str, list[MemoryRequest]]) -> None:
        """Containers that lack memory above their guarantees, in the order of their turns."""
        wanting = [
            state
            for state in self._states.values()
            if (state.direction == "in" or (state.wants(self._now_s) and (state.paused or state.name in requests)))
            and not (state.paused and state.within_guarantee)
        ]
        for state in sorted(wanting, key=lambda state: self._turns.place(state, self._now_s)):
            if state.paused:
                self._come_back(state, within=False)
            else:
                for request in requests.get(state.name, ()):
                    self._request(state, request)

    def _come_back(self, state: ContainerState, *, within: bool) -> None:
        """Make room for all memory of a container and bring it back, or note that it waits."""
        need = {gpu: one.away + one.leaving for gpu, one in state.memory.items() if one.away or one.leaving}
        returning = state.direction == "in"
        if not (within or self.fits(state)) or not (returning or self._can_order(state, need)):
            return
        behind = not (within or state.has_turn or self._blocked.isdisjoint(need))
        if behind and any(self.budget.soon[gpu] < bytes_ for gpu, bytes_ in need.items()):
            return
        enough = self._make_room(state, need, within=within)
        if not enough and within:
            self._wait(state.name, need)
        elif not enough and not returning:
            self._blocked.update(need)
            return
        self._begin_turn(state)
        may_take = self._reserve(state, need)
        if state.direction is None and enough:
            state.begin_order("in", need)
            state.fed, state.lent = self._turns.starves(state, self._now_s), behind
            self.actions.append(SwapIn(state.name))
        if state.direction == "in":
            self.room[state.name] = may_take
        elif state.direction == "out" and not state.cancelled:
            self._cancel(state)

    def _reserve(self, state: ContainerState, need: Mapping[str, int]) -> dict[str, int]:
        """Reserve what a container needs to come back. Returns GPU -> what it may take now."""
        may_take = {}
        for gpu, bytes_ in need.items():
            away = state.memory[gpu].away
            may_take[gpu] = max(0, min(away, self.budget.now[gpu]))
            self.budget.reserve(gpu, away, bytes_)
        return may_take

    def _wait(self, name: str, gpus: Iterable[str]) -> None:
        """All that can give way on these GPUs is not enough for what the container's guarantee covers."""
        self.short.update(gpus)
        for gpu in gpus:
            self.guaranteed.setdefault(gpu, set()).add(name)

    def _begin_turn(self, state: ContainerState) -> None:
        if not state.has_turn:
            state.has_turn = True
            self._turns.bound_credit(state, self._states.values(), self._now_s)

    def _request(self, state: ContainerState, request: MemoryRequest) -> None:
        """A request above the guarantee: free memory at once, another's memory in its turn."""
        gpu = request.gpu
        if not self._rooms[gpu].ready or not state.able:
            return
        if (more := self._more_excess(request)) > self.budget.pool[gpu]:
            wait = PoolWait(gpu, more, self.budget.pool[gpu], self._rooms[gpu].pool)
            if self._settings.pool_full == "refuse":
                self._refuse(request, wait.text)
            else:
                self.pool_waits.setdefault(state.name, wait)
            return
        if self._is_late(request) and self.budget.now[gpu] < request.bytes:
            return  # nobody gives way to it any more
        if self.budget.soon[gpu] < request.bytes:
            behind = gpu in self._blocked and not state.has_turn
            if behind or not self.budget.could_fit(state, gpu, request.bytes):
                return
            if not self._make_room(state, {gpu: request.bytes}, within=False):
                self._blocked.add(gpu)
                return
            self._begin_turn(state)
            state.came_in_s, state.lent = self._now_s, False
        self._grant(request)

    def fits(self, state: ContainerState) -> bool:
        """Whether a container's memory could come back if all others gave way."""
        return all(self.budget.could_fit(state, gpu) for gpu, one in state.memory.items() if one.away or one.leaving)

    def _can_order(self, state: ContainerState, gpus: Mapping[str, int]) -> bool:
        if self._now_s < state.retry_at_s:
            self.again_s = min(self.again_s, state.retry_at_s)
            return False
        return all(self._rooms[gpu].ready for gpu in gpus)

    def _make_room(self, owner: ContainerState | None, need: Mapping[str, int], *, within: bool) -> bool:
        """Order others to give way as far as the memory that will be free is short of `need`. False if that is not enough: then only for
        a need `within` a guarantee anything is ordered. Without an owner the GPU itself is short."""
        short = {gpu: bytes_ - self.budget.soon[gpu] for gpu, bytes_ in need.items() if self.budget.soon[gpu] < bytes_}
        if not short:
            return True
        candidates = []
        for state in self._candidates():
            can = {gpu: one.swappable for gpu in short if (one := state.memory.get(gpu)) is not None and one.swappable}
            if not can or state is owner or state.direction == "out" or not self._can_order(state, can):
                continue
            if within or owner is None or self._gives_way(state, owner):
                candidates.append((state.name, can))
        enough = True
        if within:
            most = {gpu: sum(can.get(gpu, 0) for _, can in candidates) for gpu in short}
            enough = all(most[gpu] >= missing for gpu, missing in short.items())
            short = {gpu: min(missing, most[gpu]) for gpu, missing in short.items() if most[gpu]}
        chosen = choose(short, candidates)
        for victim, gpus in (chosen or {}).items():
            self._swap_out(self._states[victim], gpus)
        return chosen is not None and enough

    def _candidates(self) -> list[ContainerState]:
        """Those that can swap and are not swapped out yet; the one that gives way first at the front."""
        if self._by_worth is None:
            able = (state for state in self._states.values() if state.able and state.direction != "out")
            self._by_worth = sorted(able, key=lambda state: self._turns.worth(state, self._now_s))
        return self._by_worth

    def _gives_way(self, state: ContainerState, to: ContainerState) -> bool:
        if not self.fits(state):
            return True  # it cannot run anyway
        at_s = self._turns.gives_way_s(state, to, self._now_s)
        if at_s <= self._now_s + PRECISION_S:
            return True
        self.again_s = min(self.again_s, at_s)
        return False

    def _swap_out(self, state: ContainerState, gpus: dict[str, int]) -> None:
        state.begin_order("out", gpus)
        state.fed = state.lent = state.has_turn = False
        self.room.pop(state.name, None)
        for gpu, bytes_ in gpus.items():
            self.budget.soon[gpu] += bytes_
        self.actions.append(SwapOut(state.name, gpus))

    def _cancel(self, state: ContainerState) -> None:
        state.cancel()
        self.actions.append(CancelSwapOut(state.name))

    def _cancel_needless(self) -> None:
        """What still leaves and nobody needs any more stays."""
        for state in [state for state in self._states.values() if state.direction == "out"]:
            leaving = {gpu: one.leaving for gpu, one in state.memory.items() if one.leaving}
            if leaving and all(self.budget.soon[gpu] >= bytes_ for gpu, bytes_ in leaving.items()):
                for gpu, bytes_ in leaving.items():
                    self.budget.soon[gpu] -= bytes_
                self._cancel(state)
