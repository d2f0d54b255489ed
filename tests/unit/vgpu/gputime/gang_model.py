"""GPUs whose switches are made by a thread each, and programs whose kernels on several GPUs spin until those on the others run: in simulated time.

Switches take as long as in `gpu_model`; a thread begins one up to 0.15 ms after it is due, as a thread that sleeps. A program with several GPUs advances only while
it runs on all of them. What a GPU spends on it otherwise is lost to skew. `together=False`: the obvious way, each GPU resumes what it is to run as soon as it can.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from tests.unit.vgpu.gputime.gpu_model import container
from vgpu.gputime.events import Event, Idle, Join, Leave, SchedulingParameters, Switched, Work
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.gputime.switch_order import DueSwitch, next_switch

SUSPEND_S, RESUME_S, WAKE_S = (0.00055, 0.00075), (0.00029, 0.00046), (0.00002, 0.00015)


@dataclass
class Job:
    """A container. `period_s`: 0 = always busy; else a request of `work_s` comes that often, and the next after it is done."""

    container: SchedulingParameters
    period_s: float = 0.0
    work_s: float = 0.0
    left_s: float = 0.0
    next_s: float = inf
    on: set[str] = field(default_factory=set)
    """GPUs on which it runs, or may."""
    shown_on: bool = True
    ran_s: float = 0.0
    """Time in which it advanced: it had work and ran on all of its GPUs."""
    skew_s: float = 0.0
    """GPU time that it took without advancing."""

    @property
    def busy(self) -> bool:
        return not self.period_s or self.left_s > 0


@dataclass
class _Switch:
    name: str
    on: bool
    began_s: float
    ends_s: float


class GangNode:
    """Runs jobs until a given time."""

    def __init__(self, jobs: dict[str, Job], seed: int = 0, *, together: bool = True) -> None:
        self.jobs, self.scheduler, self.now_s = jobs, GpuTimeScheduler(), 0.0
        self.gpus = sorted({gpu for job in jobs.values() for gpu in job.container.gpus})
        self._random, self._together = random.Random(seed), together
        self._switches: dict[str, _Switch] = {}
        self._wanted: frozenset[str] = frozenset(jobs)
        for name, job in jobs.items():
            job.on, job.next_s = set(job.container.gpus), job.period_s * self._random.random() if job.period_s else inf
            self._tell(Join(0.0, name, job.container))
            if not job.period_s:
                self._tell(Work(0.0, name))

    @property
    def gpu_time_s(self) -> float:
        return self.now_s * len(self.gpus)

    @property
    def skew_s(self) -> float:
        return sum(job.skew_s for job in self.jobs.values())

    def end(self, name: str) -> None:
        """Its processes end."""
        del self.jobs[name]
        self._switches = {gpu: one for gpu, one in self._switches.items() if one.name != name}
        self._tell(Leave(self.now_s, name))

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            decision = self.scheduler.decide(self.now_s)
            assert decision.decide_again_s > self.now_s
            self._wanted = decision.on
            for gpu in self.gpus:
                if gpu not in self._switches and (due := next_switch(gpu, self._due)) is not None:
                    least_s, most_s = RESUME_S if due.on else SUSPEND_S
                    began_s = self.now_s + self._random.uniform(*WAKE_S)
                    ends_s = began_s + self._random.uniform(least_s, most_s)
                    self._switches[gpu] = _Switch(due.name, due.on, began_s, ends_s)
            self._pass(min(self._next_s(), decision.decide_again_s, until_s))

    def _due(self, gpu: str) -> Iterator[DueSwitch]:
        """A switch that is being made is due until it has ended."""
        for name, job in self.jobs.items():
            wanted = name in self._wanted
            if gpu in job.container.gpus and wanted is not (gpu in job.on):
                yield DueSwitch(name, wanted, job.container.gpus, at_once=not self._together)

    def _parts(self) -> dict[str, float]:
        """How fast each job with work advances."""
        crowd: dict[str, int] = {}
        for job in self.jobs.values():
            for gpu in job.on if job.busy else ():
                crowd[gpu] = crowd.get(gpu, 0) + 1
        running = {name: job for name, job in self.jobs.items() if job.busy and job.on == job.container.gpus}
        return {name: 1 / max(crowd[gpu] for gpu in job.on) for name, job in running.items()}

    def _next_s(self) -> float:
        times = [one.ends_s for one in self._switches.values()] + [job.next_s for job in self.jobs.values()]
        times += [
            self.now_s + self.jobs[name].left_s / part
            for name, part in self._parts().items()
            if self.jobs[name].period_s
        ]
        return min(times)

    def _pass(self, until_s: float) -> None:
        passed_s, parts = until_s - self.now_s, self._parts()
        for name, job in self.jobs.items():
            if name in parts:
                job.ran_s += passed_s * parts[name]
                job.left_s -= passed_s * parts[name]
            elif job.busy:
                job.skew_s += passed_s * len(job.on)
        self.now_s = until_s
        for name, job in self.jobs.items():
            if job.period_s and job.left_s <= 1e-12 and job.next_s == inf:
                job.left_s, job.next_s = 0.0, self.now_s + job.period_s
                self._tell(Idle(self.now_s, name))
            if job.next_s <= self.now_s:
                job.left_s, job.next_s = job.work_s, inf
                self._tell(Work(self.now_s, name))
        for gpu, one in list(self._switches.items()):
            if one.ends_s <= self.now_s:
                del self._switches[gpu]
                self._switched(gpu, one)

    def _switched(self, gpu: str, one: _Switch) -> None:
        job = self.jobs[one.name]
        job.on = job.on | {gpu} if one.on else job.on - {gpu}
        on = True if job.on == job.container.gpus else False if not job.on else job.shown_on
        if on is not job.shown_on:
            job.shown_on = on
            self._tell(Switched(self.now_s, one.name, on, one.ends_s - one.began_s))

    def _tell(self, event: Event) -> None:
        self.scheduler.apply(event)


def busy(service_class: str = "standard", gpus: str = "0", cap: float = 0) -> Job:
    """Each character of `gpus` is a GPU."""
    return Job(container(service_class, cap, gpus=gpus))


def requests(service_class: str, gpus: str, period_s: float, work_s: float) -> Job:
    return Job(container(service_class, gpus=gpus), period_s, work_s)
