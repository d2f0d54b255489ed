"""The GPU-time scheduler: which containers are allowed to run on the GPUs of a node now, and until when.

This module is the whole policy of GPU time. It is pure: events report what happened and when; `decide` returns which containers are allowed to
run and when to decide again. It never reads a clock, a socket or a GPU, so a recorded list of events leads to the same decisions again.

The rules, in their order
    cap        A container that requested a percentage earns that part of each second as credit and pays for the time it runs. Without
               credit it is suspended. Debt carries over, so the time it gets is exact in the long run; unused credit is kept for three frames.
    burst      A container whose guarantee is less than its cap earns and pays a second credit, at its guaranteed part. With that credit each rule
               treats it as any other container with a cap. Without it, and below its cap, it comes after every container that has such credit or no
               cap, whatever the classes and levels: it runs in time that no other needs, and shares that by weight with others like it. It pays for
               that time from the credit of its cap alone. It has no grace there, no priority by an announcement and no slice against starvation.
    urgency    Among the containers with work, class and then level decide. A more urgent container gets the GPU the moment it has work.
    starvation A container that has waited too long gets one slice before all others, so urgency cannot starve a container.
    slices     Containers of equal urgency get time slices: the one served least for its weight runs first, and a slice is its weight's part of
               a frame. Equals without caps and with equal weights all run: the driver slices time between them well, and further slices
               would only cost switches.
    several    A container with several GPUs runs on all of them or on none: its parts spin waiting for each other otherwise. Its time slice begins when
               it runs on all. If a GPU of it does not answer while it is suspended, it is in no decision, so that its other GPUs serve others.
    idleness   An idle container keeps the GPU from one with work for no longer than a switch takes: in its time slice a container pauses
               between two kernels, and would be suspended and resumed for each pause. It pays for that time. If its pauses are usually longer
               than its work, or than a switch, it does not keep the GPU. Beside a container above its guarantee, each of the others
               does so, and pays nothing for it. A container without work stays running or suspended: a
               switch costs half a millisecond and gains nothing. Suspended and without credit it stays suspended.
    blocks     A container whose memory is swapped out, or is about to be, never runs, whatever the other rules say. It does not pay for that time,
               does not count as waiting, and has no priority for it afterwards.
    stalls     While the arbiter is stalled, nothing is switched. The time that a container then runs adds at most three frames of debt, uses no
               time slice and does not count as waiting. Every other debt stays.

A container pays only for time in which it runs and has work, at its `pace`. The suspended container pays for the switch, because it uses the GPU
until the switch is complete.

Units: seconds of any one clock that never goes back, percent of one GPU's time. The caller chooses the names of containers and GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from vgpu.api.names import CLASSES
from vgpu.gputime.choice import choose
from vgpu.gputime.container_state import ABOVE, EWMA, ContainerState, crowd_of
from vgpu.gputime.decision import Decision
from vgpu.gputime.events import (
    BeginSection,
    Block,
    EndSection,
    Event,
    Hint,
    Hung,
    Idle,
    Join,
    Late,
    Leave,
    SchedulingParameters,
    Stalled,
    Switched,
    Unblock,
    Work,
)
from vgpu.gputime.guarantee import Guarantee
from vgpu.gputime.timing import LITTLE_S, Timing, little_s, time_left_s
from vgpu.gputime.usage import GpuTimeUsage

LATENCY_CRITICAL: Final = CLASSES.index("latency-critical")


class GpuTimeScheduler:
    """The containers of a node and their use of its GPUs. See the module."""

    def __init__(self, settings: Timing | None = None) -> None:
        self._settings = settings if settings is not None else Timing()
        self._states: dict[str, ContainerState] = {}
        self._astir: dict[str, ContainerState] = {}
        """Containers whose state changes as time passes. A node has many idle containers: they add almost nothing to a decision."""
        self._now_s = -inf
        self._little_s = LITTLE_S
        """A shorter remaining time is a rounding error."""
        self._wanted: frozenset[str] | None = None
        """The containers that are to run, by the last decision."""
        self.suspend_s = self._settings.suspend_s
        """Recently measured duration of a suspend."""

    @property
    def now_s(self) -> float:
        """Up to when all time is recorded."""
        return self._now_s

    @property
    def lead_s(self) -> float:
        """How long before an announced request the GPU is cleared."""
        return self._settings.lead_s

    def usage(self, name: str) -> GpuTimeUsage:
        """The GPU time of a container. KeyError if the container is unknown."""
        return self._states[name].usage

    def credit_s(self, name: str) -> float:
        """How long a capped container may still run; below 0 it has a debt. KeyError if the container is unknown."""
        return self._states[name].credit_s

    def apply(self, event: Event) -> None:
        """Record an event. Events of unknown containers are ignored: the container left before they arrived."""
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
                state.kept_free = False
            case BeginSection():
                state.announced_from_s, state.announced_until_s = event.at_s, event.at_s + self._settings.section_s
                state.announced_due_s, state.kept_free = inf, False
            case EndSection():
                state.end_announcement()
            case Switched():
                self._switched(state, event)
            case Late(late_s=late_s):
                self._late_work(state, late_s)
            case Block():
                state.block()
            case Unblock():
                state.unblock(self._least_served(state.container))
            case Hung(hung=hung):
                state.hang(self._least_served(state.container), hung=hung)

    def decide(self, now_s: float) -> Decision:
        """Which containers are to run from now on. Cost: O(containers with work x log) plus O(GPUs), and a little for each of the others."""
        self._advance(now_s)
        self._let_rest()
        why = dict.fromkeys(self._states, "idle")
        ready = []
        for name, state in self._astir.items():
            if state.barred:
                why[name] = "blocked" if state.blocked else "hung"
            elif not state.active(self._now_s):
                continue
            elif not self._solvent(state):
                why[name], state.slice_left_s, state.waits_since_s = "no credit", 0.0, None
            else:
                ready.append(name)
                self._rank(state)
        self._feed_the_starving(ready)
        on = choose(self._states, ready, why, self._settings)
        for name in ready:
            state = self._states[name]
            if name in on:
                state.waits_since_s = None if state.on else state.waits_since_s
                if state.guarantee is not None:
                    state.guarantee.runs_above = state.guarantee.above
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
        """The running containers with work that this container would preempt if it had work from now on; none if only a full decision can show that.

        With this list a switch can begin before the call of `decide`, which would suspend all of these and perhaps others. Valid until the next event.
        """
        state = self._states.get(name)
        if state is None or state.blocked or state.cap or len(state.container.gpus) > 1 or state.active(self._now_s):
            return []
        beside = [
            (other, s) for other, s in self._astir.items() if not s.container.gpus.isdisjoint(state.container.gpus)
        ]
        rivals = [(other, s) for other, s in beside if s.active(self._now_s) and not s.barred]
        if any(s.starvation_left_s or s.own_urgency <= state.urgency for _, s in rivals):
            return []
        return [other for other, s in rivals if s.on and s.working]

    def _let_rest(self) -> None:
        resting = [name for name, state in self._astir.items() if state.rests(self._now_s, self._credit_most_s(state))]
        for name in resting:
            del self._astir[name]

    def _join(self, event: Join) -> None:
        """Also for a known container that changes its class, its cap or its GPUs."""
        known = self._states.get(event.name)
        if known is not None:
            known.become(event.container)
            self._astir[event.name] = known
            self._set_guarantee(known)
            known.credit_s = min(known.credit_s, self._credit_most_s(known))
            return
        state = ContainerState(event.container, 0.0, self._least_served(event.container)[0])
        self._set_guarantee(state)
        state.credit_s = state.cap * self._settings.frame_s
        if state.guarantee is not None:
            state.guarantee.credit_s = state.guarantee.frame_credit_s
        self._states[event.name] = self._astir[event.name] = state

    def _set_guarantee(self, state: ContainerState) -> None:
        """After its parameters changed. What it owes of its guarantee it owes with a burst and without."""
        known, wanted = state.guarantee, state.container
        if not wanted.bursts:
            if known is not None:
                state.credit_s, state.guarantee = min(state.credit_s, known.credit_s), None
                state.become(wanted)
            return
        part = wanted.guaranteed_percent / 100
        frame_credit_s, credit_s = (
            part * self._settings.frame_s,
            known.credit_s if known is not None else state.credit_s,
        )
        most_s = frame_credit_s * self._settings.frames_kept
        served = known.served if known is not None else self._least_served(wanted)[1]
        state.guarantee = Guarantee(part, min(credit_s, most_s), frame_credit_s, most_s, served=served)
        if known is not None:
            state.guarantee.above, state.guarantee.runs_above = known.above, known.runs_above

    def _rank(self, state: ContainerState) -> None:
        of = state.guarantee
        if of is not None:
            state.rank(of, above=not of.lasts(on=state.on, suspend_s=self.suspend_s, little_s=self._little_s))

    def _work(self, state: ContainerState) -> None:
        if not state.working:
            if not state.active(self._now_s):
                # after idleness it has no accumulated priority and no remaining time slice
                state.catch_up(self._least_served(state.container))
                state.slice_left_s = 0.0
            state.begin(self._now_s)

    def _idle(self, state: ContainerState) -> None:
        if state.working and not state.worked_before and state.announced_due_s <= self._now_s:
            state.end_announcement()  # the announced work came and ended; its grace continues
        kept_s, state.kept_free = self._kept_s(state)
        state.end(self._now_s, kept_s)

    def _late_work(self, state: ContainerState, late_s: float) -> None:
        """The container pays for the time that it has not paid yet, up to the credit that it could have saved, and its debt grows no further: the
        arbiter enforced no more in time, and much of the time from the first launch to its end is the machine's own."""
        most_s = self._settings.frame_s * self._settings.frames_kept
        owed_s = min(late_s, most_s, self._now_s - state.paid_until_s)
        state.paid_until_s = self._now_s
        state.pay_late(max(0.0, owed_s), most_s)

    def _kept_s(self, state: ContainerState) -> tuple[float, bool]:
        """How long a container keeps the GPU after its work, and whether without paying: the grace of a request, a pause in its time slice while equals
        wait for the GPU, or a pause while containers above their guarantees wait."""
        if state.urgency[0] == LATENCY_CRITICAL:
            return self._settings.grace_s, False
        if not (state.on and state.pause_s < min(self.suspend_s, state.work_s)):
            return 0.0, False
        waiting = [
            other
            for other in self._astir.values()
            if other.working and other.waits_since_s is not None and not other.barred
        ]
        if state.slice_left_s and any(map(state.shares_slices_with, waiting)):
            return self.suspend_s, False
        free = any(map(state.precedes_burst_of, waiting))
        return (self.suspend_s, state.announced_until_s <= self._now_s) if free else (0.0, False)

    def _switched(self, state: ContainerState, event: Switched) -> None:
        if state.on and not event.on and not event.gate:
            state.usage.suspends += 1
            self.suspend_s += EWMA * (event.took_s - self.suspend_s)
        state.on = event.on
        if event.on:
            state.waits_since_s = None

    def _stalled(self, event: Stalled) -> None:
        """If another GPU's thread recorded time meanwhile, it did so for the present state: nothing could be switched."""
        self._advance(event.since_s)
        early_s, crowd, before = self._now_s - event.since_s, crowd_of(self._astir.values(), self._now_s), []
        for state in self._astir.values():
            if event.name in state.container.gpus:
                rate = state.rate(crowd) if state.on and state.active(self._now_s) else 0.0
                before.append((state, state.before(early_s, rate)))
        self._advance(event.at_s)
        for state, then in before:
            state.forgive(then, self._credit_most_s(state), event.since_s, event.at_s)

    def _least_served(self, container: SchedulingParameters) -> tuple[float, float]:
        """The least served time among the containers with which it will share the GPU by time slices, and the least above their guarantees."""
        here = [state for state in self._astir.values() if state.active(self._now_s) and not state.barred]
        here = [state for state in here if not state.container.gpus.isdisjoint(container.gpus)]
        above = (state.guarantee.served for state in here if state.guarantee is not None)
        return min((state.served for state in here), default=0.0), min(above, default=0.0)

    def _advance(self, now_s: float) -> None:
        """Record the time that passed: credit earned, time paid and waiting, by the state until now."""
        if self._now_s == -inf:
            self._now_s, self._little_s = now_s, little_s(now_s)
        passed_s = now_s - self._now_s
        if passed_s <= 0:
            return
        self._little_s = little_s(now_s)
        crowd, late = crowd_of(self._astir.values(), self._now_s), self._late()
        for name, state in self._astir.items():
            state.usage.suspended_s += 0.0 if state.on else passed_s
            if state.active(self._now_s):
                self._pass_active(state, passed_s, state.rate(crowd))
                if state.on and late and self._is_wanted(name) and not late.isdisjoint(state.container.gpus):
                    state.usage.clearing_s += passed_s
            if state.cap:
                state.credit_s = min(state.credit_s + state.cap * passed_s, self._credit_most_s(state))
            if state.guarantee is not None:
                state.guarantee.earn(passed_s)
        self._now_s = now_s

    def _pass_active(self, state: ContainerState, passed_s: float, rate: float) -> None:
        if not state.on:
            if state.barred:
                return
            if self._solvent(state):
                state.usage.off_s += passed_s
            else:
                state.usage.capped_s += passed_s
            return
        state.pay(passed_s * rate)
        state.paid_until_s = self._now_s + passed_s
        state.slice_left_s = time_left_s(state.slice_left_s, passed_s, self._little_s)
        state.starvation_left_s = time_left_s(state.starvation_left_s, passed_s, self._little_s)

    def _is_wanted(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _late(self) -> set[str]:
        """GPUs on which a container that is to be suspended still runs with work."""
        states = [state for name, state in self._astir.items() if state.on and not self._is_wanted(name)]
        return {gpu for state in states if state.active(self._now_s) for gpu in state.container.gpus}

    def _credit_most_s(self, state: ContainerState) -> float:
        return state.cap * self._settings.frame_s * self._settings.frames_kept

    def _solvent(self, state: ContainerState) -> bool:
        """A running container stays until its credit only pays for the suspend; a suspended one waits for a frame of credit: each run costs a switch."""
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
                and state.urgency != ABOVE
                and not state.starvation_left_s
                and self._now_s - since_s >= self._settings.starve_after_s - self._little_s
            ):
                state.starvation_left_s = self._settings.starve_slice_s

    def _again_s(self, ready: list[str], on: set[str]) -> dict[str, float]:
        wanted = {gpu for name in ready if name not in on for gpu in self._states[name].container.gpus}
        again_s: dict[str, float] = {}
        for name, state in self._astir.items():
            at_s = self._next_s(name, name in on, wanted)
            again_s.update({gpu: min(at_s, again_s.get(gpu, inf)) for gpu in state.container.gpus})
        return again_s

    def _next_s(self, name: str, on: bool, wanted: set[str]) -> float:
        """When this container alone requires a new decision."""
        state, now_s = self._states[name], self._now_s
        if state.barred:
            return inf
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
        if state.guarantee is not None and self._solvent(state):
            times.append(state.guarantee.changes_s(now_s, state.container.pace, self.suspend_s, on=state.on))
        if on and state.slice_left_s and not wanted.isdisjoint(state.container.gpus):
            times.append(now_s + state.slice_left_s)
        if on and state.starvation_left_s:
            times.append(now_s + state.starvation_left_s)
        if state.waits_since_s is not None and not state.starvation_left_s and state.urgency != ABOVE:
            times.append(state.waits_since_s + self._settings.starve_after_s)
        return min((at for at in times if at > now_s), default=inf)
