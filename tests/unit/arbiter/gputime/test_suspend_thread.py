"""The thread of one GPU with a double of what it calls: which switches a round makes, and what is locked meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counters import GpuTimeCounters
from arbiter.gputime.suspend_host import SuspendHost
from arbiter.gputime.suspend_plan import SuspendPlan
from arbiter.gputime.suspend_thread import SuspendThread
from arbiter.gputime.timer import now_s
from arbiter.gputime.watchdog import Watchdog
from arbiter.stalls import Pulse
from vgpu.gputime.scheduler import GpuTimeScheduler

GPU = "GPU-0"


class Switched:
    """A container that notes each switch, and whether the scheduler's lock was held in it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.switches: list[tuple[str, bool, bool]] = []
        self.calls: list[Callable[[], None]] = []
        """To be made in each switch, before and after a call of the driver has returned."""

    def switch(self, gpu: str, on: bool, called: Callable[[], None]) -> int:
        """The driver's answer."""
        self.switches.append((gpu, on, self._lock.locked()))
        for call in self.calls:
            call()
            called()
        return 0


class FixedDecisions:
    """A scheduler that wants these switches, one after the other."""

    def __init__(self, *wanted: bool) -> None:
        self.clock: Callable[[], float] = now_s
        self.lock = threading.Lock()
        self.pulse, self.policy, self.counters = Pulse(now_s), GpuTimeScheduler(), GpuTimeCounters()
        self.suspend_plan = SuspendPlan(0.0)
        self.watchdog = Watchdog(lambda _: (), self.counters, 0.0)
        self.container = Switched(self.lock)
        self.wanted = list(wanted)
        self.noted: list[tuple[str, bool]] = []

    def step(self, gpu: str) -> tuple[GpuTimeContainer, bool] | None:
        """The next one, under the lock."""
        assert self.lock.locked(), f"what to switch on {gpu} is decided under the lock"
        return (cast(GpuTimeContainer, self.container), self.wanted.pop(0)) if self.wanted else None

    def switched(self, container: Any, on: bool, status: int, took_s: float) -> None:
        """It was done."""
        assert self.lock.locked()
        assert (container, status) == (self.container, 0)
        assert took_s >= 0
        self.noted.append(("switched", on))

    def plan_suspends(self, gpu: str) -> None:
        """Nothing is left to do."""
        self.noted.append((gpu, self.lock.locked()))

    def decide_again_s(self, _: str) -> float:
        """When the thread is to come again."""
        return now_s() + 60

    def beat(self, _: str, late: bool) -> bool:
        """No container looks."""
        return late


@pytest.fixture
def decisions() -> FixedDecisions:
    return FixedDecisions(False, True)


@pytest.fixture
def thread(decisions: FixedDecisions) -> Iterator[SuspendThread]:
    made = SuspendThread(GPU, cast(SuspendHost, decisions))
    yield made
    if not made._stopping:
        made.stop()


def test_a_round_makes_the_switches_that_are_decided_in_their_order_and_without_the_lock(
    thread: SuspendThread, decisions: FixedDecisions
) -> None:
    thread.round([])
    assert decisions.container.switches == [(GPU, False, False), (GPU, True, False)]
    assert decisions.noted == [("switched", False), ("switched", True), (GPU, True)]


def test_a_round_with_nothing_to_switch_computes_orders_and_calls_no_driver(
    thread: SuspendThread, decisions: FixedDecisions
) -> None:
    decisions.wanted.clear()
    thread.round([])
    assert decisions.container.switches == []
    assert decisions.noted == [(GPU, True)]


def test_a_thread_that_was_stopped_is_woken_and_asked_without_an_error(
    thread: SuspendThread, decisions: FixedDecisions
) -> None:
    """As by the thread of another GPU of a container with several, which is stopped after it."""
    thread.stop()
    thread.wake()
    assert thread.unread(cast(GpuTimeContainer, decisions.container)) == set()


@dataclass
class Time:
    """A clock that is set."""

    at_s: float = 100.0

    def __call__(self) -> float:
        return self.at_s

    def passes(self, seconds: float) -> None:
        self.at_s += seconds


def test_a_thread_that_sleeps_is_overdue_from_when_it_was_to_wake_and_not_since_its_last_round() -> None:
    decisions, time = FixedDecisions(), Time()
    decisions.clock = time
    thread = SuspendThread(GPU, cast(SuspendHost, decisions))
    thread.round([])
    thread.note_progress(time.at_s + 0.2)
    assert thread.overdue_s(time.at_s + 0.2) == 0.0
    assert thread.overdue_s(time.at_s + 0.25) == pytest.approx(0.05)
    thread.stop()


def test_a_thread_is_overdue_from_its_last_call_of_the_driver_and_not_from_the_beginning_of_a_long_switch() -> None:
    decisions, time, overdue_s = FixedDecisions(False), Time(), []
    decisions.clock = time
    thread = SuspendThread(GPU, cast(SuspendHost, decisions))

    def call() -> None:
        time.passes(0.1)
        overdue_s.append(thread.overdue_s(time.at_s))

    decisions.container.calls = [call] * 7
    thread.round([])
    assert overdue_s == pytest.approx([0.1] * 7)
    assert thread.overdue_s(time.at_s) == 0.0
    thread.stop()
