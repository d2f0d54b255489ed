"""A node's GPUs and an arbiter that carries decisions out, in simulated time.

Switches take as long as they were measured to take on an H200 (suspend 0.55-0.75 ms, resume 0.29-0.46 ms), are done one after the
other, and the GPU belongs to a container until its suspend is done. Containers that are on together get equal parts of their GPU.
Nothing here knows the policy: it obeys `Share.decide` and writes down what the GPUs really did.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec.structs import replace

from vgpu.gputime.decision import Decision
from vgpu.gputime.events import Event, Hint, Idle, Join, SchedulingParameters, Switched, Work
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.gputime.timing import Timing

LC, STANDARD, BE = "latency-critical", "standard", "best-effort"


@dataclass
class Program:
    """What a container does: `always` busy, requests at given times that need so much GPU time each, or a loop that waits for each."""

    container: SchedulingParameters
    always: bool = False
    requests: list[tuple[float, float]] = field(default_factory=list)
    hints: list[tuple[float, float]] = field(default_factory=list)
    """(when, how long ahead)."""
    loop: tuple[float, float] | None = None
    """(GPU time, pause): so long after the end of a request the next one of this length comes."""
    left_s: float = 0.0
    on: bool = True
    arrived: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.always or self.left_s > 0


class SimulatedNode:
    """Runs programs under the GPU-time scheduler until a given time. Its times begin at 0; the scheduler's clock shows `uptime_s` then."""

    def __init__(
        self, programs: dict[str, Program], settings: Timing | None = None, seed: int = 0, uptime_s: float = 0.0
    ) -> None:
        self.scheduler, self._uptime_s = GpuTimeScheduler(settings), uptime_s
        self.programs = programs
        self.spans: dict[str, list[tuple[float, float, float]]] = {name: [] for name in programs}
        """Per container (from, until, part of the GPU): busy and on."""
        self.events: list[Event] = []
        self.decisions: list[tuple[float, Decision]] = []
        self.now_s = 0.0
        self._switch: tuple[str, bool, float, float] | None = None
        self._random = random.Random(seed)
        for name, program in programs.items():
            self._report(Join(0.0, name, program.container))
            if program.always:
                self._report(Work(0.0, name))
            if program.loop:
                program.requests = [(0.0, program.loop[0])]

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            decide_again_s = inf
            if self._switch is None:
                decision = self.scheduler.decide(self._uptime_s + self.now_s)
                self.decisions.append((self.now_s, decision))
                decide_again_s = decision.decide_again_s - self._uptime_s
                assert decide_again_s > self.now_s
                self._start_switch(decision)
            self._pass(min(self._next_s(), decide_again_s, until_s))

    def on_s(self, name: str, since_s: float = 0.0, until_s: float = inf) -> float:
        """GPU time that a container had between two times."""
        return sum(max(0.0, min(b, until_s) - max(a, since_s)) * part for a, b, part in self.spans[name])

    def _report(self, event: Event) -> None:
        self.events.append(event)
        self.scheduler.apply(replace(event, at_s=self._uptime_s + event.at_s))

    def _start_switch(self, decision: Decision) -> None:
        """The containers to suspend first; then those to resume."""
        off = [name for name, program in self.programs.items() if program.on and name not in decision.on]
        on = [name for name, program in self.programs.items() if not program.on and name in decision.on]
        if off:
            self._switch = (off[0], False, self.now_s, self.now_s + self._random.uniform(0.00055, 0.00075))
        elif on:
            self._switch = (on[0], True, self.now_s, self.now_s + self._random.uniform(0.00029, 0.00046))

    def _parts(self) -> dict[str, float]:
        crowd: dict[str, int] = {}
        running = {name: program for name, program in self.programs.items() if program.on and program.busy}
        for program in running.values():
            for gpu in program.container.gpus:
                crowd[gpu] = crowd.get(gpu, 0) + 1
        return {name: 1 / max(crowd[gpu] for gpu in program.container.gpus) for name, program in running.items()}

    def _next_s(self) -> float:
        times = [self._switch[3]] if self._switch else []
        times += [program.requests[0][0] for program in self.programs.values() if program.requests]
        times += [program.hints[0][0] for program in self.programs.values() if program.hints]
        for name, part in self._parts().items():
            if not self.programs[name].always:
                times.append(self.now_s + self.programs[name].left_s / part)
        return min(times, default=inf)

    def _pass(self, until_s: float) -> None:
        until_s = max(until_s, self.now_s)
        for name, part in self._parts().items():
            program = self.programs[name]
            self.spans[name].append((self.now_s, until_s, part))
            if not program.always:
                program.left_s -= (until_s - self.now_s) * part
        self.now_s = until_s
        for name, program in self.programs.items():
            if program.arrived and not program.always and program.left_s <= 1e-12:
                program.left_s = 0.0
                program.latencies_s += [self.now_s - at for at in program.arrived]
                program.arrived.clear()
                if program.loop:
                    program.requests.append((self.now_s + program.loop[1], program.loop[0]))
                self._report(Idle(self.now_s, name))
            while program.hints and program.hints[0][0] <= self.now_s:
                self._report(Hint(self.now_s, name, program.hints.pop(0)[1]))
            while program.requests and program.requests[0][0] <= self.now_s:
                at, work_s = program.requests.pop(0)
                if not program.busy:
                    self._report(Work(self.now_s, name))
                program.left_s += work_s
                program.arrived.append(at)
        if self._switch and self._switch[3] <= self.now_s:
            name, on, began_s, ended_s = self._switch
            self.programs[name].on = on
            self._switch = None
            self._report(Switched(self.now_s, name, on, ended_s - began_s))


def container(
    service_class: str = STANDARD, cap: float = 0, weight: float = 1, gpus: str = "0", level: int = 2
) -> SchedulingParameters:
    return SchedulingParameters(frozenset(gpus), service_class, level, cap, weight)


def bursting(guaranteed: float, limit: float = 100, service_class: str = STANDARD, **more: Any) -> SchedulingParameters:
    """A container with a guarantee and a higher limit, as the arbiter weighs it. `more`: of `SchedulingParameters`."""
    gpus = more.pop("gpus", frozenset("0"))
    return SchedulingParameters(
        gpus, service_class, cap_percent=limit, weight=guaranteed, guaranteed_percent=guaranteed, **more
    )


def always(service_class: str = STANDARD, cap: float = 0, weight: float = 1, gpus: str = "0") -> Program:
    return Program(container(service_class, cap, weight, gpus), always=True)


def requests(service_class: str, period_s: float, work_s: float, until_s: float, cap: float = 0) -> Program:
    times = [(0.1 + at * period_s, work_s) for at in range(int((until_s - 0.1) / period_s))]
    return Program(container(service_class, cap), requests=times)


def scheduler_with(**containers: SchedulingParameters) -> GpuTimeScheduler:
    scheduler = GpuTimeScheduler()
    for name, one in containers.items():
        scheduler.apply(Join(0.0, name, one))
    return scheduler


def looping(cap: float, pause_s: float, work_s: float = 0.0014) -> Program:
    """One that waits for each kernel, as a loop with a synchronise does."""
    return Program(container(STANDARD, cap, weight=cap or 1), loop=(work_s, pause_s))
