"""When the arbiter itself did not run: stopped, frozen, in a paused machine, or without a processor.

A thread of a GPU sees that it comes later than it was due. During a call to the driver it is due at no time, for a call may take long by
itself. So one thread more does nothing but wake up; what it slept through, the whole process slept through. It rests while
nobody calls the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

import structlog

STALL_S: Final = 0.25
"""Later by so much is a stall. Guessed: five frames; a thread of a busy machine comes some milliseconds late."""
PERIOD_S: Final = 0.1
"""Between two wake-ups of the pulse. Guessed: less than half a stall."""
AWAKE_S: Final = 1.0
"""It goes on for so long after a call to the driver began. Guessed: on a busy GPU the next one follows within a frame."""
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
        """When the process ran last before the last stall, and when that had ended."""
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
        """From when to `at_s` the process did not run; None = it ran, as far as is known. Asked right after what began at `began_s`."""
        due_s, (since_s, until_s) = self._due_s, self._last
        if at_s - due_s >= STALL_S:  # this thread is back first
            return max(began_s, due_s - PERIOD_S)
        return max(began_s, since_s) if until_s > began_s else None

    def expect(self, began_s: float) -> None:
        """A call to the driver begins: from now on it is due, whether its thread has come round or not."""
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
        """First it says that it rests, then it looks whether anybody calls: who calls meanwhile sees the one or is seen."""
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
    """One that has ended."""

    since_s: float
    until_s: float


class Stalls:
    """The last one of each GPU's thread, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._last: dict[str, Stall] = {}

    def note(self, gpu: str, since_s: float, until_s: float) -> None:
        """The thread of a GPU was not there."""
        self.count += 1
        self.seconds += until_s - since_s
        self._last[gpu] = Stall(since_s, until_s)

    def ended_s(self, gpus: Iterable[str], at_s: float) -> float:
        """How long ago the last stall of any of these ended; inf = there was none."""
        return min((at_s - self._last[gpu].until_s for gpu in gpus if gpu in self._last), default=inf)
