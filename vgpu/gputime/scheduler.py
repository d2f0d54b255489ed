"""The GPU-time scheduler: which containers are allowed to run on the GPUs of a node now, and until when.

This module is the whole policy of GPU time. It is pure: events report what happened and when, `decide` answers which containers are allowed to
run and when to decide again. It never reads a clock, a socket or a GPU, so a recorded list of events gives the same decisions again.

The rules, in their order
    cap        A container that requested a percentage earns that part of each second as credit and pays for the time it runs. Without
               credit it is suspended. Debt carries over, so the time it gets is exact in the long run; unused credit is kept for three frames.
    urgency    Of the containers with work, class and then level decide. A more urgent container has the GPU the moment it has work.
    starvation A container that has waited too long gets one slice before all others, so urgency cannot starve a container.
    slices     Equals get time slices: least served for its weight goes first, a slice is its weight's part of a frame. Equals without caps
               and with equal weights all run: the driver slices time between them well, and slices of ours would only cost switches.
    gangs      A container with several GPUs runs on all of them or on none: its parts spin waiting for each other otherwise.
    idleness   A GPU is kept from a container with work for no longer than a switch takes, if its owner is idle: a container in its time slice
               pauses between two kernels, and would be suspended and resumed for each pause. It pays for that time. A container whose pauses
               are longer than its work, or than a switch, is not waited for. A container without work stays running or suspended as it is: a
               switch costs half a millisecond and gains nothing. Suspended and without credit it stays suspended.
    stalls     While the arbiter stands still nothing is switched. What a container runs up then makes no debt beyond three frames, costs no
               time slice and is no waiting. Every other debt stays.

A container pays only for time in which it runs and has work, at its `pace`. The container that is suspended pays for the switch, as it has the GPU
until that is done.

Units: seconds of any one clock that never goes back, percent of one GPU's time. Names of containers and GPUs are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from vgpu.api.names import CLASSES
from vgpu.gputime.container_state import EWMA, ContainerState
from vgpu.gputime.decision import Decision
from vgpu.gputime.events import Begin, Container, End, Event, Hint, Idle, Join, Late, Leave, Stalled, Switched, Work
from vgpu.gputime.timing import LITTLE_S, Settings, little_s
from vgpu.gputime.usage import Usage

LATENCY_CRITICAL: Final = CLASSES.index("latency-critical")


class GpuTimeScheduler:
    """The containers of a node and what they have had. See the module."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings if settings is not None else Settings()
        self._states: dict[str, ContainerState] = {}
        self._astir: dict[str, ContainerState] = {}
        """Those for which passing time changes anything. A node has many containers that are idle: they cost a decision next to nothing."""
        self._now_s = -inf
        self._little_s = LITTLE_S
        """A time left that is shorter is rounding."""
        self._wanted: frozenset[str] | None = None
        """Who is to be on, as decided last."""
        self.suspend_s = self._settings.suspend_s
        """How long a suspend takes, as lately measured."""

    @property
    def now_s(self) -> float:
        """Up to when everything is in the records."""
        return self._now_s

    @property
    def lead_s(self) -> float:
        """How long before an announced request the GPU is cleared."""
        return self._settings.lead_s

    def usage(self, name: str) -> Usage:
        """What a container got. KeyError when it is not here."""
        return self._states[name].usage

    def credit_s(self, name: str) -> float:
        """How long a capped container may still run; below 0 it has a debt. KeyError when it is not here."""
        return self._states[name].credit_s

    def apply(self, event: Event) -> None:
        """Take note of what happened. Events of containers that are not here are ignored: they crossed with their leaving."""
        if isinstance(event, Stalled):
            self._stalled(event)
            return
        self._advance(event.at_s)
        if isinstance(event, Join):
            self._join(event)
            return
        state = self._states.get(event.name)
        if state is None:
            return
        self._astir[event.name] = state
        match event:
            case Leave():
                del self._states[event.name], self._astir[event.name]
            case Work():
                self._work(state)
            case Idle():
                self._idle(state)
            case Hint(in_s=in_s):
                state.announced_from_s = max(event.at_s, event.at_s + in_s - self._settings.lead_s)
                state.announced_until_s = event.at_s + in_s + self._settings.hint_hold_s
                state.announced_due_s, state.worked_before = event.at_s + in_s, state.working
            case Begin():
                state.announced_from_s, state.announced_until_s = event.at_s, event.at_s + self._settings.section_s
                state.announced_due_s = inf
            case End():
                state.end_announcement()
            case Switched():
                self._switched(state, event)
            case Late(late_s=late_s):
                self._late_work(state, late_s)

    def decide(self, now_s: float) -> Decision:
        """Who is to be on from now. Cost: O(containers with work x log) plus O(GPUs), and a little for each of the others."""
        self._advance(now_s)
        self._let_rest()
        why = dict.fromkeys(self._states, "idle")
        ready = []
        for name, state in self._astir.items():
            if not state.active(self._now_s):
                continue
            if not self._solvent(state):
                why[name], state.quantum_left_s, state.waits_since_s = "no credit", 0.0, None
            else:
                ready.append(name)
        self._feed_the_starving(ready)
        on = self._choose(ready, why)
        for name in ready:
            state = self._states[name]
            if name in on:
                state.waits_since_s = None if state.on else state.waits_since_s
            elif state.waits_since_s is None:
                state.waits_since_s = now_s
        taken = {gpu for name in on for gpu in self._states[name].container.gpus}
        for name, state in self._astir.items():
            free = self._solvent(state) and taken.isdisjoint(state.container.gpus)
            if why[name] == "idle" and (state.on or free):
                on.add(name)
        self._wanted = frozenset(on.union(self._states.keys() - self._astir.keys()))
        return Decision(self._wanted, self._again_s(ready, on), why)

    def gives_way(self, name: str) -> list[str]:
        """Which of the running containers with work would be preempted if this container had work from now on; none where that takes more than a look.

        So that a switch can begin before `decide` is called: it would stop all these, and perhaps others. Valid until an event comes.
        """
        state = self._states.get(name)
        if state is None or state.cap or len(state.container.gpus) > 1 or state.active(self._now_s):
            return []
        beside = [
            (other, s) for other, s in self._astir.items() if not s.container.gpus.isdisjoint(state.container.gpus)
        ]
        rivals = [(other, s) for other, s in beside if s.active(self._now_s)]
        if any(s.slice_s or s.urgency <= state.urgency for _, s in rivals):
            return []
        return [other for other, s in rivals if s.on and s.working]

    def _let_rest(self) -> None:
        resting = [name for name, state in self._astir.items() if state.rests(self._now_s, self._credit_most_s(state))]
        for name in resting:
            del self._astir[name]

    def _join(self, event: Join) -> None:
        """Also for a container that is here and changes its class, its cap or its GPUs."""
        known = self._states.get(event.name)
        if known is not None:
            known.become(event.container)
            self._astir[event.name] = known
            known.credit_s = min(known.credit_s, self._credit_most_s(known))
            return
        state = ContainerState(event.container, 0.0, self._least_served(event.container))
        state.credit_s = state.cap * self._settings.frame_s
        self._states[event.name] = self._astir[event.name] = state

    def _work(self, state: ContainerState) -> None:
        if not state.working:
            if not state.active(self._now_s):
                # back from idleness: no saved-up right to be first, nor what was left of a time slice
                state.served, state.quantum_left_s = max(state.served, self._least_served(state.container)), 0.0
            state.begin(self._now_s)

    def _idle(self, state: ContainerState) -> None:
        if state.working and not state.worked_before and state.announced_due_s <= self._now_s:
            state.end_announcement()  # what was announced came and is done; its grace goes on
        state.end(self._now_s, self._kept_s(state))

    def _late_work(self, state: ContainerState, late_s: float) -> None:
        """It pays for what it did not pay as it went, up to what it could have saved for it, and owes no more than that with it: nobody
        enforced more in time, and from the first launch to its end much is the machine's time."""
        most_s = self._settings.frame_s * self._settings.frames_kept
        owed_s, least_s = min(late_s, most_s, self._now_s - state.paid_until_s), min(state.credit_s, -most_s)
        state.paid_until_s = self._now_s
        state.pay(max(0.0, owed_s))
        state.credit_s = max(state.credit_s, least_s)

    def _kept_s(self, state: ContainerState) -> float:
        """How long one whose work ends keeps the GPU: a request's grace, or a pause in its time slice while equals wait for the GPU."""
        if state.urgency[0] == LATENCY_CRITICAL:
            return self._settings.grace_s
        if not (state.on and state.quantum_left_s and state.pause_s < min(self.suspend_s, state.work_s)):
            return 0.0
        waiting = (other for other in self._astir.values() if other.working and other.waits_since_s is not None)
        return self.suspend_s if any(state.shares_slices_with(other) for other in waiting) else 0.0

    def _switched(self, state: ContainerState, event: Switched) -> None:
        if state.on and not event.on and not event.gate:
            state.usage.suspends += 1
            self.suspend_s += EWMA * (event.took_s - self.suspend_s)
        state.on = event.on
        if event.on:
            state.waits_since_s = None

    def _stalled(self, event: Stalled) -> None:
        """Where another GPU's thread let time pass meanwhile, it passed as things stand: nothing could be switched."""
        self._advance(event.since_s)
        early_s, crowd, before = self._now_s - event.since_s, self._crowd(), []
        for state in self._astir.values():
            if event.name in state.container.gpus:
                rate = self._rate(state, crowd) if state.on and state.active(self._now_s) else 0.0
                before.append((state, state.before(early_s, rate)))
        self._advance(event.at_s)
        for state, then in before:
            state.forgive(then, self._credit_most_s(state), event.since_s, event.at_s)

    def _least_served(self, container: Container) -> float:
        """Of those it will share the GPU with by time slices."""
        here = (state for state in self._astir.values() if state.active(self._now_s))
        return min((state.served for state in here if not state.container.gpus.isdisjoint(container.gpus)), default=0.0)

    def _advance(self, now_s: float) -> None:
        """Time passed: earn, pay and age, by how things stood until now."""
        if self._now_s == -inf:
            self._now_s, self._little_s = now_s, little_s(now_s)
        passed_s = now_s - self._now_s
        if passed_s <= 0:
            return
        self._little_s = little_s(now_s)
        crowd, late = self._crowd(), self._late()
        for name, state in self._astir.items():
            state.usage.suspended_s += 0.0 if state.on else passed_s
            if state.active(self._now_s):
                self._pass_active(state, passed_s, self._rate(state, crowd))
                if state.on and late and self._is_wanted(name) and not late.isdisjoint(state.container.gpus):
                    state.usage.clearing_s += passed_s
            if state.cap:
                state.credit_s = min(state.credit_s + state.cap * passed_s, self._credit_most_s(state))
        self._now_s = now_s

    @staticmethod
    def _rate(state: ContainerState, crowd: dict[str, int]) -> float:
        """What a second on costs."""
        return min(1 / max(crowd.get(gpu, 1) for gpu in state.container.gpus), state.container.pace)

    def _pass_active(self, state: ContainerState, passed_s: float, rate: float) -> None:
        if not state.on:
            if self._solvent(state):
                state.usage.off_s += passed_s
            else:
                state.usage.capped_s += passed_s
            return
        state.pay(passed_s * rate)
        state.paid_until_s = self._now_s + passed_s
        state.quantum_left_s = self._left(state.quantum_left_s, passed_s)
        state.slice_s = self._left(state.slice_s, passed_s)

    def _left(self, left_s: float, passed_s: float) -> float:
        """What is left; a rest that is only rounding is nothing."""
        return left_s - passed_s if left_s - passed_s > self._little_s else 0.0

    def _crowd(self) -> dict[str, int]:
        """How many containers with work are on, for each GPU: the driver slices its time between them."""
        crowd: dict[str, int] = {}
        for state in self._astir.values():
            if state.on and state.active(self._now_s):
                for gpu in state.container.gpus:
                    crowd[gpu] = crowd.get(gpu, 0) + 1
        return crowd

    def _is_wanted(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _late(self) -> set[str]:
        """GPUs on which a container with work still runs that is to be suspended."""
        states = [state for name, state in self._astir.items() if state.on and not self._is_wanted(name)]
        return {gpu for state in states if state.active(self._now_s) for gpu in state.container.gpus}

    def _credit_most_s(self, state: ContainerState) -> float:
        return state.cap * self._settings.frame_s * self._settings.frames_kept

    def _solvent(self, state: ContainerState) -> bool:
        """On, it stays until its credit pays just the suspend; off, it waits for a frame's worth: each run costs a switch."""
        if not 0 < state.cap < 1:
            return True
        if state.on:
            return state.credit_s > self.suspend_s + self._little_s
        return state.credit_s >= state.cap * self._settings.frame_s - self._little_s

    def _feed_the_starving(self, ready: Iterable[str]) -> None:
        for name in ready:
            state = self._states[name]
            since_s = state.waits_since_s
            if (
                since_s is not None
                and not state.slice_s
                and self._now_s - since_s >= self._settings.starve_after_s - self._little_s
            ):
                state.slice_s = self._settings.starve_slice_s

    def _choose(self, ready: list[str], why: dict[str, str]) -> set[str]:
        sliced = self._gpus_by_slices(ready)
        order = sorted(ready, key=self._order)
        on: set[str] = set()
        taken: dict[str, tuple[int, int] | None] = {}
        """GPU -> urgency of the containers that share it without slices, or None when one has it alone."""
        kept: dict[str, float] = {}
        """GPU -> how long it may be lent before a gang that is next in order can have it."""
        for name in order:
            state = self._states[name]
            gpus = state.container.gpus
            alone = state.slice_s > 0 or any(sliced[gpu] for gpu in gpus)
            blocked = [gpu for gpu in gpus if gpu in taken and (alone or taken[gpu] != state.urgency)]
            if blocked:
                why[name] = "waits"
                if len(gpus) > 1:
                    left_s = max(self._left_s(on, gpu) for gpu in blocked)
                    kept.update({gpu: min(left_s, kept.get(gpu, inf)) for gpu in gpus if gpu not in taken})
                continue
            lent_s = min((kept[gpu] for gpu in gpus if gpu in kept), default=inf)
            if alone:
                self._take_quantum(state, ready, lent_s)
            why[name] = "starved" if state.slice_s else "slice" if alone else "shares"
            on.add(name)
            taken.update(dict.fromkeys(gpus, None if alone else state.urgency))
        return on

    def _gpus_by_slices(self, ready: Iterable[str]) -> dict[str, bool]:
        """GPU -> must its most urgent containers get time slices on it?"""
        first: dict[str, list[ContainerState]] = {}
        for name in ready:
            state = self._states[name]
            for gpu in state.container.gpus:
                rivals = first.setdefault(gpu, [])
                if not rivals or state.urgency < rivals[0].urgency:
                    first[gpu] = [state]
                elif state.urgency == rivals[0].urgency:
                    rivals.append(state)
        return {gpu: self._unequal(states) for gpu, states in first.items()}

    @staticmethod
    def _unequal(states: list[ContainerState]) -> bool:
        weights = {state.container.weight for state in states}
        return len(weights) > 1 or any(state.cap or len(state.container.gpus) > 1 for state in states)

    def _order(self, name: str) -> tuple[bool, tuple[int, int], bool, float, str]:
        state = self._states[name]
        return not state.slice_s, state.urgency, not (state.on and state.quantum_left_s), state.served, name

    def _take_quantum(self, state: ContainerState, ready: Iterable[str], lent_s: float) -> None:
        """Go on with its time slice or start one, no longer than the GPU is lent for."""
        if state.on and state.quantum_left_s:
            return
        others = map(self._states.__getitem__, ready)
        part = state.container.weight / sum(
            other.container.weight for other in others if state.shares_slices_with(other)
        )
        state.quantum_left_s = min(lent_s, max(self._settings.quantum_least_s, part * self._settings.frame_s))

    def _left_s(self, on: Iterable[str], gpu: str) -> float:
        """How long the containers that have a GPU keep it at most."""
        return max(
            (s.quantum_left_s or inf for s in map(self._states.__getitem__, on) if gpu in s.container.gpus), default=0.0
        )

    def _again_s(self, ready: list[str], on: set[str]) -> dict[str, float]:
        wanted = {gpu for name in ready if name not in on for gpu in self._states[name].container.gpus}
        again_s: dict[str, float] = {}
        for name, state in self._astir.items():
            at_s = self._next_s(name, name in on, wanted)
            again_s.update({gpu: min(at_s, again_s.get(gpu, inf)) for gpu in state.container.gpus})
        return again_s

    def _next_s(self, name: str, on: bool, wanted: set[str]) -> float:
        """When this container alone gives cause to decide anew."""
        state, now_s = self._states[name], self._now_s
        times = [state.announced_from_s, state.announced_until_s]
        if not self._solvent(state):
            times.append(now_s + (state.cap * self._settings.frame_s - state.credit_s) / state.cap)
        if not state.active(now_s):
            return min((at for at in times if at > now_s), default=inf)
        if not state.working:
            times.append(state.kept_until_s)
        if 0 < state.cap < 1 and state.on and self._solvent(state):
            costs = state.container.pace - state.cap  # a second
            times.append(now_s + (state.credit_s - self.suspend_s) / costs if costs > 0 else inf)
        if on and state.quantum_left_s and not wanted.isdisjoint(state.container.gpus):
            times.append(now_s + state.quantum_left_s)
        if on and state.slice_s:
            times.append(now_s + state.slice_s)
        if state.waits_since_s is not None and not state.slice_s:
            times.append(state.waits_since_s + self._settings.starve_after_s)
        return min((at for at in times if at > now_s), default=inf)
