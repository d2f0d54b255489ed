"""Detects when the arbiter itself did not run: stopped, frozen, in a paused machine, or without a processor.

A GPU's thread notices if it wakes later than it was due. During a call to the driver it has no due time, because a call may take long by
itself. So one further thread only wakes up periodically: if it is late, the whole process did not run. It rests while
no thread calls the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

import structlog

STALL_S: Final = 0.25
"""A delay of this length is a stall. Guessed: five frames; a thread of a busy machine wakes some milliseconds late."""
PERIOD_S: Final = 0.1
"""Between two wake-ups of the pulse. Guessed: less than half a stall."""
AWAKE_S: Final = 1.0
"""The pulse continues for this long after the beginning of a call to the driver. Guessed: on a busy GPU the next one follows within a frame."""
_log = structlog.get_logger()


class Pulse:
    """See the module. Without its thread a stall during a call to the driver counts as the call's own time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._closing = threading.Event()
        self._due_s = inf
        self._needed_until_s = -inf
        self._rests = False
        self._called, self._resting = threading.Event(), threading.Lock()
        self._last = (-inf, -inf)
        """The beginning and the end of the last stall."""
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Begin, once."""
        if self._thread.ident is None and not self._closing.is_set():
            try:
                self._thread.start()
            except RuntimeError as error:
                _log.warning(
                    "stalls during calls to the driver cannot be distinguished from slow calls", reason=str(error)
                )

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._called.set()
        if self._thread.ident is not None:
            self._thread.join()

    def stalled_since(self, began_s: float, at_s: float) -> float | None:
        """The beginning of a stall that lasted until `at_s`; None = no known stall. Call it right after the action that began at `began_s`."""
        due_s, (since_s, until_s) = self._due_s, self._last
        if at_s - due_s >= STALL_S:  # this thread runs again before the pulse's
            return max(began_s, due_s - PERIOD_S)
        return max(began_s, since_s) if until_s > began_s else None

    def expect(self, began_s: float) -> None:
        """A call to the driver begins: from now on the pulse has a due time, whether its thread has woken or not."""
        self._needed_until_s = began_s + AWAKE_S
        if self._rests:
            with self._resting:
                if self._rests:
                    self._rests, self._due_s = False, began_s + PERIOD_S
                    self._called.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.wake()
            if self._may_rest():
                self._called.wait()
            else:
                self._closing.wait(PERIOD_S)

    def _may_rest(self) -> bool:
        """First publish the rest, then check for an expected call: so a call that begins meanwhile either reads the former or is found by the latter."""
        with self._resting:
            self._called.clear()
            self._rests = True
            self._rests = self._clock() >= self._needed_until_s and not self._closing.is_set()
            self._due_s = inf if self._rests else self._due_s
            return self._rests

    def wake(self) -> None:
        """One wake-up."""
        at_s = self._clock()
        if at_s - self._due_s >= STALL_S:
            self._last = self._due_s - PERIOD_S, at_s
        self._due_s = at_s + PERIOD_S


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall that has ended."""

    since_s: float
    until_s: float


class Stalls:
    """The last stall of each GPU's thread, and the number of stalls."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._last: dict[str, Stall] = {}

    def note(self, gpu: str, since_s: float, until_s: float) -> None:
        """Record a stall of a GPU's thread."""
        self.count += 1
        self.seconds += until_s - since_s
        self._last[gpu] = Stall(since_s, until_s)

    def ended_s(self, gpus: Iterable[str], at_s: float) -> float:
        """How long ago the last stall of any of these ended; inf = there was none."""
        return min((at_s - self._last[gpu].until_s for gpu in gpus if gpu in self._last), default=inf)
