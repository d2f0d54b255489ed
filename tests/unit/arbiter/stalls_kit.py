"""A real `NodeScheduler` with its GPU's thread, on a simulated clock: the arbiter stops for a while, the GPU and the processes go on.

The thread is not started: the simulation brings it round when it would wake. Calls to the driver take as long as measured on an H200.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf

import pytest

from arbiter.gputime.suspend_thread import SuspendThread
from arbiter.stalls import Pulse
from tests.unit.arbiter.gputime_kit import A, Container, Driver, GpuTimeNode
from vgpu.protocol import wire
from vgpu.protocol.wire import Activity, ActivityKind

SUSPEND_S, RESUME_S = 0.0006, 0.0003
ROUND_S = 50e-6
"""Of the thread, beside its calls."""
STALE_S, CHECK_S = 0.6, 0.2
"""Of the library's watchdog."""
START_S = 1000.0


@dataclass
class Program:
    """A process that always has work, or computes for `kernel_s`, waits for that, and pauses."""

    container: Container
    cap: float
    kernel_s: float = inf
    pause_s: float = 0.0
    reports: bool = True
    """Its library reports that it resumed itself."""
    left_s: float = 0.0
    again_at_s: float = -inf
    ran_s: float = 0.0
    looked_at_s: float = 0.0
    resumes: int = 0

    def sends(self, what: ActivityKind, value: int = 0) -> None:
        with suppress(BlockingIOError):  # the arbiter does not read: the library drops it, too
            self.container.send(Activity(what, value))

    @property
    def page_beat_s(self) -> float:
        return self.page[wire.GPU_TIME_AT // 8] / 1000

    @property
    def page(self) -> memoryview:
        return self.container.node.pages[self.container.name]._numbers

    def starts(self, at_s: float) -> None:
        if self.left_s == 0 and at_s >= self.again_at_s:
            self.left_s = self.kernel_s
            self.sends(ActivityKind.WORK)

    def runs(self, seconds: float, part: float, at_s: float) -> None:
        self.ran_s += seconds * part
        self.left_s -= seconds * part
        if self.left_s <= 1e-9:
            self.left_s, self.again_at_s = 0.0, at_s + self.pause_s
            self.sends(ActivityKind.IDLE)

    def next_s(self, at_s: float, part: float) -> float:
        """When it does something next."""
        if self.left_s == 0:
            return max(at_s, self.again_at_s)
        return at_s + self.left_s / part if part else inf

    def watches(self, driver: Driver, at_s: float) -> None:
        """As the library does five times a second."""
        if at_s < self.looked_at_s + CHECK_S:
            return
        self.looked_at_s = at_s
        off = self.page[wire.GPU_TIME_AT // 8 + 1] & 1
        if off and at_s > self.page_beat_s + STALE_S:
            if self.reports:
                self.sends(ActivityKind.RESUMED, wire.ABOUT_TO)
            driver.goes_on_by_itself(self.container)
            if self.reports:
                self.sends(ActivityKind.RESUMED)
            self.resumes += 1


class Simulation:
    """One GPU, an arbiter that can be stopped, and programs."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver, self.chance = driver, random.Random(seed)
        self.now_s = START_S
        self.node = GpuTimeNode(clock=lambda: self.now_s, watchdog_s=0.1)
        self.pulse = self.node.scheduler.pulse
        self.pulse.wake()
        self.programs: list[Program] = []
        self.stopped = False
        self.in_call_s = self.after_call_s = 0.0
        """The next call to the driver is interrupted for so long, before it takes effect or after that."""
        driver.before = self._called

    def add(self, name: str, cap: int, kernel_s: float, pause_s: float, *, reports: bool) -> Program:
        container = self.node.container(name, core=cap)
        container.sock.setblocking(False)
        if not self.programs:
            self.suspend_thread._epoll.unregister(self.suspend_thread._timer.fd)  # it rings by this machine's clock
        program = Program(container, cap / 100, kernel_s, pause_s, reports, looked_at_s=self.now_s)
        self.programs.append(program)
        return program

    @property
    def suspend_thread(self) -> SuspendThread:
        return self.node.scheduler.suspend_threads.of(A)

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while True:
            self.suspend_thread.note_progress(self.suspend_thread._timer.at_s)
            ready = self.suspend_thread._epoll.poll(0)
            due_s = self.suspend_thread._timer.at_s
            if not ready and self.now_s < due_s:
                if self.now_s >= until_s:
                    return
                self._pass(min(due_s, until_s, self._next_s()))
                continue
            self.suspend_thread.round([(self.suspend_thread._timer.fd, 1), *ready])
            self._pass_all(self.now_s + ROUND_S)

    def stall(self, seconds: float) -> None:
        """Now: between two rounds of the thread, or in its next call to the driver."""
        self.suspend_thread.note_progress(self.suspend_thread._timer.at_s)
        self._stop(seconds)

    def stall_in_call(self, seconds: float) -> None:
        if self.chance.random() < 0.5:
            self.in_call_s = seconds
        else:
            self.after_call_s = seconds
        for _ in range(200):
            self.run(0.005)
            if not self.in_call_s and not self.after_call_s:
                return
        raise AssertionError("no call to the driver within a second")

    def _called(self, _client: int, disable: bool) -> None:
        self._pass_all(self.now_s + (SUSPEND_S if disable else RESUME_S) * self.chance.uniform(0.9, 1.2))
        if self.in_call_s:
            seconds, self.in_call_s = self.in_call_s, 0.0
            self._stop(seconds)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        answer = self.driver.ioctl(fd, request, argument)
        if self.after_call_s:
            seconds, self.after_call_s = self.after_call_s, 0.0
            self._stop(seconds)
        return answer

    def _stop(self, seconds: float) -> None:
        self.stopped = True
        self._pass_all(self.now_s + seconds)
        self.stopped = False
        if self.chance.random() < 0.5:
            self.pulse.wake()

    def _pass_all(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._pass(min(until_s, self._next_s()))

    def _parts(self) -> dict[int, float]:
        running = [at for at, one in enumerate(self.programs) if one.left_s > 0 and not self.driver.off(one.container)]
        return dict.fromkeys(running, 1 / max(1, len(running)))

    def _next_s(self) -> float:
        parts = self._parts()
        times = [one.next_s(self.now_s, parts.get(at, 0.0)) for at, one in enumerate(self.programs)]
        looks = [one.looked_at_s + CHECK_S for one in self.programs]
        return max(min(times, default=inf), self.now_s) if self.now_s >= min(looks) else min(*times, *looks)

    def _pass(self, until_s: float) -> None:
        parts, passed_s = self._parts(), until_s - self.now_s
        self.now_s = until_s
        for at, program in enumerate(self.programs):
            if at in parts:
                program.runs(passed_s, parts[at], until_s)
            program.starts(until_s)
            program.watches(self.driver, until_s)
        if not self.stopped and until_s >= self.pulse._due_s:
            self.pulse.wake()

    def close(self) -> None:
        self.driver.before = None
        self.node.close()


@contextmanager
def simulation(monkeypatch: pytest.MonkeyPatch, driver: Driver, seed: int) -> Iterator[Simulation]:
    nothing: Callable[[object], None] = lambda _: None  # noqa: E731
    monkeypatch.setattr(SuspendThread, "start", nothing)
    monkeypatch.setattr(Pulse, "start", nothing)
    made = Simulation(driver, seed)
    monkeypatch.setattr("arbiter.gputime.channels.fcntl.ioctl", made.ioctl)
    yield made
    made.close()
